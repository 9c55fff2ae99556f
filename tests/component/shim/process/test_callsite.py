"""Places in the user's code, as a person can open them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasttrain.shim.process.callsite import location


def test_a_place_is_told_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    assert location(str(tmp_path / "project" / "src" / "train.py"), 3) == "src/train.py:3"
    assert location(str(tmp_path / "train.py"), 3) == f"{tmp_path}/train.py:3"
    assert location("/x/site-packages/timm/data.py", 4) == "timm/data.py:4"


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert location(str(gone / "train.py"), 3) == f"{gone}/train.py:3"
    assert location("train.py", 3) == "train.py:3"
