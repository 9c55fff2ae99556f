"""Runs whole command lines in this process, and makes receipts to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fasttrain.cli.app import main
from fasttrain.model.outcome import Outcome, RankReport, Receipt, Site, State, StepStats


@dataclass(frozen=True, slots=True)
class Said:
    """What one command line came to."""

    code: int
    out: str
    err: str


@pytest.fixture
def fasttrain_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    """Run ``fasttrain`` with these words, in the test's own directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):  # they would choose the Python of a run
        monkeypatch.delenv(name, raising=False)

    def run(*words: str) -> Said:
        code = main(list(words))
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return run


@pytest.fixture
def receipt(tmp_path: Path) -> Callable[..., Receipt]:
    """Return the receipt of a run of some ranks; rank 1 fails at what rank 0 applies."""

    def make(count: int = 1, **changes: Any) -> Receipt:
        stats = StepStats(
            1200, 0.0123, 0.0199, 3456.4, 2.5, 41.2, peak_memory_bytes=3 << 30, wall_s=20
        )
        sites = tuple(Site("Net", f"train.py:{line}", 2) for line in range(6))
        applied = Outcome(
            "amp", "bfloat16", State.APPLIED, sites=sites, counts={"forwards": 2400, "casts": 0}
        )
        failed = Outcome("amp", "bfloat16", State.FAILED, reason="out of [bold]memory[/]")
        ceded = Outcome("compile", "default", State.CEDED, reason="the script compiles")
        reports = tuple(
            RankReport(rank, "cuda:0", "2.13", (failed if rank == 1 else applied, ceded), stats)
            for rank in range(count)
        )
        run_dir = str(tmp_path / "fasttrain_runs" / "r1")
        fields = {"ranks": reports, "warnings": ("a warning",), "hints": ("a hint",), **changes}
        return Receipt("r1", run_dir, "train.py --lr 3", 0, 75.0, **fields)

    return make
