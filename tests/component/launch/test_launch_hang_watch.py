"""When a run counts as hung, by a clock of the test's and records of this process."""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain.launch.hang import watch
from fasttrain.launch.hang.heartbeats import HeartbeatRecords
from fasttrain.launch.hang.watch import BUSY_S, IDLE_S, HangWatch, Nodes, OneNode, together
from fasttrain.launch.process import procfs
from fasttrain.launch.run_node import _seen
from fasttrain.model.attempts import Guards
from fasttrain.model.attempts import HangWatch as Watched
from fasttrain.model.codec import dumps, loads
from fasttrain.model.decision import Decision
from fasttrain.model.hang import (
    HANG_FILE,
    MEMORY_BYTES,
    MEMORY_NAME,
    Frame,
    Hang,
    HeartbeatAddress,
    Slot,
    StuckProcess,
    StuckRank,
)
from fasttrain.model.plan import LaunchPlan

SECRET = "s3cr3t-of-env"
STUCK = (StuckRank(0, 1, (StuckProcess(1, "rank", ((Frame("t.py", 2, "f", user=True),),)),)),)
COMPILES = Frame("torch/_dynamo/convert_frame.py", 1, "_compile")


class Rank:
    """A record as a worker makes it, in this process."""

    def __init__(self, run_dir: Path, rank: int, descriptor: int) -> None:
        self._descriptor = descriptor
        address = HeartbeatAddress(rank, os.getpid(), descriptor, 0, 0)
        (run_dir / f"heartbeat-{rank}.json").write_text(dumps(address))

    def show(self, slot: Slot, value: int) -> None:
        os.pwrite(self._descriptor, struct.pack("Q", value), 8 * slot)


class Scene:
    """A watched run whose time and processor time the test makes."""

    def __init__(self, plan: LaunchPlan, nodes: Nodes | None = None) -> None:
        self.now = self.cpu_s = 0.0
        self.stuck = STUCK
        self.told: list[Hang] = []
        nodes = nodes or OneNode()
        self.watch = HangWatch(plan, self.told.append, nodes, (SECRET,), lambda: self.now)

    def wait(self, seconds: float, busy: float = 0.0, *, held: bool = False) -> list[bool]:
        """Tick each second and give how often the run was to be stopped."""
        stops = []
        for _ in range(round(seconds)):
            self.now += 1.0
            self.cpu_s += busy
            stops.append(self.watch.tick(held=held))
        return [stop for stop in stops if stop]


@pytest.fixture
def ranks(of_command: Callable[..., LaunchPlan]) -> Iterator[Callable[[int], Rank]]:
    run_dir = Path(of_command("true").run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    opened: list[int] = []

    def make(number: int) -> Rank:
        opened.append(os.memfd_create(MEMORY_NAME))
        os.ftruncate(opened[-1], MEMORY_BYTES)
        return Rank(run_dir, number, opened[-1])

    yield make
    for descriptor in opened:
        os.close(descriptor)


@pytest.fixture
def scene(
    of_command: Callable[..., LaunchPlan], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(nodes: Nodes | None = None, count: int = 1, **watched: Any) -> Scene:
        plan = of_command("true")
        processes = replace(plan.processes.value, max_nodes=count)
        plan = replace(plan, processes=replace(plan.processes, value=processes))
        decided = Decision(Watched(on=True, **watched), "", plan.guards.hang.source)
        found = Scene(replace(plan, guards=Guards(decided, plan.guards.nan)), nodes)
        monkeypatch.setattr(watch, "examine", lambda running, _: found.stuck if running else ())
        monkeypatch.setattr(procfs, "cpu_s", lambda _: found.cpu_s)
        monkeypatch.setattr(procfs, "family", lambda pid: [pid])  # others of the tests' own run too
        monkeypatch.setattr(procfs, "transferred_bytes", lambda _: 0)
        monkeypatch.setattr(procfs, "runs", lambda _: False)  # as this process does
        made.append(found)
        return found

    yield make
    for found in made:
        found.watch.close()


def test_a_run_that_stops_going_on(ranks: Any, scene: Any, of_command: Any) -> None:
    rank, run = ranks(0), scene(timeout_s=10)
    rank.show(Slot.STEPS, 5)
    assert run.wait(1 + 9) == []
    assert run.wait(2) == [True]
    (hang,) = run.told
    assert (hang.quiet_s, hang.limit_s, hang.action) == (10.0, 10.0, "stop")
    assert loads(Hang, Path(of_command("true").run_dir, HANG_FILE).read_bytes()) == hang
    assert run.watch.stopped
    assert run.wait(120) == []  # how it is stopped is the launcher's


def test_a_secret_in_a_line_of_source_is_masked(ranks: Any, scene: Any, of_command: Any) -> None:
    rank, run = ranks(0), scene(timeout_s=10)
    rank.show(Slot.STEPS, 5)
    line = Frame("train.py", 3, "main", f"login('{SECRET}')", user=True)
    run.stuck = (StuckRank(0, 5, (StuckProcess(1, "rank", ((line,),)),)),)
    assert run.wait(11) == [True]
    assert run.told[0].ranks[0].processes[0].threads[0][0].source == "login('***')"
    assert SECRET not in repr(run.told)
    assert SECRET not in Path(of_command("true").run_dir, HANG_FILE).read_text()


def test_a_hang_that_cannot_be_kept_is_told_all_the_same(
    ranks: Any, scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    rank, run = ranks(0), scene(timeout_s=10)
    rank.show(Slot.STEPS, 5)
    monkeypatch.setattr(watch, "write_private", full)
    assert run.wait(11) == [True]
    assert len(run.told) == 1
    (problem,) = run.watch.problems
    assert problem.startswith("hang.json ")
    assert problem.endswith(": No space left on device")


def test_any_rank_that_goes_on_is_enough(ranks: Any, scene: Any) -> None:
    first, second, run = ranks(0), ranks(1), scene(timeout_s=10)
    first.show(Slot.STEPS, 5)
    second.show(Slot.STEPS, 5)
    for beat in range(30):
        second.show(Slot.BEATS, beat)
        assert run.wait(9) == []
    assert run.wait(10) == [True]


@pytest.mark.parametrize(("steps", "beats"), [(0, 0), (0, 9)])
def test_nothing_is_said_before_every_rank_has_made_a_step(
    ranks: Any, scene: Any, steps: int, beats: int
) -> None:
    first, second, run = ranks(0), ranks(1), scene(timeout_s=10)
    first.show(Slot.STEPS, 5)
    second.show(Slot.STEPS, steps)
    second.show(Slot.BEATS, beats)
    assert run.wait(100) == []
    second.show(Slot.STEPS, 1)
    assert run.wait(12) == [True]


def test_without_any_record(scene: Any) -> None:
    nodes = OneNode()
    assert scene(nodes, timeout_s=1).wait(100) == []
    assert nodes.said() == ()  # before the first rank is there, others may not take it for stuck


def test_a_rank_that_has_ended_is_told_apart(ranks: Any, scene: Any) -> None:
    first, second, run = ranks(0), ranks(1), scene(timeout_s=10)
    first.show(Slot.STEPS, 5)
    second.show(Slot.STEPS, 5)
    second.show(Slot.ENDED, 1)
    assert run.wait(12) == [True]
    assert run.told[0].ended == (1,)
    assert run.told[0].verdict[-1].startswith("rank 1 ")


def test_all_ranks_have_ended(ranks: Any, scene: Any) -> None:
    rank, run = ranks(0), scene(timeout_s=10)
    rank.show(Slot.STEPS, 5)
    rank.show(Slot.ENDED, 1)
    assert run.wait(100) == []


@pytest.mark.parametrize(
    ("p95_s", "busy", "limit_s"),
    [
        (0.01, 0.0, IDLE_S),
        (0.01, 0.4, IDLE_S),
        (0.01, 1.0, BUSY_S),
        (10.0, 0.0, 200.0),
        (30.0, 1.0, 600.0),
    ],
)
def test_limits_that_follow_the_run(
    ranks: Any, scene: Any, p95_s: float, busy: float, limit_s: float
) -> None:
    run = scene()
    for rank in (ranks(0), ranks(1)):
        rank.show(Slot.STEPS, 5)
        rank.show(Slot.P95_NS, int(p95_s * 1e9))
    assert run.wait(limit_s, busy) == []
    assert run.wait(2, busy) == [True]
    assert run.told[0].limit_s == limit_s


def both(ranks: Any) -> None:
    """Have two ranks that have made steps, so that one could wait for the other."""
    for rank in (ranks(0), ranks(1)):
        rank.show(Slot.STEPS, 5)


@pytest.mark.parametrize("busy", [0.0, 1.0])
def test_the_only_process_is_told_of_and_spared(
    ranks: Any, scene: Any, of_command: Any, busy: float
) -> None:
    ranks(0).show(Slot.BEATS, 1)
    of_pool = Path(of_command("true").run_dir, "heartbeat-0.json")
    of_pool.rename(of_pool.with_suffix(".child-9.json"))
    rank, run = ranks(0), scene()
    rank.show(Slot.STEPS, 5)
    assert run.wait(3 * BUSY_S, busy) == []
    assert [hang.action for hang in run.told] == ["spare"], "once"
    (line,) = run.told[0].verdict
    assert line.startswith("rank 0 ")
    assert "t.py:2" in line
    assert not run.watch.stopped


def test_a_script_that_waits_again_and_again(ranks: Any, scene: Any) -> None:
    rank, run = ranks(0), scene()
    for step, wait_s in enumerate([75, 75, 100, 75, 200, 75], start=1):
        rank.show(Slot.STEPS, step)
        assert run.wait(wait_s) == []
    assert [round(hang.quiet_s / IDLE_S) for hang in run.told] == [1, 2], "the much longer one"
    logged: Any = SimpleNamespace(log_error="")
    warning, *others = _seen(run.watch, logged, Path("run"))
    assert not others
    assert "2 times" in warning
    run.watch.begin_again()
    rank.show(Slot.STEPS, 9)
    assert run.wait(75) == []
    assert len(run.told) == 3, "another attempt"


OF_OWN = replace(STUCK[0], processes=(replace(STUCK[0].processes[0], pid=os.getpid()),))
WAITS = Frame("torch/distributed/distributed_c10d.py", 1, "barrier")
WAITING = StuckRank(1, 1, (StuckProcess(1, "rank", ((WAITS, *STUCK[0].processes[0].threads[0]),)),))
LOADS = StuckProcess(2, "loader worker", STUCK[0].processes[0].threads)
RECEIVES = (Frame("ssl.py", 1, "read"), *LOADS.threads[0])


@pytest.mark.parametrize("beside", [(), (WAITING,)], ids=["", "that a rank waits for"])
@pytest.mark.parametrize("moves", ["a thread", "a loader's worker", "a loader's socket", "a disk"])
def test_what_still_transfers_is_not_stopped(
    ranks: Any, scene: Any, monkeypatch: Any, moves: str, beside: tuple[StuckRank, ...]
) -> None:
    run = scene()
    both(ranks)
    pid = {"a thread": os.getpid(), "a loader's worker": LOADS.pid}.get(moves, 0)
    loads = replace(LOADS, threads=(RECEIVES,)) if moves == "a loader's socket" else LOADS
    run.stuck = (replace(OF_OWN, processes=(*OF_OWN.processes, loads)), *beside)
    monkeypatch.setattr(procfs, "family", lambda pid: [pid, LOADS.pid])
    monkeypatch.setattr(procfs, "all_bytes", lambda one: int(run.now) if one == pid else 0)
    disk = moves == "a disk"
    monkeypatch.setattr(procfs, "waits_for_disk", lambda _, **any_: disk and bool(any_))
    assert run.wait(BUSY_S + IDLE_S + 2) == []
    assert [hang.action for hang in run.told] == ["spare"] * len(beside), "once"
    run.stuck = (OF_OWN, *beside)
    monkeypatch.setattr(procfs, "all_bytes", lambda _: 0)
    monkeypatch.setattr(procfs, "waits_for_disk", lambda _, **any_: False)
    assert run.wait(BUSY_S + IDLE_S + 2) == [True], "it is stuck by now"


def test_a_main_thread_that_gets_little_of_its_processor(
    ranks: Any, scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = scene()
    both(ranks)
    monkeypatch.setattr(procfs, "runs", lambda _: run.now % 4 != 0)
    assert run.wait(BUSY_S, busy=0.1) == []
    monkeypatch.setattr(procfs, "runs", lambda _: run.now % 4 == 0)
    assert run.wait(BUSY_S, busy=0.1) == [True]


def test_the_last_of_several_ranks_is_spared_too(ranks: Any, scene: Any) -> None:
    first, second, run = ranks(0), ranks(1), scene()
    for rank in (first, second):
        rank.show(Slot.STEPS, 5)
    second.show(Slot.ENDED, 1)
    assert run.wait(BUSY_S + 2, busy=1.0) == []
    assert [hang.action for hang in run.told] == ["spare"]


def test_time_in_which_nobody_reads_the_output_does_not_count(ranks: Any, scene: Any) -> None:
    rank, run = ranks(0), scene(timeout_s=10)
    rank.show(Slot.STEPS, 5)
    assert run.wait(5) == []
    assert run.wait(100, held=True) == []
    assert run.wait(7) == [True]


@pytest.mark.parametrize(("timeout_s", "stops"), [(None, []), (60, [True])])
def test_time_in_which_a_rank_waits_for_a_disk_does_not_count(
    ranks: Any, scene: Any, monkeypatch: Any, timeout_s: int | None, stops: list[bool]
) -> None:
    run = scene(timeout_s=timeout_s)
    both(ranks)
    monkeypatch.setattr(procfs, "waits_for_disk", lambda _, **any_: True)
    assert run.wait(100) == stops
    monkeypatch.setattr(procfs, "waits_for_disk", lambda _, **any_: False)
    assert run.wait(62) == [True][len(stops) :]


CHILD = 4242


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, scene: Any) -> Callable[[Callable[[], int]], None]:
    """Have the main thread wait for a child that writes as many bytes as a function says."""

    def make(count: Callable[[], int]) -> None:
        monkeypatch.setattr(procfs, "family", lambda pid: [pid, CHILD])
        monkeypatch.setattr(procfs, "call", lambda _: procfs.Call("wait", CHILD))
        monkeypatch.setattr(procfs, "all_bytes", lambda pid: count() if pid == CHILD else 0)

    return make


def test_a_child_that_copies_a_file(ranks: Any, scene: Any, child: Any) -> None:
    run = scene()
    both(ranks)
    run.stuck = (OF_OWN,)
    child(lambda: int(min(run.now, 200.0)))
    assert run.wait(200) == []
    assert run.wait(3 * IDLE_S) == [True], "it is stuck by now, too"


def test_what_a_child_does_is_nothing_to_a_time_of_the_users(
    ranks: Any, scene: Any, child: Any
) -> None:
    rank, run = ranks(0), scene(timeout_s=60)
    rank.show(Slot.STEPS, 5)
    child(lambda: int(run.now))
    assert run.wait(62) == [True]


def serving(*others: Frame) -> tuple[StuckRank, ...]:
    """Return a rank that serves, and others that are somewhere."""
    serves = (Frame("selectors.py", 1, "select"), Frame("socketserver.py", 2, "serve_forever"))
    stacks = [serves, *((frame, Frame("t.py", 2, "f", user=True)) for frame in others)]
    return tuple(
        StuckRank(number, 1, (StuckProcess(os.getpid(), "rank", (stack,)),))
        for number, stack in enumerate(stacks)
    )


def test_a_server_after_training(ranks: Any, scene: Any) -> None:
    rank, run = ranks(0), scene()
    rank.show(Slot.STEPS, 5)
    run.stuck = serving()
    assert run.wait(2 * BUSY_S) == []
    assert run.told == []


def test_a_server_that_other_ranks_wait_for(ranks: Any, scene: Any) -> None:
    run = scene()
    for rank in (ranks(0), ranks(1)):
        rank.show(Slot.STEPS, 5)
    run.stuck = serving(Frame("torch/distributed/distributed_c10d.py", 1, "all_reduce"))
    assert run.wait(BUSY_S) == []
    assert run.wait(2) == []
    assert [hang.action for hang in run.told] == ["spare"]
    assert re.fullmatch(r"rank 1 .*\ball_reduce\b.*\bt\.py:2\b.*", run.told[0].verdict[0])


def test_a_server_besides_a_rank_that_sleeps(ranks: Any, scene: Any) -> None:
    run = scene()
    for rank in (ranks(0), ranks(1)):
        rank.show(Slot.STEPS, 5)
    run.stuck = serving(Frame("threading.py", 1, "wait"))
    assert run.wait(2 * BUSY_S) == []


def test_a_time_of_the_users_counts_whoever_computes(ranks: Any, scene: Any) -> None:
    rank, run = ranks(0), scene(timeout_s=10)
    rank.show(Slot.STEPS, 5)
    assert run.wait(12, busy=8.0) == [True]


def test_an_excuse_begins_the_time_anew(ranks: Any, scene: Any) -> None:
    rank, run = ranks(0), scene(timeout_s=10)
    rank.show(Slot.STEPS, 5)
    run.stuck = (StuckRank(0, 1, (StuckProcess(1, "rank", ((COMPILES,),)),)),)
    assert run.wait(25) == []
    run.stuck = STUCK
    assert run.wait(10) == [True]


def test_a_report_once_for_each_time_that_nothing_goes_on(ranks: Any, scene: Any) -> None:
    rank, run = ranks(0), scene(timeout_s=10, action="report")
    rank.show(Slot.STEPS, 5)
    assert run.wait(100) == []
    assert len(run.told) == 1
    rank.show(Slot.STEPS, 6)
    assert run.wait(100) == []
    assert len(run.told) == 2
    assert not run.watch.stopped


def test_a_launcher_that_was_stopped(ranks: Any, scene: Any) -> None:
    rank, run = ranks(0), scene(timeout_s=10)
    rank.show(Slot.STEPS, 5)
    run.wait(3)
    run.now += 3600.0
    assert run.wait(2) == []


def test_records_of_processes_that_are_gone(ranks: Any, of_command: Any) -> None:
    rank = ranks(0)
    rank.show(Slot.STEPS, 7)
    run_dir = Path(of_command("true").run_dir)
    gone = HeartbeatAddress(1, os.getpid(), 987_654, 0, 0)
    (run_dir / "heartbeat-1.json").write_text(dumps(gone))
    (run_dir / "heartbeat-2.json").write_text("{")
    (run_dir / "heartbeat-0.child-9.json").write_text(dumps(gone))
    heartbeats = HeartbeatRecords(run_dir)
    heartbeats.find()
    assert [(heartbeat.address.rank, heartbeat.steps) for heartbeat in heartbeats.read()] == [
        (0, 7)
    ]
    left = {path.name for path in run_dir.glob("heartbeat-*.json")}
    assert left == {f"heartbeat-{rank}.json" for rank in range(3)}, "a child's is removed"
    (run_dir / "heartbeat-0.json").unlink()
    heartbeats.find()
    assert heartbeats.read() == ()


class TwoNodes(OneNode):
    """This node, and another that the test speaks for."""

    see_each_other = True

    def __init__(self) -> None:
        super().__init__()
        self.other: Hang | None = None

    @property
    def here(self) -> Hang | None:
        return self._found

    def said(self) -> tuple[Hang, ...]:
        return (self._found, self.other) if self._found and self.other else ()


def found(rank: int, quiet_s: float = 99.0, limit_s: float = 9.0, **changes: Any) -> Hang:
    hang = Hang("r", quiet_s, limit_s, "stop", (), (replace(STUCK[0], rank=rank),))
    return replace(hang, **changes)


def test_a_run_hangs_where_all_nodes_do(ranks: Any, scene: Any) -> None:
    nodes = TwoNodes()
    rank, run = ranks(0), scene(nodes, count=2, timeout_s=10)
    rank.show(Slot.STEPS, 5)
    assert run.wait(120) == [], "the other node goes on"
    assert nodes.here is not None
    nodes.other = found(1)
    assert run.wait(1) == [True]
    (hang,) = run.told
    assert [rank.rank for rank in hang.ranks] == [0, 1]
    (line,) = hang.verdict
    assert line.startswith("ranks 0-1 ")
    assert "t.py:2" in line


def test_what_was_said_is_taken_back(ranks: Any, scene: Any) -> None:
    nodes = TwoNodes()
    rank, run = ranks(0), scene(nodes, count=2, timeout_s=10)
    rank.show(Slot.STEPS, 5)
    assert run.wait(12) == []
    rank.show(Slot.STEPS, 6)
    assert run.wait(1) == []
    assert nodes.here is None


@pytest.mark.parametrize("sees", ["tick", "close"])
def test_ranks_that_another_node_has_ended_meanwhile(ranks: Any, scene: Any, sees: str) -> None:
    nodes = TwoNodes()
    rank, run = ranks(0), scene(nodes, count=2, timeout_s=10)
    rank.show(Slot.STEPS, 5)
    run.wait(12)
    nodes.other = found(1)
    rank.show(Slot.ENDED, 1)  # by an error, as its peer is gone
    assert run.wait(1) == [True] if sees == "tick" else run.watch.close() is None
    assert run.watch.stopped
    assert len(run.told) == 1


def test_a_node_whose_ranks_have_all_ended(ranks: Any, scene: Any) -> None:
    nodes = TwoNodes()
    rank, run = ranks(0), scene(nodes, count=2, timeout_s=10)
    rank.show(Slot.STEPS, 5)
    rank.show(Slot.ENDED, 1)
    nodes.other = found(1)
    assert run.wait(1) == []
    assert run.wait(1) == [True]
    (hang,) = run.told
    assert (hang.ended, [rank.rank for rank in hang.ranks]) == ((0,), [1])


def test_nodes_that_see_nothing_of_each_other_take_longer(ranks: Any, scene: Any) -> None:
    rank, run = ranks(0), scene(count=2)
    rank.show(Slot.STEPS, 5)
    assert run.wait(BUSY_S) == []
    assert run.wait(2) == [True]


def test_several_nodes_together() -> None:
    one = found(1, quiet_s=12.0, limit_s=10.0)
    other = found(0, quiet_s=11.0, limit_s=11.0, ended=(3,))
    nothing = found(2, quiet_s=0.0, limit_s=0.0, ranks=(), ended=(2,))
    hang = together([nothing, one, other])
    assert hang is not None
    assert (hang.quiet_s, hang.limit_s, hang.ended) == (11.0, 11.0, (2, 3))
    assert [rank.rank for rank in hang.ranks] == [0, 1]
    assert together([nothing]) is None
