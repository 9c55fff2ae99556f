"""Places in the user's code, as a person can open them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.shim.process.callsite import call_site, is_installed, location


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


BAR = """
def bar(items):
    for item in items:
        yield item

def first(items):
    return next(items)
"""


def test_a_progress_bar_passes_on_what_the_loop_asks_for() -> None:
    package: dict[str, Any] = {}
    exec(compile(BAR, "/x/site-packages/bars/bar.py", "exec"), package)
    # In a file of no one's, as a loader's hook is.
    places: Any = iter(eval(compile("lambda: ask()", "<hook>", "eval"), {"ask": call_site}), None)
    asked = next(package["bar"](places))
    assert asked.startswith("tests/component/shim/process/test_callsite.py:")
    assert package["first"](places) == "bars/bar.py:7", "it asks by itself"


@pytest.mark.parametrize(
    ("path", "installed"),
    [
        (os.__file__, True),
        (torch.__file__, True),
        ("/home/me/.local/lib/python3.11/site-packages/timm/data.py", True),  # by pip --user
        ("/usr/lib/python3/dist-packages/yaml/nodes.py", True),  # beneath an environment
        ("/home/me/project/train.py", False),
    ],
)
def test_a_package_is_installed_wherever_it_lies(path: str, installed: bool) -> None:
    assert is_installed(path) is installed
