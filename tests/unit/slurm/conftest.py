"""Makes jobs as they would be sent, for any test of this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fasttrain.config.resolve import Resolved
from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.job import SubmittedJob
from fasttrain.model.plan import ScriptFacts, Target
from fasttrain.model.settings import Settings, SlurmSettings
from fasttrain.slurm.submission import Draft, draft

MakeDraft = Callable[..., Draft]


def named(table: Any, values: Mapping[str, Any]) -> Any:
    source = {name: Source(SourceKind.FLAG, "--" + name.replace("_", "-")) for name in values}
    return replace(table, **{name: Setting(v, source[name]) for name, v in values.items()})


@pytest.fixture
def make_draft() -> MakeDraft:
    """Return the job of ``train.py`` with these options by flag."""

    def make(
        run: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, **slurm: Any
    ) -> Draft:
        settings = named(Settings(), {"run_dir": "/runs/run", **(run or {})})
        wanted = Resolved(settings, slurm=named(SlurmSettings(), slurm))
        target = Target("script", "train.py", ())
        return draft(wanted, target, ScriptFacts(), None, environ or {})

    return make


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., SubmittedJob]:
    """Return a job that was sent, with its run directory."""

    def make(job_id: str = "12", cells: int = 0, submitted_s: float = 1.0) -> SubmittedJob:
        run_dir = tmp_path / "fasttrain_runs" / f"run-{job_id}"
        folders = tuple(str(run_dir / f"cell-{index}") for index in range(cells))
        for folder in (str(run_dir), *folders):
            Path(folder).mkdir(parents=True)
        return SubmittedJob(
            job_id, f"run-{job_id}", str(run_dir), "train.py", submitted_s, 1, folders
        )

    return make
