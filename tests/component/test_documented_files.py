"""Files that the documentation names are there, so that a moved file takes its name along."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "tests/README.md"]
_NAMED = re.compile(r"(?<![\w/.])[a-z_]+(?:/[a-z_]+)*\.py\b")
# Files of a reader's own, and of torch.
_ELSEWHERE = {"train.py", "setup.py", "tools/train.py", "torch/version.py"}


def named(text: str) -> set[str]:
    return set(_NAMED.findall(text)) - _ELSEWHERE


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    folders = ("src", "tests", "templates", "benchmarks")
    there = [
        f"/{file.relative_to(ROOT)}" for folder in folders for file in (ROOT / folder).rglob("*.py")
    ]
    missing = {
        name
        for name in named(page.read_text(encoding="utf-8"))
        if not any(file.endswith(f"/{name}") for file in there)
    }
    assert not missing


def test_some_files_are_named() -> None:
    assert "model/places.py" in named((ROOT / "docs/design.md").read_text(encoding="utf-8"))
