"""Scripts that run with a Python of another environment than fasttrain's own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PREFIX = """
import multiprocessing
import sys

def tell():
    print(sys.prefix, "fasttrain.shim" in sys.modules, flush=True)

if __name__ == "__main__":
    import torch

    tell()
    child = multiprocessing.get_context("spawn").Process(target=tell)
    child.start()
    child.join()
"""


@pytest.fixture
def env(tmp_path: Path) -> Path:
    """Make a virtual environment that finds torch where this Python has it."""
    folder = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    torch = importlib.util.find_spec("torch")
    assert torch
    assert torch.origin
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(str(Path(torch.origin).parents[1]))
    return folder


def test_a_script_runs_in_the_active_environment(fasttrain: Any, script: Any, env: Path) -> None:
    fasttrain.environ["VIRTUAL_ENV"] = str(env)
    done = fasttrain("run", script(PREFIX))
    assert done.stdout.decode().splitlines() == [f"{env} True"] * 2
    said = f"fasttrain: running with {env}/bin/python: the active environment (VIRTUAL_ENV)\n"
    assert said in done.stderr.decode()


def test_two_ranks_run_with_the_python_that_is_named(
    fasttrain: Any, script: Any, env: Path
) -> None:
    two = ("--nproc-per-node", "2", "--strategy", "none", "--device", "cpu", "--quiet")
    path = script("import sys\nprint(sys.prefix)")
    done = fasttrain("run", path, *two, "--show-ranks", "all", "--python", env / "bin" / "python")
    assert sorted(done.stdout.decode().splitlines()) == [str(env), f"[rank 1] {env}"]
    assert done.stderr == b""


def test_doctor_tries_the_torch_of_the_active_environment(fasttrain: Any, env: Path) -> None:
    fasttrain.environ["VIRTUAL_ENV"] = str(env)
    done = fasttrain("doctor", "--json")
    told = json.loads(done.stdout)["data"]
    trial = told["examination"]["torch"]
    states = [trial[name]["state"] for name in ("imported", "compiled", "all_reduced")]
    assert (told["python"], states) == (f"{env}/bin/python", ["ok", "ok", "ok"]), trial
