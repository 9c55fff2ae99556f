"""Processes of runs, found by real command lines and environments."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fasttrain.hardware.runs import (
    RunProcess,
    as_device_process,
    find_run_processes,
    is_launcher,
    orphans,
    run_of,
)
from fasttrain.shim.multiprocessing_hooks import _PREPARE

SHIM = "/site-packages/fasttrain/shim/__main__.py"
AGENT = "/site-packages/fasttrain/agent/agent.py"
PLAN = "/runs/r1/plan.json"


@pytest.mark.parametrize(
    "argv",
    [
        ["python", SHIM, PLAN, "script", "train.py"],
        ["python", "-u", SHIM, PLAN, "module", "pkg", "--plan", "/other/plan.json"],
        ["python", AGENT, "--nnodes=1", "--", "python", SHIM, PLAN, "script", "train.py"],
        [
            "python",
            "-c",
            f"exec({_PREPARE.format(plan=PLAN, rank=3)!r}, {{}}); "
            "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)",
            "--multiprocessing-fork",
        ],
    ],
)
def test_a_plan_on_the_command_line_tells_the_run_directory(argv: list[str]) -> None:
    assert run_of(argv, {}, Path("/elsewhere")) == "/runs/r1"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["python", "train.py", PLAN],
        ["python", SHIM],
        ["python", SHIM, "--help"],
        ["vi", "fasttrain/agent/agent.py"],
        ["python", "-c", "print('fasttrain.shim.multiprocessing_hooks')"],
    ],
)
def test_other_command_lines_are_of_no_run(argv: list[str]) -> None:
    assert run_of(argv, {}, Path("/runs")) == ""


def test_the_mark_in_the_environment_is_a_name_below_the_runs(tmp_path: Path) -> None:
    (tmp_path / "r1").mkdir()
    assert run_of(["./train"], {"FASTTRAIN_RUN_ID": "r1"}, tmp_path) == str(tmp_path / "r1")
    assert run_of(["./train"], {"FASTTRAIN_RUN_ID": "gone"}, tmp_path) == "gone"
    assert run_of(["python", SHIM, PLAN], {"FASTTRAIN_RUN_ID": "r1"}, tmp_path) == "/runs/r1"


@pytest.mark.parametrize(
    "argv",
    [
        ["/usr/bin/fasttrain", "run", "train.py"],
        ["/usr/bin/python3.11", "/usr/bin/fasttrain", "run", "train.py"],
        ["python", "-X", "utf8", "-u", "-m", "fasttrain", "run", "train.py"],
        ["python", "/site-packages/fasttrain/__main__.py", "run", "train.py"],
        ["python", AGENT, "--nnodes=1"],
        ["python", "-u", "-m", "fasttrain.slurm.node_start", "/logs/7"],
    ],
)
def test_launchers_are_known(argv: list[str]) -> None:
    assert is_launcher(argv)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["python", SHIM, PLAN, "script", "train.py"],
        ["python", "-m", "pytest", "fasttrain"],
        ["python", "train.py", "fasttrain"],
        ["vi", "/usr/bin/fasttrain"],
        ["bash", "-c", "fasttrain run train.py"],
    ],
)
def test_other_programs_are_no_launchers(argv: list[str]) -> None:
    assert not is_launcher(argv)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Lay out a worker that sleeps, and a launcher that starts one and waits."""
    shim = tmp_path / "fasttrain" / "shim" / "__main__.py"
    shim.parent.mkdir(parents=True)
    shim.write_text("import time\nprint(flush=True)\ntime.sleep(30)\n")
    launcher = tmp_path / "bin" / "fasttrain"
    launcher.parent.mkdir()
    launcher.write_text("import subprocess, sys\nsubprocess.run([sys.executable, *sys.argv[1:]])\n")
    return tmp_path


@contextlib.contextmanager
def running(*argv: str, **environ: str) -> Iterator[int]:
    """Start Python on a program, wait for its first line, and end it with all that it started."""
    process = subprocess.Popen(
        [sys.executable, "-IS", *argv], env={**os.environ, **environ}, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.communicate()


def worker(folder: Path) -> list[str]:
    plan = folder / "runs" / "r1" / "plan.json"
    return [str(folder / "fasttrain/shim/__main__.py"), str(plan), "script", "train.py"]


def test_a_worker_without_a_launcher_is_an_orphan(folder: Path) -> None:
    with running(*worker(folder)) as pid:
        runs = find_run_processes(folder / "runs")
        (told,) = [process for process in orphans(runs) if process.pid == pid]
    assert runs[pid] == RunProcess(str(folder / "runs" / "r1"), orphan=True)
    assert (told.run, told.orphan) == (runs[pid].run, True)
    assert orphans({pid: runs[pid]}) == ()  # it has ended


def test_a_worker_below_its_launcher_is_none(folder: Path) -> None:
    with running(str(folder / "bin/fasttrain"), "-IS", *worker(folder)) as pid:
        (child,) = psutil.Process(pid).children()
        runs = find_run_processes(folder / "runs")
    assert runs[child.pid] == RunProcess(str(folder / "runs" / "r1"), orphan=False)
    assert child.pid not in [process.pid for process in orphans(runs)]


def test_a_command_is_found_by_its_environment(folder: Path) -> None:
    program = folder / "command.py"
    program.write_text("import time\nprint(flush=True)\ntime.sleep(30)\n")
    with running(str(program), FASTTRAIN_RUN_ID="r7") as pid:
        assert find_run_processes(folder)[pid] == RunProcess("r7", orphan=True)
    assert pid not in find_run_processes(folder)


def test_what_a_script_left_running_when_it_had_ended_is_no_orphan(folder: Path) -> None:
    program, run = folder / "tensorboard.py", folder / "runs" / "r1"
    program.write_text("import time\nprint(flush=True)\ntime.sleep(30)\n")
    run.mkdir(parents=True)
    mark = {"FASTTRAIN_RUN_ID": "r1"}
    with running(str(program), **mark) as left, running(*worker(folder), **mark) as killed:
        before = {process.pid for process in orphans(find_run_processes(folder / "runs"))}
        (run / "receipt.json").touch()
        after = {process.pid for process in orphans(find_run_processes(folder / "runs"))}
    assert {left, killed} <= before
    assert after & {left, killed} == {killed}, "a worker isn't left on purpose"


def test_who_asks_from_within_a_run_is_no_leftover_of_it(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path\n"
        "from fasttrain.hardware.runs import find_run_processes\n"
        "print(os.getpid() in find_run_processes(Path('/nowhere')))\n"
    )
    environ = {**os.environ, "FASTTRAIN_RUN_ID": "r1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_processes_of_other_users_are_skipped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(*worker(folder)) as pid:
        assert pid in find_run_processes(folder)
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
        assert find_run_processes(folder) == {}


def test_processes_closed_to_us_are_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: psutil.Process) -> Any:
        raise psutil.AccessDenied(process.pid)

    with running(*worker(folder)):
        monkeypatch.setattr(psutil.Process, "cmdline", refuse)
        assert find_run_processes(folder) == {}
        monkeypatch.setattr(psutil.Process, "uids", refuse)
        assert find_run_processes(folder) == {}


def test_a_drivers_process_is_told_by_its_program_alone(folder: Path) -> None:
    program = folder / "secretive.py"
    program.write_text("import time\nprint(flush=True)\ntime.sleep(30)\n")
    with running(str(program), "--token", "s3cr3t") as pid:
        told = as_device_process(pid, 5, {})
    assert (told.pid, told.memory_bytes, told.run, told.orphan) == (pid, 5, "", False)
    assert told.command == Path(sys.executable).name


def test_a_number_that_is_not_ours_is_hidden() -> None:
    told = as_device_process(2**22 + 1, 5, {}, "python")  # above any pid of Linux
    assert (told.pid, told.memory_bytes, told.command) == (0, 5, "python")


def test_a_program_that_has_ended_keeps_its_name() -> None:
    child = subprocess.Popen(["true"])
    try:
        deadline = time.monotonic() + 60
        while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
        assert as_device_process(child.pid, 0, {}, "told").pid == child.pid
    finally:
        child.wait()
