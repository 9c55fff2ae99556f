"""Runs of wandb, which rank 0 alone has: what they are called on all ranks."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fasttrain.shim.data_parallel.answers.answers import Answers
from fasttrain.shim.data_parallel.answers.lever import SideEffects
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from support.forked_ranks import on_ranks


class Run:
    """What wandb's runs have for names: a folder and an id to read, and a name to change.

    Source: https://docs.wandb.ai/ref/python/sdk/classes/run
    """

    def __init__(self, mode: str, number: int) -> None:
        folder = tempfile.gettempdir() if mode == "disabled" else f"wandb/run-{number}/files"
        self._dir, self._id = folder, f"{mode}-{number}"
        self.name = f"dummy-{number}" if mode == "disabled" else f"swift-sun-{number}"

    @property
    def dir(self) -> str:
        return self._dir

    @property
    def id(self) -> str:
        return self._id


class Standin(ModuleType):
    """Stands in for wandb: ``init`` and ``run``, and what a call with no connection raises."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.run: Run | None = None
        self.made = 0

    def init(self, *, project: str = "", mode: str = "online") -> Run:
        if project == "missing" and mode != "disabled":
            raise ConnectionError("no route to wandb")
        self.made += 1
        self.run = Run(mode, self.made)
        return self.run


def on_both(tmp_path: Path, act: Callable[[Any], Any]) -> list[Any]:
    """Return what a function gives on each rank that imports such a wandb."""

    def run(ranks: Ranks) -> Any:
        undo, answers = ExitStack(), Answers(ranks)
        answers.install(undo)
        sys.modules["wandb"] = wandb = Standin()
        recorder = OutcomeRecorder("side_effects", "rank 0", explicit=False)
        scratch = tmp_path / f"run/rank-{ranks.rank}.files"
        SideEffects(recorder, ranks, answers, scratch).install(undo)
        return act(wandb)

    ends = on_ranks(tmp_path, run)
    assert [end.code for end in ends] == [0, 0], "".join(end.stderr for end in ends)
    return [end.value for end in ends]


def test_all_ranks_see_the_names_of_rank_0s_runs(tmp_path: Path) -> None:
    def act(wandb: Any) -> Any:
        runs = [wandb.init(project="p"), wandb.init(project="q", mode="offline")]
        found = [[run.dir, run.id, run.name] for run in (*runs, wandb.run)]
        runs[0].name = "renamed"
        return found, runs[0].name

    first, second = on_both(tmp_path, act)
    offline = ["wandb/run-2/files", "offline-2", "swift-sun-2"]
    online = ["wandb/run-1/files", "online-1", "swift-sun-1"]
    assert first == [[online, offline, offline], "renamed"]
    assert second == first


def test_a_checkpoint_in_a_runs_folder_is_found_by_all(tmp_path: Path) -> None:
    def act(wandb: Any) -> Any:
        run = wandb.init(project="p")
        folder = Path(tmp_path, run.dir, run.name)
        folder.mkdir(parents=True)
        torch.save({"step": 3}, folder / f"{run.id}.pt")
        return torch.load(folder / f"{run.id}.pt")["step"]

    assert on_both(tmp_path, act) == [3, 3]


def test_a_run_that_can_not_start_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    def act(wandb: Any) -> str:
        with pytest.raises(ConnectionError) as caught:
            wandb.init(project="missing")
        return str(caught.value)

    assert on_both(tmp_path, act) == ["no route to wandb"] * 2


def test_runs_that_the_lever_has_not_named_keep_their_own(tmp_path: Path) -> None:
    def act(wandb: Any) -> Any:
        wandb.init(project="p")
        other = Run("disabled", 7)
        return [other.id, other.name]

    assert on_both(tmp_path, act) == [["disabled-7", "dummy-7"]] * 2
