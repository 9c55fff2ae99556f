from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from fasttrain.processes import table
from fasttrain.processes.table import Process, Table, alive, end, look_up, named, uppermost

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); "
WAITS = "time.sleep(60)"


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Start Python on a program that prints a line when it is ready."""
    started = []

    def begin(code: str) -> Process:
        argv = [sys.executable, "-ISc", code]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE)
        started.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        process = look_up(child.pid)
        assert process is not None
        return process

    yield begin
    for child in started:
        child.kill()
        child.communicate()


def finder(*processes: Process) -> Callable[[], Table]:
    return lambda: alive(processes)


def test_who_does_as_asked_is_not_killed(start: Callable[..., Process]) -> None:
    process = start("import time; print(flush=True); " + WAITS)
    done = end(finder(process), grace_s=40)
    name = os.path.basename(sys.executable)  # noqa: PTH119
    assert (done.ended, done.killed, done.left) == ({process.pid: name}, {}, {})


def test_who_does_not_is_killed_when_its_time_is_over(start: Callable[..., Process]) -> None:
    process = start(DEAF + WAITS)
    started_s = time.monotonic()
    done = end(finder(process), grace_s=0.3)
    assert 0.3 <= time.monotonic() - started_s < 30
    assert done.killed.keys() == done.ended.keys() == {process.pid}


def test_impatience_kills_at_once(start: Callable[..., Process]) -> None:
    process = start(DEAF + WAITS)

    def pause(limit_s: float) -> bool:
        time.sleep(limit_s)
        return True

    started_s = time.monotonic()
    assert end(finder(process), grace_s=60, pause=pause).killed
    assert time.monotonic() - started_s < 30


def test_what_ends_by_itself_is_left_alone(start: Callable[..., Process]) -> None:
    process = start("import time; print(flush=True); time.sleep(0.2)")
    done = end(finder(process), grace_s=10, settle_s=10)
    assert (done.ended, done.killed) == ({}, {})


def test_children_are_asked_when_their_parents_are_gone() -> None:
    parent, child = Process(2, 1, 0), Process(3, 2, 0)
    processes: Table = {2: parent, 3: child}
    assert uppermost(processes) == [parent]
    assert uppermost({3: child}) == [child]


def test_what_can_not_be_ended_is_told(
    start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(DEAF + WAITS)
    monkeypatch.setattr(table, "send", lambda process, signum: None)  # somebody else's, say
    monkeypatch.setattr(table, "DEATH_S", 0.1)
    done = end(finder(process), grace_s=0)
    assert done.left.keys() == {process.pid}
    assert done.ended == {}


def test_what_comes_anew_is_ended_too(start: Callable[..., Process]) -> None:
    waiting = [start(DEAF + WAITS) for _ in range(3)]

    def find() -> Table:
        return alive(waiting[:1]) or alive(waiting[:2]) or alive(waiting)

    assert end(find, grace_s=0).killed.keys() == {process.pid for process in waiting}


def test_many_are_named_in_short() -> None:
    assert named({12: "python", 3: ""}) == "process (pid 3), python (pid 12)"
    assert named(dict.fromkeys(range(8), "sh")).endswith("sh (pid 5), 2 more")
