"""torchrun's variables, hidden and brought back."""

from __future__ import annotations

import os

import pytest

from fasttrain.shim.process import entry


@pytest.fixture
def torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in entry.NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(entry, "_hidden", {})


@pytest.mark.usefixtures("torchruns")
def test_hidden_variables_are_known_to_fasttrain_alone() -> None:
    entry.hide()
    assert "RANK" not in os.environ
    assert "WORLD_SIZE" not in os.environ
    assert entry.get("RANK") == "3"
    assert entry.get("LOCAL_RANK", "none") == "none"
    entry.restore()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "4")


@pytest.mark.usefixtures("torchruns")
def test_what_the_script_sets_meanwhile_does_not_count() -> None:
    entry.hide()
    os.environ["RANK"] = "0"
    assert entry.get("RANK") == "3"
    entry.restore()
    assert os.environ["RANK"] == "3"


@pytest.mark.usefixtures("torchruns")
def test_other_variables_stay() -> None:
    os.environ["MASTER_ADDR"] = "node1"
    before = dict(os.environ)
    entry.hide()
    gone = set(before) - set(os.environ)
    assert gone == {"RANK", "WORLD_SIZE", "MASTER_ADDR"}
    entry.restore()
    assert dict(os.environ) == before
    del os.environ["MASTER_ADDR"]
