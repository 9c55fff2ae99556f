"""Time to save, and its end: ctrl-C once and twice, SIGTERM, and what may outlive a run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fasttrain.launch.process.supervise import ENDED_LEFT

QUIETLY = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
SAVES = """
import time
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    open("saved", "w").close()
    raise SystemExit(7)
"""
DEAF = """
import os, signal, time
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), lambda *_: print("asked", flush=True))
print("ready", flush=True)  # first: a handler that prints may not interrupt it
open(f"ready-{os.environ.get('RANK', '0')}", "w").close()
end = time.monotonic() + 60
while time.monotonic() < end:
    time.sleep(0.1)
"""
LEAVES = """
import os, subprocess, sys
sleeper = subprocess.Popen([sys.executable, "-Sc", "import time; time.sleep(60)"],
                           start_new_session=True, env={}, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
open("left", "w").write(str(sleeper.pid))
os._exit(int(sys.argv[1]))
"""


@pytest.fixture
def receipt(only_run_dir: Any) -> Any:
    """Return the receipt of the one run."""
    return lambda: json.loads((only_run_dir() / "receipt.json").read_text())


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Any]:
    """Return the process that a script has left, and end it behind the test."""

    def find() -> psutil.Process | None:
        try:
            return psutil.Process(int((tmp_path / "left").read_text()))
        except psutil.NoSuchProcess:
            return None

    yield find
    if process := find():
        process.kill()


def test_ctrl_c_leaves_time_to_save(fasttrain: Any, script: Any, terminal: Any) -> None:
    path = script(SAVES)
    screen = terminal(fasttrain.argv("run", path))
    screen.read_until(b"ready")
    screen.type(b"\x03")
    assert screen.end() == 7, "the script's own exit code"
    assert path.with_name("saved").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_ctrl_c_ends_it_now(
    fasttrain: Any, script: Any, terminal: Any, until: Any, tmp_path: Path, ranks: int
) -> None:
    several = ("--nproc-per-node", "2", "--strategy", "none") if ranks == 2 else ()
    screen = terminal(fasttrain.argv("run", script(DEAF), *several))
    until(lambda: len(list(tmp_path.glob("ready-*"))) == ranks)
    screen.type(b"\x03")
    screen.read_until(b"ctrl-C")  # what fasttrain says when the script takes its time
    started_s = time.monotonic()
    screen.type(b"\x03")
    assert screen.end() == -signal.SIGINT
    assert time.monotonic() - started_s < 20
    assert b"still running at the second ctrl-C" in screen.screen


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_time_to_save_ends(
    fasttrain: Any, script: Any, until: Any, tmp_path: Path, receipt: Any, name: str, ranks: int
) -> None:
    several = ("--nproc-per-node", "2", "--strategy", "none") if ranks == 2 else ()
    process = fasttrain.start("run", script(DEAF), "--shutdown-timeout", "1", *several, **QUIETLY)
    until(lambda: len(list(tmp_path.glob("ready-*"))) == ranks)
    started_s = time.monotonic()
    process.send_signal(getattr(signal, name))
    assert process.wait(30) == 128 + getattr(signal, name)
    assert 1 <= time.monotonic() - started_s < 25
    (warning,) = receipt()["warnings"]
    killed = Path(sys.executable).name
    assert re.search(rf"\b1 s\b.*\b{name}\b.*: {re.escape(killed)} \(pid ", warning)


def test_two_signals_at_once_are_one(
    fasttrain: Any, script: Any, until: Any, tmp_path: Path
) -> None:
    """As `timeout` sends them: to the process, and to its group."""
    process = fasttrain.start("run", script(SAVES), **{**QUIETLY, "stdout": subprocess.PIPE})
    process.stdout.readline()
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
    with process.stdout:
        assert process.wait(20) == 128 + signal.SIGTERM, "the script doesn't handle it"


def test_a_signal_after_the_end_of_the_script_costs_no_receipt(
    fasttrain: Any, script: Any, receipt: Any
) -> None:
    process = fasttrain.start("run", script(SAVES), **{**QUIETLY, "stdout": subprocess.PIPE})
    process.stdout.readline()
    with process.stdout:
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
    assert process.returncode == 128 + signal.SIGTERM
    assert receipt()["exit_code"] == 128 + signal.SIGTERM


def test_a_signal_that_the_caller_ignores_starts_no_clock(
    fasttrain: Any, script: Any, until: Any, tmp_path: Path
) -> None:
    path = script("import time\nopen('ready', 'w').close()\ntime.sleep(1.5)\nraise SystemExit(4)")
    process = fasttrain.start(
        "run", path, "--shutdown-timeout", "0", **QUIETLY,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),  # nohup
    )  # fmt: skip
    until((tmp_path / "ready").exists)
    process.send_signal(signal.SIGHUP)
    assert process.wait(20) == 4


def test_what_a_good_run_leaves_lives_on(fasttrain: Any, script: Any, left: Any) -> None:
    done = fasttrain("run", script(LEAVES), "0")
    assert done.returncode == 0
    assert left().is_running()
    assert ENDED_LEFT.encode() not in done.stderr


def test_what_a_failed_run_leaves_is_ended(
    fasttrain: Any, script: Any, left: Any, receipt: Any
) -> None:
    done = fasttrain("run", script(LEAVES), "3")
    assert done.returncode == 3
    assert left() is None
    (warning,) = receipt()["warnings"]
    assert warning.startswith(f"{ENDED_LEFT}: python")
    assert warning.encode() in done.stderr


def test_children_of_a_shell_that_became_fasttrain_are_not_of_the_run(
    fasttrain: Any, script: Any, tmp_path: Path
) -> None:
    shell = ["sh", "-c", 'sleep 60 & echo $! > before; exec "$@"', "sh"]
    argv = [*shell, *fasttrain.argv("run", script("raise SystemExit(3)"))]
    done = subprocess.run(argv, cwd=tmp_path, env=fasttrain.environ, **QUIETLY)
    sleeper = int((tmp_path / "before").read_text())
    assert done.returncode == 3
    os.kill(sleeper, signal.SIGKILL)  # ProcessLookupError if the run has ended it


def guardian_of(launcher: int) -> psutil.Process | None:
    for child in psutil.Process(launcher).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if "guardian.py" in " ".join(child.cmdline()):
                return child
    return None


def test_the_guardian_stands_apart_and_comes_back(
    fasttrain: Any, script: Any, until: Any, alive: Any, tmp_path: Path
) -> None:
    kept, other = os.pipe()
    os.close(kept)
    process = fasttrain.start("run", script(DEAF), **QUIETLY, pass_fds=(other,))
    os.close(other)
    try:
        until((tmp_path / "ready-0").exists)
        second = see_the_guardian(process, until, alive)
    finally:
        process.kill()
        process.wait()
    until(lambda: not alive(second.pid))


def see_the_guardian(process: subprocess.Popen[bytes], until: Any, alive: Any) -> psutil.Process:
    """Look at a guardian, kill it, and give the next one."""
    first = guardian_of(process.pid)
    assert first is not None
    until(lambda: os.getsid(first.pid) == first.pid)
    folder = Path(f"/proc/{first.pid}/fd")
    until(lambda: sorted(path.name for path in folder.iterdir()) == ["0", "1", "2"])
    assert {str((folder / name).readlink()) for name in "12"} == {os.devnull}
    assert "FASTTRAIN_RUN_ID" not in first.environ()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        first.send_signal(number)
    time.sleep(0.2)
    assert alive(first.pid)
    first.kill()
    until(lambda: (now := guardian_of(process.pid)) and now.pid != first.pid)
    second = guardian_of(process.pid)
    assert second is not None
    return second


def test_a_command_and_its_children_die_with_the_launcher(
    fasttrain: Any, until: Any, alive: Any, tmp_path: Path
) -> None:
    child = f"{sys.executable} -Sc 'import time; time.sleep(60)'"
    command = ("sh", "-c", f"{child} & echo $! > pid.new; mv pid.new pid; wait")
    process = fasttrain.start("run", "--no-python", "--", *command, **QUIETLY)
    until((tmp_path / "pid").exists)
    pid = int((tmp_path / "pid").read_text())
    assert alive(pid)
    process.kill()
    process.wait()
    until(lambda: not alive(pid))
