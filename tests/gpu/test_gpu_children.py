"""Processes that a training forks on a GPU, and the end of one whose GPU has failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parent / "programs" / "epochs.py"


@pytest.fixture
def run(fasttrain: Any, device: str) -> Any:
    def start(how: str, *options: str) -> Any:
        words = ("--device", device, "--run-dir", "run", *options)
        return fasttrain("run", PROGRAM, *words, "--", device, how, timeout_s=200)

    return start


def by_python(device: str, environ: dict[str, str], how: str) -> Any:
    argv = [sys.executable, str(PROGRAM), device, how]
    return subprocess.run(argv, env=environ, capture_output=True, timeout=200)


@pytest.mark.parametrize("options", [(), ("--amp", "off", "--loader-workers", "0")])
def test_workers_of_later_epochs_read_as_those_of_the_first(
    run: Any, environ: Any, device: str, options: tuple[str, ...]
) -> None:
    """They inherit the events by which the steps of the first are timed."""
    done, plain = run("ends", *options), by_python(device, environ, "ends")
    assert done.returncode == plain.returncode == 0, done.stderr.decode()
    expected = json.loads(plain.stdout)["losses"]
    assert json.loads(done.stdout)["losses"] == pytest.approx(expected, rel=2e-2)


def test_the_exit_code_after_an_error_of_the_device_is_pythons(
    run: Any, environ: Any, device: str
) -> None:
    """What fasttrain has pinned would end the process by a signal."""
    done, plain = run("wrong"), by_python(device, environ, "wrong")
    assert done.returncode == plain.returncode == 1, done.stderr.decode()
