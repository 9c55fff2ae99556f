"""Fixtures of the tests of the worker's side: its levers (``support.rig``) and preempted loops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import support.rig
from support.preempted import Loops


@pytest.fixture
def rig() -> Any:
    return support.rig.rig


@pytest.fixture
def plan() -> Any:
    return support.rig.plan


@pytest.fixture
def machine() -> Any:
    """Say that the machine decided, and not the user."""
    return support.rig.MACHINE


@pytest.fixture
def backend() -> Any:
    return support.rig.backend


@pytest.fixture
def amp(rig: Any) -> Iterator[Any]:
    """Put bf16 in place; the value is a function that returns its outcome."""
    with rig(amp="bfloat16") as runtime:
        yield lambda: runtime.outcomes()["amp"]


@pytest.fixture
def preempted(plan: Any, tmp_path: Path) -> Any:
    """Run loops whole, and preempted and resumed; see ``support/preempted.py``."""
    return Loops(plan, tmp_path)
