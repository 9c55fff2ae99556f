"""What tells two runs apart: the text of what runs, wherever Python finds it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from fasttrain.model.plan import Target
from fasttrain.shim.snapshots.lever import identity_of


@pytest.fixture
def script_of(plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what stands for the script of a run in this directory."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def of(kind: Any, name: str) -> str:
        return identity_of(replace(plan(tmp_path), target=Target(kind, name)))["script"]

    return of


@pytest.mark.parametrize(
    ("kind", "name", "file"),
    [
        ("script", "train.py", "train.py"),
        ("module", "train_b3", "train_b3.py"),
        ("module", "of_b3", "of_b3/__main__.py"),
        ("module", "of_b3.deep.train", "of_b3/deep/train.py"),
    ],
)
def test_code_that_changed_is_another_run(
    script_of: Any, tmp_path: Path, kind: str, name: str, file: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    for package in ("of_b3", "of_b3/deep"):
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / "__init__.py").write_text("raise AssertionError('is imported')")
    path.write_text("SCALE = 1.0")
    before = script_of(kind, name)
    assert script_of(kind, name) == before
    path.write_text("SCALE = 5.0")
    assert script_of(kind, name) != before


def test_a_module_in_an_archive(
    script_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for text in ("SCALE = 1.0", "SCALE = 5.0"):
        archive = tmp_path / f"{len(texts)}.zip"
        with ZipFile(archive, "w") as file:
            file.writestr("train_zipped.py", text)
        monkeypatch.setattr(sys, "path", [str(archive)])
        texts.append(script_of("module", "train_zipped"))
    assert texts[0] != texts[1]


def test_other_hashes_of_strings_are_another_run(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set of strings, such as a vocabulary, would have another order."""
    (tmp_path / "train.py").write_text("")
    run = replace(plan(tmp_path), target=Target("script", "train.py"))
    seeds = []
    for seed in ("0", "7", "random", ""):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        seeds.append(identity_of(run)["PYTHONHASHSEED"])
    assert seeds[:2] == ["0", "7"]
    assert seeds[2] == seeds[3] == f"random, with hashes such as {hash('random')}"
