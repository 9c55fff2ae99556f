"""What a run has saved is there when it has been resumed, wherever the script saves it now."""

# ruff: noqa: PTH102, PTH103, PTH104, PTH105, PTH107, PTH123 - as scripts call them

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.shim.snapshots.replayed_files import LeftFiles
from fasttrain.shim.snapshots.saved_files import SavedFiles, counterparts


class Attempts:
    """Attempts of a script that saves, the first of which takes a snapshot.

    Attributes:
        told: What was put back under other names.
    """

    def __init__(self, snapshot: Path) -> None:
        snapshot.mkdir()
        self._snapshot = snapshot
        self._then: list[tuple[str, bool]] = []
        self._number = 0
        self.told: list[str] = []

    def __call__(
        self,
        start: Callable[[str], str],
        loop: Callable[[str, Any], None],
        end: Callable[[str], None] = lambda _: None,
    ) -> str:
        """Run the script; return the folder into which it saves.

        Args:
            start: Makes that folder, given one that is new in each attempt.
            loop: What it does in training, given the folder and the weights.
            end: What it does when it has been preempted.
        """
        self._number += 1
        with ExitStack() as undo:
            saved = SavedFiles(acts=True)
            files = LeftFiles(saved)
            files.install(undo)
            if self._then:
                saved.need(self._then, self._snapshot)
            folder = start(f"new-{self._number}")
            files.begin_training()
            if self._then:
                with ExitStack() as replaying:
                    files.begin(replaying)
                    loop(folder, "untrained")
                self.told = files.end()
            else:
                loop(folder, "trained")
                self._then = saved.state()
                saved.need(self._then, self._snapshot)
                end(folder)
        return folder


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempts:
    monkeypatch.chdir(tmp_path)
    return Attempts(tmp_path / "step-000000010")


def new(name: str) -> str:
    os.mkdir(name)
    return name


def emptied(_: str) -> str:
    shutil.rmtree("out", ignore_errors=True)
    os.makedirs("out")
    return "out"


def same(_: str) -> str:
    os.makedirs("out", exist_ok=True)
    return "out"


def with_first_weights(_: str) -> str:
    torch.save("first", f"{same('')}/best.pt")
    return "out"


def set_aside(_: str) -> str:
    shutil.rmtree("out.old", ignore_errors=True)
    if Path("out").exists():
        os.rename("out", "out.old")
    return same("")


def best(folder: str, weights: str) -> None:
    torch.save(weights, f"{folder}/best.pt")


def several(folder: str, weights: str) -> None:
    for epoch in range(3):
        torch.save((weights, epoch), f"{folder}/epoch-{epoch}.pt")
    os.remove(f"{folder}/epoch-0.pt")
    with open(f"{folder}/last.pkl", "wb") as file:
        pickle.dump(weights, file)
    best(folder, weights)


def atomic(folder: str, weights: str) -> None:
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        torch.save(weights, file)
    os.replace(file.name, f"{folder}/best.pt")


@pytest.mark.parametrize("start", [new, emptied, same, with_first_weights, set_aside])
@pytest.mark.parametrize("loop", [best, several, atomic])
def test_what_was_saved_is_there(attempts: Attempts, start: Any, loop: Any) -> None:
    attempts(start, loop)
    for _ in range(2):
        folder = attempts(start, loop)
        assert torch.load(f"{folder}/best.pt") == "trained"
        assert (attempts.told != []) == (start is new)
        if loop is several:
            assert torch.load(f"{folder}/epoch-2.pt") == ("trained", 2)
            assert not Path(folder, "epoch-0.pt").exists()
            assert pickle.loads(Path(folder, "last.pkl").read_bytes()) == "trained"


def test_what_is_deleted_after_the_snapshot_is_there_again(attempts: Attempts) -> None:
    """Such as what was in a `tempfile.TemporaryDirectory`, which ends with the process."""
    attempts(new, best, lambda folder: shutil.rmtree(folder))
    assert torch.load(f"{attempts(new, best)}/best.pt") == "trained"


def test_a_name_may_have_a_time_stamp(attempts: Attempts) -> None:
    names = iter(["model_20240131_3", "model_20240201_3"])
    attempts(same, lambda _, weights: torch.save(weights, next(names)))
    attempts(same, lambda _, weights: torch.save(weights, next(names)))
    assert torch.load("model_20240201_3") == "trained"
    assert attempts.told == [str(Path("model_20240201_3").absolute())]


def test_what_is_gone_is_refused_and_leaves_nothing(attempts: Attempts, capfd: Any) -> None:
    folder = attempts(same, best)
    for _ in range(2):
        subprocess.run(["rm", "-rf", folder], check=True)  # unseen
        with pytest.raises(SystemExit):
            attempts(same, best)
        told = capfd.readouterr().err
        assert "out/best.pt, which is gone" in told
        assert "[snapshot-files]" in told
        assert not Path("out/best.pt").exists()
    Path("out/best.pt").write_bytes(b"")  # as the message says
    attempts(same, best)


def test_other_files_are_refused(attempts: Attempts, capfd: Any) -> None:
    attempts(same, best)
    with pytest.raises(SystemExit):
        attempts(same, lambda _, weights: (torch.save(weights, "a.pth"), torch.save(weights, "b")))
    assert "other files" in (told := capfd.readouterr().err)
    assert "[snapshot-files]" in told


@pytest.mark.parametrize(
    ("then", "now", "numbers"),
    [
        (["/a/x", "/a/y"], ["/a/y", "/a/x"], [1, 0]),
        (["/a/x.pt", "/a/y.pt"], ["/b/y.pt", "/b/x.pt"], [1, 0]),
        (["/a/1/m", "/a/2/m"], ["/b/2/m", "/b/1/m"], [1, 0]),
        (["/a8/m", "/a9/m"], ["/b1/m", "/b2/m"], [0, 1]),
        (["/a/m", "/b/m"], ["/c/m"], [None]),
        (["/a/m_7_1", "/a/n_7_1"], ["/a/n_8_1", "/a/m_8_1"], [1, 0]),
        (["/a/f3.pt", "/a/f3.png"], ["/a/qx.png", "/a/qx.pt"], [1, 0]),
        (["/a/f3.pt"], ["/a/f3.pt", "/a/f4.pt"], [0, None]),
    ],
)
def test_files_have_counterparts(then: list[str], now: list[str], numbers: list[Any]) -> None:
    found = counterparts(then, now)
    assert [found.get(path) for path in now] == numbers
