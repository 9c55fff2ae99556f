"""Signals reach the script once, and no process outlives its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.signal_records import records

RECORDS = records(5)
SLEEPS = """
import os, time
open(f"ready-{os.environ.get('RANK', '0')}", "w").write(str(os.getpid()))
time.sleep(120)
"""
# A shell with job control: it tells that its job was stopped, and continues it at the next line.
SHELL = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = subprocess.Popen(sys.argv[1:], process_group=0)
os.tcsetpgrp(0, job.pid)
_, status = os.waitpid(job.pid, os.WUNTRACED)
os.tcsetpgrp(0, os.getpgrp())
input(f"stopped: {os.WIFSTOPPED(status)}")
os.tcsetpgrp(0, job.pid)
os.killpg(job.pid, signal.SIGCONT)
os._exit(os.waitstatus_to_exitcode(os.waitpid(job.pid, 0)[1]))
"""
WAITS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-Sc", "input()"], stdin=subprocess.PIPE)
open(f"ready-{os.environ.get('RANK', '0')}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
child.communicate(b"\\n")
sys.exit(5 if os.environ.get("RANK", "0") == "0" else 0)
"""
QUIETLY = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT"])
def test_a_signal_reaches_the_script(
    fasttrain: Any, script: Any, until: Any, tmp_path: Path, name: str
) -> None:
    process = fasttrain.start("run", script(RECORDS), **QUIETLY)
    until((tmp_path / "ready-0").exists)
    process.send_signal(getattr(signal, name))
    assert process.wait(120) == 5, "the exit code is the script's"
    assert (tmp_path / "seen-0").read_text() == f"{name}\n"


def test_an_unhandled_signal_ends_the_script(
    fasttrain: Any, script: Any, until: Any, tmp_path: Path
) -> None:
    process = fasttrain.start("run", script(SLEEPS), **QUIETLY)
    until((tmp_path / "ready-0").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 128 + signal.SIGTERM


def test_ctrl_c_arrives_once(
    fasttrain: Any, script: Any, terminal: Any, until: Any, tmp_path: Path
) -> None:
    screen = terminal(fasttrain.argv("run", script(RECORDS), "--quiet"))
    screen.read_until(b"ready")
    # The launcher sleeps until the script has had its own: two that come together would be one.
    screen.process.send_signal(signal.SIGSTOP)
    screen.type(b"\x03")
    until((tmp_path / "seen-0").exists)
    screen.process.send_signal(signal.SIGCONT)
    assert screen.end() == 5
    assert (tmp_path / "seen-0").read_text() == "SIGINT\n"


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_z_stops_all_of_a_run_until_it_is_continued(
    fasttrain: Any, script: Any, terminal: Any, until: Any, tmp_path: Path, ranks: int
) -> None:
    several = ("--nproc-per-node", "2", "--device", "cpu", "--strategy", "none")
    argv = fasttrain.argv("run", script(WAITS), "--quiet", *several[: 6 * (ranks - 1)])
    screen = terminal([sys.executable, "-Sc", SHELL, *argv])
    until(lambda: len(list(tmp_path.glob("ready-*"))) == ranks)
    screen.type(b"\x1a")
    screen.read_until(b"stopped: True")
    (launcher,) = psutil.Process(screen.process.pid).children()
    family = [one for one in launcher.children(recursive=True) if "-IS" not in one.cmdline()]
    assert len(family) == (2 if ranks == 1 else 5), "scripts, their children, and the agent"
    until(lambda: {one.status() for one in (launcher, *family)} == {psutil.STATUS_STOPPED})
    (tmp_path / "go").touch()
    screen.type(b"\n")
    assert screen.end() == 5


def test_ctrl_z_where_no_shell_could_continue_it_is_nothing(
    fasttrain: Any, script: Any, terminal: Any, until: Any, tmp_path: Path
) -> None:
    """As under ``ssh -t``, and as the kernel has it for python alone."""
    screen = terminal(fasttrain.argv("run", script(WAITS), "--quiet"))
    until((tmp_path / "ready-0").exists)
    screen.type(b"\x1a")
    screen.read_until(b"^Z")
    (tmp_path / "go").touch()
    assert screen.end() == 5


def test_ctrl_c_ends_a_script_that_does_not_handle_it(
    fasttrain: Any, script: Any, terminal: Any
) -> None:
    path = script("import time\nprint('ready', flush=True)\ntime.sleep(60)")
    screen = terminal(fasttrain.argv("run", path))
    screen.read_until(b"ready")
    screen.type(b"\x03")
    assert screen.end() == -signal.SIGINT, "as python, so that a shell ends its loop"
    assert screen.screen.count(b"KeyboardInterrupt") == 1
    assert b" exit code 130 " in screen.screen


def test_ctrl_c_ends_a_loop_of_a_shell(fasttrain: Any, script: Any, terminal: Any) -> None:
    path = script("import time\nprint('ready', flush=True)\ntime.sleep(60)")
    loop = 'for lr in 1 2 3; do "$@" -- $lr; done; echo after'
    screen = terminal(["bash", "-c", loop, "bash", *fasttrain.argv("run", "--quiet", path)])
    screen.read_until(b"ready")
    screen.type(b"\x03")
    assert screen.end() == -signal.SIGINT
    assert screen.screen.count(b"ready\r\n") == 1  # the traceback may show the line
    assert b"after" not in screen.screen


def test_a_caller_that_ignores_sigchld(fasttrain: Any, script: Any) -> None:
    process = fasttrain.start(
        "run", script("raise SystemExit(3)"), **QUIETLY,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )  # fmt: skip
    assert process.wait(120) == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_process_outlives_a_killed_launcher(
    fasttrain: Any, script: Any, until: Any, alive: Any, tmp_path: Path, ranks: int
) -> None:
    several = ("--nproc-per-node", ranks) if ranks > 1 else ()
    process = fasttrain.start("run", script(SLEEPS), *several, **QUIETLY)
    pids = [tmp_path / f"ready-{rank}" for rank in range(ranks)]
    until(lambda: all(pid.exists() and pid.read_text() for pid in pids))
    family = psutil.Process(process.pid).children(recursive=True)
    assert {int(pid.read_text()) for pid in pids} <= {child.pid for child in family}
    process.kill()
    process.wait()
    until(lambda: not any(alive(child.pid) for child in family))


@pytest.mark.parametrize(
    ("name", "code"), [("SIGUSR1", 5), ("SIGUSR2", 5), ("SIGTERM", 128 + signal.SIGTERM)]
)
def test_a_signal_reaches_every_rank(
    fasttrain: Any, script: Any, until: Any, tmp_path: Path, name: str, code: int
) -> None:
    process = fasttrain.start("run", script(RECORDS), "--nproc-per-node", "2", **QUIETLY)
    until(lambda: (tmp_path / "ready-0").exists() and (tmp_path / "ready-1").exists())
    process.send_signal(getattr(signal, name))
    assert process.wait(120) == code
    seen = [(tmp_path / f"seen-{rank}").read_text() for rank in (0, 1)]
    assert [text.splitlines()[0] for text in seen] == [name, name]
    # Once one rank has ended with 5, torchrun may end the other with a SIGTERM.
    assert [text.count(name) for text in seen] == [1, 1]


def test_a_script_that_stays_in_the_background_does_not_hold_the_run(
    fasttrain: Any, script: Any, tmp_path: Path
) -> None:
    sleeper = f"[{sys.executable!r}, '-c', 'import time; time.sleep(60)']"
    path = script(f"import subprocess\nprint(subprocess.Popen({sleeper}).pid)")
    done = fasttrain("run", path, "--quiet", timeout_s=240)
    os.kill(int(done.stdout), signal.SIGKILL)
    assert done.returncode == 0
