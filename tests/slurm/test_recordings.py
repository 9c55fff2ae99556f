"""What was recorded for tests that have no SLURM is what SLURM says."""

from __future__ import annotations

import re
from typing import Any

import pytest

from support.recordings import ACCEPTED, REFUSED, TO, UNREADABLE, sbatch


def recorded(name: str) -> str:
    return str((TO / f"sbatch_{name}.txt").read_text())


@pytest.mark.parametrize("name", REFUSED)
def test_sbatch_refuses_in_the_recorded_words(cluster: Any, name: str) -> None:
    done = sbatch(cluster, REFUSED[name])
    status = 255 if name in UNREADABLE else 1
    assert (done.returncode, done.stderr) == (status, recorded(name))


def test_sbatch_says_when_a_job_would_start(cluster: Any) -> None:
    done = sbatch(cluster, ACCEPTED["test_only_good"])
    form = re.sub(r"\d+", r"\\d+", re.escape(recorded("test_only_good")))
    assert done.returncode == 0
    assert re.fullmatch(form, done.stderr)
