"""Waits for what real processes do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from support import npu_site
from support.npu_site import CACHE

HERE = Path(__file__).parent
FAKE_NPU = HERE.parent / "fake_npu"
WHEEL = "torch-npu==2.13.0"  # its optimizers are the same code from 2.1 to 2.14


# Of the real runs in this folder, `pytest` makes these: one of each kind, and what takes no torch.
ORDINARY = {
    "test_crash_causes.py": (),  # all of it
    "test_output.py": (),
    "test_run_dirs.py": (),
    "test_runs.py": (),
    "test_completions.py": ("test_the_files_", "test_bash_"),
    "test_bad_input.py": ("test_a_port_in_use", "test_a_run_directory_is_used_once"),
    "test_crash_ranks.py": ("test_a_hidden_rank_is_told_whole",),
    "test_doctor.py": ("test_the_whole_examination_", "test_quick_", "test_a_script_is_judged_"),
    "test_hangs.py": ("test_a_single_process",),
    "test_not_finite.py": ("test_a_diverging_run_is_stopped[1]",),
    "test_planted_secrets.py": ("test_a_run_that_fails_tells_nothing", "test_a_plan_tells_"),
    "test_python.py": ("test_a_script_runs_in_the_active_environment",),
    "test_restarts.py": ("test_what_can_heal_is_tried_again[direct]",),
    "test_signals.py": ("test_a_signal_reaches_the_script", "test_ctrl_c_arrives_once"),
    "test_stopping.py": ("test_ctrl_c_leaves_time_to_save", "test_a_second_ctrl_c_ends_it_now[1]"),
    "test_torchrun.py": ("test_shown_ranks_and_their_logs", "test_the_first_rank_that_fails_"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all others, which are left to .ci/run."""
    for item in items:
        if item.path.parent == HERE:
            names = ORDINARY.get(item.path.name, ("none",))
            if names and not item.name.startswith(names):
                item.add_marker(pytest.mark.runs)


@pytest.fixture
def only_run_dir(tmp_path: Path) -> Callable[[], Path]:
    """Return the one run directory that the test has made."""

    def find() -> Path:
        (run_dir,) = (tmp_path / "fasttrain_runs").glob("[!.]*")
        return run_dir

    return find


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Say whether a process lives, zombies excepted."""

    def check(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return check


@pytest.fixture(scope="session")
def wheel() -> Path:
    """Return the wheel of torch_npu, fetched once, where the simulated device can be built."""
    if not shutil.which("c++") and not shutil.which("g++"):
        pytest.skip("no C++ compiler to build the simulated device with")
    folder = CACHE / "wheel"
    if not any(folder.glob("*.whl")):
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
             "--only-binary=:all:", f"--dest={folder}", WHEEL],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"{WHEEL} can't be had: {done.stderr.strip().splitlines()[-1]}")
    return next(folder.glob("*.whl"))


@pytest.fixture
def npus(wheel: Path, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Return the variables of a machine with simulated NPUs."""

    def make(chips: str = "910b3_24.1", count: int = 2) -> dict[str, str]:
        found = npu_site.write(tmp_path / "npus", wheel, CACHE, chips)
        path = f"{found['PATH']}{os.pathsep}{os.environ['PATH']}"
        return {**found, "PATH": path, "FAKE_NPU_COUNT": str(count)}

    return make
