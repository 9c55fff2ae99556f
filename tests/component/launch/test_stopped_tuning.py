"""What tune starts after a run that it has stopped."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain.cli import tuning
from fasttrain.launch import start
from fasttrain.launch.process.stop import STOPPING, Stop
from fasttrain.model.outcome import Receipt
from fasttrain.model.tuning import Tuning


def test_what_follows_a_run_that_was_stopped_hears_signals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its script would inherit that they are ignored, so that no pool of it could be ended."""
    before = [signal.getsignal(signum) for signum in STOPPING]

    def stopped(*_: Any) -> Receipt:
        stop = Stop(1.0, lambda _: None)
        stop.hear(signal.SIGTERM)
        stop.ignore_more()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        return Receipt("run", str(tmp_path), command="", exit_code=143, wall_s=1.0)

    monkeypatch.setattr(start, "start", stopped)
    monkeypatch.setattr(tuning, "mask_plan", lambda plan, _: plan)
    plan: Any = SimpleNamespace(run_dir=str(tmp_path), tuning=Tuning(10.0, "", ()))
    tuned: Any = SimpleNamespace(plan=plan)
    invocation: Any = SimpleNamespace(environ={})
    assert tuning._start(tuned, invocation, quiet=True).receipt.exit_code == 143
    assert [signal.getsignal(signum) for signum in STOPPING] == before
