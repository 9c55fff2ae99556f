from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain.model.codec import dumps, loads
from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.job import SECRETS_VARIABLE, JobRequest
from fasttrain.model.plan import ScriptFacts, Target
from fasttrain.model.settings import Settings, SlurmSettings
from fasttrain.slurm import submission
from fasttrain.slurm.node_task import NodeTask, masked, unmasked

FLAG = Source(SourceKind.FLAG, "--env")


def env(*entries: str) -> Setting[tuple[str, ...]]:
    return Setting(entries, FLAG)


REQUEST = JobRequest(
    run_id="run",
    run_dir="/run",
    target=Target("script", "train.py", ("--api-key", "hunter2", "--token=hunter3", "--lr", "1")),
    cwd="/",
    settings=Settings(env=env("WANDB_API_KEY=hunter4=x", "A=1")),
    slurm=SlurmSettings(),
    facts=ScriptFacts(),
    version="0",
)


def test_nothing_secret_is_written_and_all_of_it_comes_back() -> None:
    (shown,), variable = masked([REQUEST])
    text = dumps(shown)
    assert "hunter" not in text
    assert "A=1" in text
    assert unmasked(loads(JobRequest, text), variable) == REQUEST


def test_without_secrets_there_is_no_variable() -> None:
    plain = replace(
        REQUEST, target=Target("script", "train.py", ("--lr", "1")), settings=Settings()
    )
    assert masked([plain]) == ((plain,), {})
    assert unmasked(plain, {}) == plain


def test_what_is_secret_by_its_value_is_carried_too() -> None:
    url = "postgres://me:hunter5@db"
    request = replace(
        REQUEST,
        target=Target("script", "train.py", (f"--db={url}", "--wandb", "hunter-by-value")),
        settings=Settings(env=env(f"DB={url}", "NOTE=***")),
    )
    (shown,), variable = masked([request], ("hunter-by-value",))
    assert "hunter" not in dumps(shown)
    assert unmasked(loads(JobRequest, dumps(shown)), variable) == request
    with pytest.raises(ValueError, match=SECRETS_VARIABLE):
        unmasked(shown, {})


@pytest.mark.parametrize("variable", [{}, {SECRETS_VARIABLE: "[]"}, {SECRETS_VARIABLE: "{"}])
def test_a_job_without_its_secrets_is_no_run_with_stars(variable: dict[str, str]) -> None:
    url = "FROM=postgres://me:hunter5@db"
    for request in (
        REQUEST,
        replace(REQUEST, settings=Settings()),
        replace(REQUEST, target=Target("script", "x.py", ()), settings=Settings(env=env(url))),
    ):
        (shown,), _ = masked([request])
        with pytest.raises(ValueError, match=SECRETS_VARIABLE):
            unmasked(shown, variable)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("max_token", [("--max_token", "64"), ("--max_token", "128")]),
        ("data.key", [("data.key=64",), ("data.key=128",)]),
    ],
)
def test_each_cell_of_a_sweep_gets_its_own_values(
    make_draft: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    words: list[tuple[str, ...]],
) -> None:
    sent: dict[str, Any] = {}

    def submit(_: Any, tasks: list[NodeTask], changes: dict[str, str], *__: Any) -> list[Any]:
        sent.update(tasks=tasks, environ=changes)
        return [SimpleNamespace(job_id="12_0")]

    monkeypatch.setattr(submission, "submit", submit)
    monkeypatch.setattr(submission.Executor, "affinity", lambda *_: 1)
    run = {"run_dir": str(tmp_path / "run"), "env": ("WANDB_API_KEY=hunter4",)}
    job = make_draft(run=run, sweep=(f"{option}=64,128", "seed=0:3"))
    submission.send(job)
    got = [unmasked(task.request(), sent["environ"]) for task in sent["tasks"]]
    assert [each.target.args for each in got] == [
        (*own, "--seed", seed) for own in words for seed in ("0", "1", "2")
    ]
    assert {each.settings.env.value for each in got} == {run["env"]}
    # Each once: execve takes no variable of more than 128 KiB.
    assert len(json.loads(sent["environ"][SECRETS_VARIABLE])) == 3


def test_what_a_cell_is_told_to_be_holds_no_secret(make_draft: Any) -> None:
    url = "postgres://me:hunter-url@db"
    job = make_draft(
        run={"env": ("HF_TOKEN=hunter-env",)},
        sweep=("api_key=hunter-1,hunter-2", f"db={url}", "note=of hunter-env", "max_token=64"),
    )
    shown, _ = masked(job.requests, job.secrets)
    assert "hunter" not in "".join(map(dumps, shown))
    assert {each.cell["max_token"] for each in shown} == {"64"}, "a table shows it"


def test_secrets_of_another_job_change_nothing() -> None:
    plain = replace(REQUEST, target=Target("script", "x.py", ("--a", "***")), settings=Settings())
    _, variable = masked([REQUEST])
    assert unmasked(plain, variable) == plain
