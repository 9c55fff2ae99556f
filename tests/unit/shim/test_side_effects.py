"""What rank 0 leaves on disk, and what another rank doesn't."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fasttrain.shim.ledger import Ledger
from fasttrain.shim.levers.side_effects import SideEffects
from fasttrain.spec.outcome import State

Start = Callable[[int], SideEffects]


class Store:
    """What the ranks tell each other; a key that never comes is an error and not a wait."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def wait(self, keys: list[str]) -> None:
        assert set(keys) <= self.values.keys()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def start(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Put the lever of a rank in place until the test has ended."""
    monkeypatch.setenv("WANDB_MODE", "disabled")  # as the lever sets it
    with ExitStack() as undo:

        def install(rank: int) -> SideEffects:
            ranks: Any = SimpleNamespace(rank=rank, store=store, waits=nullcontext)
            ledger = Ledger("side_effects", "rank 0", explicit=False)
            lever = SideEffects(ledger, ranks, tmp_path / "scratch")
            lever.install(undo)
            return lever

        yield install


@pytest.mark.parametrize(("rank", "mode"), [(0, "offline"), (1, "disabled")])
def test_only_rank_0_makes_a_wandb_run(
    start: Start, monkeypatch: pytest.MonkeyPatch, rank: int, mode: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    start(rank)
    assert os.environ["WANDB_MODE"] == mode


@pytest.mark.parametrize(("rank", "mode"), [(0, "online"), (1, "disabled")])
def test_a_mode_that_the_script_chooses_is_rank_0s(
    start: Start, monkeypatch: pytest.MonkeyPatch, rank: int, mode: str
) -> None:
    asked: list[dict[str, Any]] = []
    standin = ModuleType("wandb")  # init() takes keywords alone
    vars(standin)["init"] = lambda **kwargs: asked.append(kwargs)
    monkeypatch.setitem(sys.modules, "wandb", standin)
    start(rank)
    vars(standin)["init"](project="p", mode="online")
    assert asked == [{"project": "p", "mode": mode}]


def test_rank_0_saves_and_tells(start: Start, store: Store, tmp_path: Path) -> None:
    lever = start(0)
    torch.save({"a": 1}, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt") == {"a": 1}
    assert store.values == {"saved/1": str(tmp_path / "model.pt")}
    assert (lever.ledger.state, lever.ledger.counts["files"]) == (State.APPLIED, 1)


def test_rank_0_tells_of_a_file_that_it_renames(start: Start, store: Store, tmp_path: Path) -> None:
    start(0)
    torch.save({"a": 1}, tmp_path / "model.tmp")
    for old, new in (("model.tmp", "model.new"), ("model.new", "model.pt")):
        (tmp_path / old).rename(tmp_path / new)
    assert store.values == {"saved/1": str(tmp_path / "model.pt"), "renamed/1": ""}


def test_another_rank_saves_nothing_and_loads_what_rank_0_saved(
    start: Start, store: Store, tmp_path: Path
) -> None:
    torch.save({"by": "rank 0"}, tmp_path / "elsewhere.pt")
    lever = start(1)
    torch.save({"by": "rank 1"}, tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()
    with pytest.raises(KeyError):
        torch.load(tmp_path / "model.pt")  # would wait for rank 0
    store.set("saved/1", str(tmp_path / "elsewhere.pt"))
    assert torch.load(tmp_path / "model.pt") == {"by": "rank 0"}
    (site,) = lever.ledger.outcome().sites
    assert (site.what, site.count) == ("left to rank 0", 1)


def test_another_rank_writes_and_reads_a_copy_of_its_own(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("of rank 0\n")
    lever = start(1)
    assert log.read_text() == "of rank 0\n"
    with log.open("w") as file:
        file.write("of rank 1\n")
    assert log.read_text() == "of rank 1\n"
    log.unlink()
    assert log.read_text() == "of rank 0\n"
    assert any("log.txt is rank 0's" in note for note in lever.ledger.outcome().notes)


def test_another_rank_has_temporary_directories_of_its_own(start: Start) -> None:
    start(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"a": 1}, f"{folder}/model.pt")
        assert torch.load(f"{folder}/model.pt") == {"a": 1}
        Path(folder, "log.txt").write_text("here")
        assert sorted(p.name for p in Path(folder).iterdir()) == ["log.txt", "model.pt"]
    assert not Path(folder).exists()


def test_a_lever_that_has_ceded_leaves_files_alone(start: Start, tmp_path: Path) -> None:
    lever = start(1)
    lever.ledger.cede("the script handles its ranks itself")
    torch.save({"a": 1}, tmp_path / "model.pt")
    (tmp_path / "log.txt").write_text("of rank 1")
    assert torch.load(tmp_path / "model.pt") == {"a": 1}
    (tmp_path / "log.txt").unlink()
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]
