"""Folders of the tests of faults."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """Return a folder for temporary files with a short path: a Unix socket's has 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    yield folder
    shutil.rmtree(folder)
