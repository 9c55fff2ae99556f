"""A task of a job asks who could have written the pickle that submitit loads."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fasttrain.files import everybodys


class Planted:
    """Makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Submitit's folder in a run directory, with somebody's pickle in the place of the job's."""
    made = tmp_path / "run" / "slurm"
    made.mkdir(parents=True, mode=0o700)
    (made / "7_submitted.pkl").write_bytes(pickle.dumps(Planted(tmp_path / "loaded")))
    return made


def start(folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    place = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
             "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here",
             "SUBMITIT_EXECUTOR": "slurm"}  # fmt: skip
    return subprocess.run(
        [sys.executable, "-u", "-m", "fasttrain.slurm.node_start", str(folder)],
        env={**environ, **place}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def test_where_nobody_else_can_write_it_is_loaded(folder: Path, environ: dict[str, str]) -> None:
    folder.parent.chmod(0o700)
    start(folder, environ)
    assert (folder.parents[1] / "loaded").exists()


@pytest.mark.parametrize("where", ["run", "."])
def test_where_others_can_write_nothing_is_loaded(
    folder: Path, environ: dict[str, str], where: str
) -> None:
    folder.parent.chmod(0o700)
    open_to_all = folder.parents[1] / where
    open_to_all.chmod(0o777)
    done = start(folder, environ)
    assert done.returncode == 71
    assert "[run-dir-unsafe]" in done.stderr
    assert everybodys("") in done.stderr
    assert not (folder.parents[1] / "loaded").exists()
    assert stat.S_IMODE(open_to_all.stat().st_mode) == 0o777
