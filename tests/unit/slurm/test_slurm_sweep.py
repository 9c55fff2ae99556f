from __future__ import annotations

from typing import Any

import pytest

from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.errors import FasttrainError
from fasttrain.model.job import JobRequest
from fasttrain.model.plan import ScriptFacts, Target
from fasttrain.model.settings import Settings, SlurmSettings
from fasttrain.slurm.submission import cells


def request(*sweep: str) -> JobRequest:
    source = Source(SourceKind.FLAG, "--sweep")
    return JobRequest(
        run_id="run",
        run_dir="/runs/run",
        target=Target("script", "train.py", ("--epochs", "1")),
        cwd="/",
        settings=Settings(),
        slurm=SlurmSettings(sweep=Setting(sweep, source)),
        facts=ScriptFacts(),
        version="0",
    )


def added(*sweep: str) -> list[tuple[str, ...]]:
    return [cell.target.args[2:] for cell in cells(request(*sweep))]


def test_every_combination_has_its_arguments_directory_and_name() -> None:
    found = cells(request("lr=1e-3,1e-4", "--seed=0:2"))
    assert [cell.target.args for cell in found] == [
        ("--epochs", "1", "--lr", lr, "--seed", seed)
        for lr in ("1e-3", "1e-4")
        for seed in ("0", "1")
    ]
    assert [cell.run_dir for cell in found] == [f"/runs/run/cell-{n}" for n in range(4)]
    assert len({cell.run_id for cell in found}) == 4
    assert found[3].cell == {"lr": "1e-4", "seed": "1"}


def test_ranges_with_steps_and_values_together() -> None:
    assert added("n=1,4:8:2") == [("--n", "1"), ("--n", "4"), ("--n", "6")]


def test_hydras_options_stay_as_they_are() -> None:
    assert added("model.lr=1,2") == [("model.lr=1",), ("model.lr=2",)]


def test_directories_of_many_cells_sort() -> None:
    names = [cell.run_dir for cell in cells(request("seed=0:12"))]
    assert names == sorted(names)


def test_one_cell_is_a_job_like_any_other() -> None:
    (cell,) = cells(request("lr=1"))
    assert (cell.run_dir, cell.target.args[-2:]) == ("/runs/run", ("--lr", "1"))


def test_no_sweep_is_the_request_itself() -> None:
    assert cells(request()) == (request(),)


@pytest.mark.parametrize("text", ["lr=", "lr=1,,2", "lr=1,1", "n=3:3", "n=0:1001", "n=0:999999999"])
def test_what_makes_no_sweep(text: str) -> None:
    with pytest.raises(FasttrainError) as caught:
        cells(request(text))
    assert (caught.value.slug, caught.value.exit_code) == ("sweep", 2)


def test_values_are_the_scripts_whatever_they_hold() -> None:
    values: Any = added("name=a b,$(x),'q'")
    assert values == [("--name", "a b"), ("--name", "$(x)"), ("--name", "'q'")]
