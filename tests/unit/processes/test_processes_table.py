from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from fasttrain.processes.table import (
    Process,
    alive,
    ancestors,
    command_of,
    descendants,
    is_own,
    look_up,
    mark_of,
    marks,
    of_run,
    send,
    table,
)

NESTED = (
    "import subprocess, sys\n"
    "child = subprocess.Popen(['sleep', '30'], env={}, start_new_session=True)\n"
    "print(child.pid, flush=True)\nchild.wait()"
)


@pytest.fixture
def marked() -> Iterator[tuple[int, int]]:
    """A process with a mark, and a child of it that has lost its environment."""
    environ = {**os.environ, "FASTTRAIN_RUN_ID": "unit-1"}
    argv = [sys.executable, "-ISc", NESTED]
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        yield parent.pid, child
        os.kill(child, signal.SIGKILL)


def test_the_table_is_what_psutil_says(marked: tuple[int, int]) -> None:
    found = table()
    for pid in (*marked, os.getpid()):
        assert found[pid].parent == psutil.Process(pid).ppid()
    ticks = os.sysconf("SC_CLK_TCK")
    first, second = (found[pid].started_ticks / ticks for pid in (os.getpid(), marked[0]))
    apart_s = psutil.Process(marked[0]).create_time() - psutil.Process().create_time()
    assert second - first == pytest.approx(apart_s, abs=0.02)


def test_a_run_is_what_carries_its_mark_and_what_that_has_started(marked: tuple[int, int]) -> None:
    parent, child = marked
    assert mark_of(parent) == "unit-1"
    assert mark_of(child) == ""
    assert marks([parent, child, os.getpid()]) == {parent: "unit-1"}
    assert set(of_run("unit-1")) == {parent, child}
    assert of_run("unit") == of_run("") == {}


def test_who_asks_is_never_of_the_run() -> None:
    code = (
        "import os; from fasttrain.processes.table import mark_of, of_run\n"
        "print(mark_of(os.getpid()), of_run('unit-2'))"
    )
    environ = {**os.environ, "FASTTRAIN_RUN_ID": "unit-2"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True)
    assert done.stdout == b"unit-2 {}\n", done.stderr


def test_processes_of_others_are_not_looked_into(
    marked: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_own(marked[0])
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    assert not is_own(marked[0])
    assert of_run("unit-1") == {}


def test_lines_of_descent() -> None:
    processes = {pid: Process(pid, parent, 0) for pid, parent in [(2, 1), (3, 2), (4, 3), (5, 1)]}
    assert set(descendants([2], processes)) == {3, 4}
    assert set(descendants([2, 5], processes)) == {3, 4}
    assert ancestors(4, processes) == {4, 3, 2}


def test_what_has_ended_is_gone() -> None:
    child = subprocess.Popen(["sleep", "30"])
    process = look_up(child.pid)
    assert process is not None
    assert alive([process]) == {child.pid: process}
    assert command_of(child.pid) == "sleep"
    send(process, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert look_up(child.pid) is None
    assert alive([process]) == {}
    assert child.wait() == -signal.SIGKILL
    assert (command_of(child.pid), mark_of(child.pid), is_own(child.pid)) == ("", "", False)


@pytest.mark.parametrize("pidfd", [True, False])
def test_a_number_that_another_process_has_got_is_spared(
    monkeypatch: pytest.MonkeyPatch, pidfd: bool
) -> None:
    def refuse(pid: int) -> int:
        raise OSError

    if not pidfd:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    with subprocess.Popen(["sleep", "30"]) as child:
        process = look_up(child.pid)
        assert process is not None
        send(process._replace(started_ticks=process.started_ticks - 1), signal.SIGKILL)
        assert look_up(child.pid) == process
        send(process, signal.SIGTERM)
    assert child.returncode == -signal.SIGTERM
    send(process, signal.SIGTERM)  # it has ended: nothing happens


def test_a_name_may_hold_what_separates_fields(tmp_path: os.PathLike[str]) -> None:
    program = f"{tmp_path}/a) R 7 (b"
    os.symlink("/bin/sleep", program)  # noqa: PTH211 - a name such as this one
    with subprocess.Popen([program, "30"]) as child:
        process = look_up(child.pid)
        child.kill()
    assert process is not None
    assert process.parent == os.getpid()
