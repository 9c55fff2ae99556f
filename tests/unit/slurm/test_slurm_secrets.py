from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fasttrain.model.codec import dumps, loads
from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.job import SECRETS_VARIABLE, JobRequest
from fasttrain.model.plan import ScriptFacts, Target
from fasttrain.model.settings import Settings, SlurmSettings
from fasttrain.slurm.node_task import masked, unmasked

FLAG = Source(SourceKind.FLAG, "--env")
REQUEST = JobRequest(
    run_id="run",
    run_dir="/run",
    target=Target("script", "train.py", ("--api-key", "hunter2", "--token=hunter3", "--lr", "1")),
    cwd="/",
    settings=Settings(env=Setting(("WANDB_API_KEY=hunter4=x", "A=1"), FLAG)),
    slurm=SlurmSettings(),
    facts=ScriptFacts(),
    version="0",
)


def test_nothing_secret_is_written_and_all_of_it_comes_back() -> None:
    shown, variable = masked(REQUEST)
    text = dumps(shown)
    assert "hunter" not in text
    assert "A=1" in text
    assert unmasked(loads(JobRequest, text), variable) == REQUEST


def test_without_secrets_there_is_no_variable() -> None:
    plain = replace(
        REQUEST, target=Target("script", "train.py", ("--lr", "1")), settings=Settings()
    )
    assert masked(plain) == (plain, {})
    assert unmasked(plain, {}) == plain


def test_what_is_secret_by_its_value_is_carried_too() -> None:
    url = "postgres://me:hunter5@db"
    request = replace(
        REQUEST,
        target=Target("script", "train.py", (f"--db={url}", "--wandb", "hunter-by-value")),
        settings=Settings(env=Setting((f"DB={url}", "NOTE=***"), FLAG)),
    )
    shown, variable = masked(request, ("hunter-by-value",))
    assert "hunter" not in dumps(shown)
    assert unmasked(loads(JobRequest, dumps(shown)), variable) == request
    with pytest.raises(ValueError, match=SECRETS_VARIABLE):
        unmasked(shown, {})


def test_a_job_without_its_secrets_is_no_run_with_stars() -> None:
    shown, _ = masked(REQUEST)
    with pytest.raises(ValueError, match=SECRETS_VARIABLE):
        unmasked(shown, {})
    _, variable = masked(REQUEST)
    assert set(json.loads(variable[SECRETS_VARIABLE])) == {"env", "args"}
