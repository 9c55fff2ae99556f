"""When a run counts as hung, by a clock of the test's and records of this process."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fasttrain.launch import hang_watch, procfs
from fasttrain.launch.hang_watch import BUSY_S, IDLE_S, HangWatch
from fasttrain.launch.pulses import Pulses
from fasttrain.spec.codec import dumps, loads
from fasttrain.spec.decision import Decision
from fasttrain.spec.hang import HANG_FILE, Frame, Hang, StuckProcess, StuckRank
from fasttrain.spec.plan import Guards, LaunchPlan
from fasttrain.spec.plan import HangWatch as Watched
from fasttrain.spec.pulse import MEMORY_BYTES, MEMORY_NAME, PulseAddress, Slot

STUCK = (StuckRank(0, 1, (StuckProcess(1, "rank", ((Frame("t.py", 2, "f", user=True),),)),)),)
COMPILES = Frame("torch/_dynamo/convert_frame.py", 1, "_compile")


class Rank:
    """A record as a worker makes it, in this process."""

    def __init__(self, run_dir: Path, rank: int, descriptor: int) -> None:
        self._descriptor = descriptor
        address = PulseAddress(rank, os.getpid(), descriptor, 0)
        (run_dir / f"pulse-{rank}.json").write_text(dumps(address))

    def show(self, slot: Slot, value: int) -> None:
        os.pwrite(self._descriptor, struct.pack("Q", value), 8 * slot)


class Scene:
    """A watched run whose time and processor time the test makes."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.now = self.cpu_s = 0.0
        self.stuck = STUCK
        self.told: list[Hang] = []
        self.watch = HangWatch(plan, self.told.append, lambda: self.now)

    def wait(self, seconds: float, busy: float = 0.0) -> list[bool]:
        """Tick each second and give how often the run was to be stopped."""
        stops = []
        for _ in range(round(seconds)):
            self.now += 1.0
            self.cpu_s += busy
            stops.append(self.watch.tick())
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

    def make(**watched: Any) -> Scene:
        plan = of_command("true")
        decided = Decision(Watched(on=True, **watched), "", plan.guards.hang.source)
        found = Scene(replace(plan, guards=Guards(decided, plan.guards.nan)))
        monkeypatch.setattr(hang_watch, "examine", lambda *_: found.stuck)
        monkeypatch.setattr(procfs, "cpu_s", lambda _: found.cpu_s)
        monkeypatch.setattr(procfs, "family", lambda pid: [pid])  # others of the tests' own run too
        monkeypatch.setattr(procfs, "transferred_bytes", lambda _: 0)
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
    assert run.wait(60) == []  # how it is stopped is the launcher's


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
    assert scene(timeout_s=1).wait(100) == []


def test_a_rank_that_has_ended_is_told_apart(ranks: Any, scene: Any) -> None:
    first, second, run = ranks(0), ranks(1), scene(timeout_s=10)
    first.show(Slot.STEPS, 5)
    second.show(Slot.STEPS, 5)
    second.show(Slot.ENDED, 1)
    assert run.wait(12) == [True]
    assert run.told[0].ended == (1,)
    assert "rank 1 has ended" in run.told[0].verdict


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
    rank, run = ranks(0), scene()
    rank.show(Slot.STEPS, 5)
    rank.show(Slot.P95_NS, int(p95_s * 1e9))
    assert run.wait(limit_s, busy) == []
    assert run.wait(2, busy) == [True]
    assert run.told[0].limit_s == limit_s


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
    gone = PulseAddress(1, os.getpid(), 987_654, 0)
    (run_dir / "pulse-1.json").write_text(dumps(gone))
    (run_dir / "pulse-2.json").write_text("{")
    pulses = Pulses(run_dir)
    pulses.find()
    assert [(pulse.address.rank, pulse.steps) for pulse in pulses.read()] == [(0, 7)]
    (run_dir / "pulse-0.json").unlink()
    pulses.find()
    assert pulses.read() == ()
