"""The files that other processes know by name are where their names say."""

from __future__ import annotations

import importlib.util

import pytest

from fasttrain.model import places

FILES = (
    places.WORKER_PROGRAM, places.AGENT_PROGRAM, places.LAUNCHER_PROGRAM, places.GUARDIAN_PROGRAM,
    places.BENCH_PROGRAM, places.TRIAL_PROGRAM, places.REPLAYED_FILES, *places.RANKS_WAIT_IN,
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_file_exists(name: str) -> None:
    assert (places.PACKAGE.parent / name).is_file()


@pytest.mark.parametrize("name", [places.TASK_MODULE, places.SPAWN_MODULE])
def test_module_exists(name: str) -> None:
    assert importlib.util.find_spec(name) is not None


def test_worker_folder_holds_the_worker() -> None:
    assert places.WORKER_PROGRAM.startswith(places.WORKER_FOLDER)
    assert (places.PACKAGE.parent / places.WORKER_FOLDER).is_dir()
