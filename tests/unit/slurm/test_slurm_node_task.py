"""Which ends of a run keep its job from being queued again."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain.files import write_private
from fasttrain.launch.node_run import Ended
from fasttrain.model.codec import dumps
from fasttrain.model.job import JOB_FILE, Allocation
from fasttrain.model.outcome import Outcome, RankReport, State, StepStats
from fasttrain.slurm import node_task
from fasttrain.slurm.node_task import NodeTask, is_hopeless


@pytest.mark.parametrize(
    ("cause", "hopeless"),
    [
        ("disk-full", True),
        ("syntax", True),
        ("refused", True),
        ("stopped", False),  # by the signal that warned it
        ("signal", False),
        ("interrupted", False),  # --signal INT
        ("exit", False),
        ("exception", False),
        ("hang", False),
    ],
)
def test_what_would_end_so_again(cause: str, hopeless: bool) -> None:
    assert is_hopeless(cause) is hopeless


@pytest.mark.parametrize(
    ("preempt", "code", "state", "again"),
    [
        ("snapshot", 85, State.APPLIED, True),
        ("snapshot", 1, State.APPLIED, True),
        ("snapshot", 0, State.APPLIED, False),  # the signal came after the last batch
        ("snapshot", 0, State.ARMED, False),
        ("snapshot", 0, State.CEDED, True),  # the script may have saved, and left
        ("snapshot", 0, None, True),  # it hasn't imported torch
        ("signal", 0, None, True),
    ],
)
def test_what_is_queued_again_after_the_warning(
    make_draft: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    preempt: str,
    code: int,
    state: State | None,
    again: bool,
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    job = make_draft(run={"run_dir": str(run_dir), "preempt": preempt}, requeue=3)
    write_private(run_dir / JOB_FILE, dumps(job.requests[0]))
    queued: list[bool] = []

    def attend(_: Any, observers: Any) -> Ended:
        for watch in observers.watches:
            watch.heard(signal.SIGUSR2)
        if state is not None:
            outcome = Outcome("preempt", "snapshot", state)
            report = RankReport(0, "cpu", "2.13", (outcome,), StepStats(), finished=True)
            write_private(run_dir / "rank-0.json", dumps(report))
        return Ended(code, 1.0)

    place = Allocation("12", ("node1",), 0, 0, 0, 1, 0, restarts=0)
    monkeypatch.setattr(node_task, "read_allocation", lambda _: place)
    monkeypatch.setattr(node_task, "prepare", lambda *_: SimpleNamespace(masked=None, plan=None))
    monkeypatch.setattr(node_task, "attend", attend)
    monkeypatch.setattr(node_task, "_crash", lambda *_: None)
    monkeypatch.setattr(node_task, "gather", lambda *_, **__: None)
    monkeypatch.setattr(node_task, "_leave", lambda code: code)
    monkeypatch.setattr(node_task, "_requeue", lambda *_: queued.append(True))
    assert NodeTask(str(run_dir))() == code
    assert bool(queued) == again
