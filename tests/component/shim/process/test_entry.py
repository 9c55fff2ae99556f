from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fasttrain.model.codec import dumps, from_data
from fasttrain.model.errors import FasttrainError
from fasttrain.model.plan import LaunchPlan
from fasttrain.shim.process.entry import Entry, read_entry

PLANS = Path(__file__).parents[3] / "data" / "plans"
RANKS = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}


def plan_of(name: str, run_dir: Path) -> LaunchPlan:
    golden = json.loads((PLANS / f"{name}.json").read_text())["plan"]
    return replace(from_data(LaunchPlan, golden), run_dir=str(run_dir))


@pytest.fixture
def alone(tmp_path: Path) -> str:
    """The plan of a run of one process."""
    path = tmp_path / "plan.json"
    path.write_text(dumps(plan_of("cpu-laptop-plain", tmp_path)))
    return str(path)


@pytest.fixture
def ranked(tmp_path: Path) -> str:
    """The plan of a run by torchrun."""
    path = tmp_path / "plan.json"
    path.write_text(dumps(plan_of("8xh100-two-of-four", tmp_path)))
    return str(path)


def refused(argv: list[str], environ: dict[str, str]) -> tuple[str, str]:
    with pytest.raises(FasttrainError) as caught:
        read_entry(argv, environ)
    return caught.value.slug, caught.value.why


def test_arguments_are_those_of_the_command_line(alone: str) -> None:
    entry = read_entry([alone, "script", "a.py", "--", "", "é\n"], {})
    assert (entry.kind, entry.name, entry.args) == ("script", "a.py", ("--", "", "é\n"))


def test_one_process_asks_nobody_for_its_rank(alone: str) -> None:
    environ = {"RANK": "x", "LOCAL_RANK": "7", "TORCHELASTIC_RESTART_COUNT": "y"}
    entry = read_entry([alone, "module", "pkg"], environ)
    assert (entry.rank, entry.local_rank, entry.restarts) == (0, 0, None)


def test_restarts_of_slurm_and_torchrun_are_added_up(ranked: str) -> None:
    def restarts(**counts: str) -> int | None:
        found: Entry = read_entry([ranked, "script", "a.py"], {**RANKS, **counts})
        assert (found.rank, found.local_rank) == (3, 1)
        return found.restarts

    assert restarts() is None
    assert restarts(TORCHELASTIC_RESTART_COUNT="0", FASTTRAIN_RESTART_COUNT="5") is None
    assert restarts(TORCHELASTIC_RESTART_COUNT="2") == 2
    assert restarts(TORCHELASTIC_RESTART_COUNT="2", FASTTRAIN_RESTART_COUNT="5") == 7
    assert restarts(TORCHELASTIC_RESTART_COUNT="2", FASTTRAIN_RESTART_COUNT="abc") == 2


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("value", ["", "-1", "1.0", "nan", "٣", "9" * 5000, "\udcff"])
def test_a_rank_that_is_none_is_refused(ranked: str, name: str, value: str) -> None:
    assert refused([ranked, "script", "a.py"], {**RANKS, name: value})[0] == "worker-rank"


@pytest.mark.parametrize("words", [[], ["p"], ["p", "script"], ["p", "shell", "a.py"]])
def test_a_command_line_that_fasttrain_never_writes(words: list[str]) -> None:
    assert refused(words, {})[0] == "worker-call"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text[:-9], "JSON"),
        (lambda text: re.sub('"schema": 1', '"schema": 2', text), "schema"),
        (lambda text: text.replace('"cwd"', '"pwd"'), "pwd"),
        (lambda text: re.sub('"run_dir": "[^"]*"', r'"run_dir": "a\\u0000b"', text), "directory"),
        (lambda text: re.sub('"run_dir": "[^"]*"', '"run_dir": "/gone"', text), " /gone"),
        (lambda text: "", "JSON"),
    ],
)
def test_a_plan_that_is_none_is_refused(alone: str, change: object, why: str) -> None:
    path = Path(alone)
    path.write_text(change(path.read_text()))  # type: ignore[operator]
    slug, told = refused([alone, "script", "a.py"], {})
    assert slug == "worker-plan"
    assert why in told


def test_a_plan_that_is_no_file_is_refused(tmp_path: Path) -> None:
    assert refused([str(tmp_path), "script", "a.py"], {})[0] == "worker-plan"
    assert refused([str(tmp_path / "none"), "script", "a.py"], {})[0] == "worker-plan"
