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

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fasttrain_tests" / "npu"
WHEEL = "torch-npu==2.13.0"  # its optimizers are the same code from 2.1 to 2.14


@pytest.fixture
def only_run_dir(tmp_path: Path) -> Callable[[], Path]:
    """Give the one run directory that the test has made."""

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
    """Give the wheel of torch_npu, fetched once, where the simulated device can be built."""
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
    """Give the variables of a machine with simulated NPUs."""

    def make(chips: str = "910b3_24.1", count: int = 2) -> dict[str, str]:
        found = npu_site.write(tmp_path / "npus", wheel, CACHE, chips)
        path = f"{found['PATH']}{os.pathsep}{os.environ['PATH']}"
        return {**found, "PATH": path, "FAKE_NPU_COUNT": str(count)}

    return make
