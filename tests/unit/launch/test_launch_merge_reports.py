"""One account of a worker and of the processes that its script started."""

from __future__ import annotations

from dataclasses import replace

from fasttrain.launch.receipts import in_children, merged
from fasttrain.model.outcome import Outcome, RankReport, Site, State, StepStats


def report(amp: Outcome, **stats: float) -> RankReport:
    return RankReport(1, "", "2.13.0", (amp,), StepStats(**stats), finished=True)


def applied(forwards: int, *notes: str) -> Outcome:
    site = Site("Net", "train.py:3", forwards)
    return Outcome(
        "amp", "bf16", State.APPLIED, sites=(site,), counts={"forwards": forwards}, notes=notes
    )


IDLE = Outcome("amp", "bf16", State.ARMED, "no module was called", explicit=True)


def test_a_worker_alone_is_itself() -> None:
    worker = report(IDLE)
    assert merged(worker, ()) is worker


def test_children_that_train_for_an_idle_worker() -> None:
    both = merged(report(IDLE, wall_s=9), [report(applied(2, "a")), report(applied(3, "a", "b"))])
    (amp,) = both.outcomes
    assert amp.state is State.APPLIED
    assert amp.reason == ""
    assert amp.counts == {"forwards": 5}
    assert amp.sites == (Site("Net", "train.py:3", 5),)
    assert amp.notes == ("a", "b", in_children(2))
    assert (both.rank, both.finished) == (1, True)


def test_warnings_of_all_processes() -> None:
    child = replace(report(IDLE), warnings=("nan",))
    assert merged(report(IDLE), [child, child]).warnings == ("nan",)


def test_a_level_is_not_added_up() -> None:
    scales = [Outcome("amp", "", State.APPLIED, counts={"scale": s, "steps": 1}) for s in (8, 2)]
    (amp,) = merged(report(IDLE), map(report, scales)).outcomes
    assert amp.counts == {"scale": 2, "steps": 2}


def test_a_worker_that_trains_itself_needs_no_note() -> None:
    (amp,) = merged(report(applied(4)), [report(applied(1)), report(IDLE)]).outcomes
    assert (amp.counts, amp.notes) == ({"forwards": 5}, ())


def test_a_failure_tells_more_than_nothing() -> None:
    failed = Outcome("amp", "bf16", State.FAILED, "it broke")
    (amp,) = merged(report(IDLE), [report(failed)]).outcomes
    assert (amp.state, amp.reason) == (State.FAILED, "it broke")


def test_speed_is_the_busiest_processs() -> None:
    stats = merged(
        report(IDLE, steps=1, wall_s=10, peak_memory_bytes=7),
        [
            report(IDLE, steps=8, median_step_s=0.5, wall_s=4, peak_memory_bytes=3),
            report(IDLE, steps=2, median_step_s=0.1, wall_s=5, peak_memory_bytes=5),
        ],
    ).stats
    assert stats == StepStats(steps=8, median_step_s=0.5, wall_s=10, peak_memory_bytes=7)
