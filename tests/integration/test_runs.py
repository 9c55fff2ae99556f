"""The real ``fasttrain ps`` and ``fasttrain kill``, among whatever else runs here."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fasttrain.hardware.runs import find_run_processes

QUIETLY = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
SAVES = """
import os, signal, subprocess, sys, time

def save(*_):
    open("saved", "a").write("x")
    sys.exit(6)

signal.signal(signal.SIGTERM, save)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
subprocess.Popen([sys.executable, "-Sc", child], start_new_session=True)
open("ready", "w").close()
time.sleep(60)
"""
LEAVES = """
import subprocess, sys
none = subprocess.DEVNULL  # with the script's output it would keep that of the test open
sleeps = [sys.executable, "-Sc", "import time; time.sleep(60)"]
subprocess.Popen(sleeps, start_new_session=True, stdout=none, stderr=none)
"""


@pytest.fixture
def listed(fasttrain: Any, only_run_dir: Any) -> Callable[[], dict[str, Any] | None]:
    """Return the one run of the test as ``ps --json`` tells it."""

    def find() -> dict[str, Any] | None:
        content = json.loads(fasttrain("ps", "--json").stdout)
        assert (content["schema"], content["kind"]) == (1, "runs")
        named = [run for run in content["data"] if run["run_id"] == only_run_dir().name]
        return named[0] if named else None

    return find


def test_a_running_run_is_listed_and_ended(
    fasttrain: Any, script: Any, until: Any, listed: Any, only_run_dir: Any, tmp_path: Path
) -> None:
    process = fasttrain.start("run", script(SAVES), **QUIETLY)
    until((tmp_path / "ready").exists)
    run = listed()
    assert (run["state"], run["run_dir"]) == ("running", str(only_run_dir()))
    assert abs(run["started_s"] - psutil.Process(process.pid).create_time()) < 5
    pids = [one["pid"] for one in run["processes"]]
    assert len(pids) == 2
    assert process.pid not in pids
    assert run["launcher"] == process.pid
    assert only_run_dir().name in fasttrain("ps").stdout.decode()
    done = fasttrain("kill", run["run_id"], "--shutdown-timeout", "1")
    assert done.returncode == 0, done.stderr
    for pid in pids:
        assert f"{Path(sys.executable).name} (pid {pid})" in done.stdout.decode()
    assert b"1 by SIGKILL" in done.stdout
    assert (tmp_path / "saved").read_text() == "x", "asked once"
    assert process.wait(120) == 6, "what the script made of SIGTERM"
    assert f"(pid {process.pid})" in done.stdout.decode()
    assert listed() is None


def test_a_run_with_restarts_left_is_ended_and_not_started_again(
    fasttrain: Any, script: Any, until: Any, only_run_dir: Any, tmp_path: Path
) -> None:
    path = script("import time\nopen('ready', 'a').write('x')\ntime.sleep(60)")
    options = ("--max-restarts", "2", "--restart-on", "any")
    process = fasttrain.start("run", path, *options, **QUIETLY)
    until((tmp_path / "ready").exists)
    done = fasttrain("kill", only_run_dir().name)
    assert done.returncode == 0, done.stderr
    assert process.wait(120) == 128 + signal.SIGTERM
    assert (tmp_path / "ready").read_text() == "x"
    assert not json.loads((only_run_dir() / "receipt.json").read_text())["attempts"]


def test_a_run_that_waits_to_be_started_again_is_listed_and_ended(
    fasttrain: Any, script: Any, until: Any, listed: Any, tmp_path: Path
) -> None:
    path = script("import sys\nsys.exit(3)")
    options = ("--max-restarts", "5", "--restart-on", "any")
    process = fasttrain.start("run", path, *options, **QUIETLY)
    until(lambda: list(tmp_path.glob("fasttrain_runs/*/attempt-3")))  # 8 s before the next one
    run = listed()
    assert (run["state"], run["processes"], run["launcher"]) == ("running", [], process.pid)
    done = fasttrain("kill", run["run_id"])
    assert done.returncode == 0, done.stderr
    assert f"ended {Path(sys.executable).name} (pid {process.pid})" in done.stdout.decode()
    assert process.wait(120) == 128 + signal.SIGTERM
    assert listed() is None


def test_a_launcher_that_does_not_listen_is_killed_last(
    fasttrain: Any, script: Any, until: Any, only_run_dir: Any, alive: Any, tmp_path: Path
) -> None:
    path = script("import os, time\nopen('ready', 'w').write(str(os.getpid()))\ntime.sleep(60)")
    process = fasttrain.start("run", path, **QUIETLY)
    until(lambda: (tmp_path / "ready").exists() and (tmp_path / "ready").read_text())
    process.send_signal(signal.SIGSTOP)
    done = fasttrain("kill", only_run_dir().name, "--shutdown-timeout", "0")
    assert done.returncode == 0, done.stderr
    assert b"2 by SIGKILL" in done.stdout
    assert process.wait(120) == -signal.SIGKILL
    assert not alive(int((tmp_path / "ready").read_text()))


def test_what_a_finished_run_left_is_told_as_such(fasttrain: Any, script: Any, listed: Any) -> None:
    assert fasttrain("run", script(LEAVES)).returncode == 0
    run = listed()
    assert (run["state"], len(run["processes"])) == ("finished", 1)
    done = fasttrain("kill", run["run_id"])
    assert done.returncode == 0, done.stderr
    assert listed() is None


def test_a_run_whose_launcher_and_guardian_died_is_an_orphan(
    fasttrain: Any, script: Any, until: Any, listed: Any, alive: Any, tmp_path: Path
) -> None:
    process = fasttrain.start("run", script(SAVES), **QUIETLY)
    until((tmp_path / "ready").exists)
    children = psutil.Process(process.pid).children()
    (guardian,) = [one for one in children if "-IS" in one.cmdline()]
    process.send_signal(signal.SIGSTOP)  # or it would start another guardian
    guardian.kill()
    process.kill()
    process.wait()
    until(lambda: (run := listed()) and len(run["processes"]) == 1)
    run = listed()
    assert run["state"] == "orphaned"
    (left,) = run["processes"]
    assert find_run_processes(tmp_path / "fasttrain_runs")[left["pid"]].orphan, "as doctor sees it"
    assert fasttrain("kill", run["run_id"], "--shutdown-timeout", "0").returncode == 0
    assert not alive(left["pid"])


def test_what_kill_can_not_do(fasttrain: Any) -> None:
    unknown = fasttrain("kill", "no-such-run")
    assert unknown.returncode == 69
    assert unknown.stderr.rstrip().endswith(b"[run-unknown]")
    for words in ((), ("no-such-run", "--all")):
        unclear = fasttrain("kill", *words)
        assert unclear.returncode == 2
        assert unclear.stderr.rstrip().endswith(b"[kill-what]")
