"""Gives the tests of the worker's side its levers; see ``rig.py``."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_RIG = runpy.run_path(str(Path(__file__).with_name("rig.py")))
_PREEMPTED = runpy.run_path(str(Path(__file__).with_name("preempted.py")))


@pytest.fixture
def rig() -> Any:
    return _RIG["rig"]


@pytest.fixture
def plan() -> Any:
    return _RIG["plan"]


@pytest.fixture
def machine() -> Any:
    """Say that the machine decided, and not the user."""
    return _RIG["MACHINE"]


@pytest.fixture
def backend() -> Any:
    return _RIG["backend"]


@pytest.fixture
def amp(rig: Any) -> Iterator[Any]:
    """Put bf16 in place, and give what became of it."""
    with rig(amp="bfloat16") as runtime:
        yield lambda: runtime.outcomes()["amp"]


@pytest.fixture
def preempted(plan: Any, tmp_path: Path) -> Any:
    """Run loops whole, and preempted and resumed; see ``preempted.py``."""
    return _PREEMPTED["Loops"](plan, tmp_path)
