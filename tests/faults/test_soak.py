"""Many short runs one after another: nothing of them adds up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

PROGRAMS = Path(__file__).parent / "programs"
RUNS = {"few": 14, "full": 200}
WARM_UP = 10
# A network, a /dev/shm and semaphores without any others' in them.
APART = ("unshare", "--mount", "--net", "--ipc", "--pid", "--fork", "--mount-proc", "sh", "-c",
         'ip link set lo up && mount -t tmpfs none /dev/shm && exec "$@"', "sh")  # fmt: skip


@pytest.fixture
def runs(request: pytest.FixtureRequest) -> int:
    """How many runs are made."""
    return RUNS[request.config.getoption("rounds")]


def counted(argv: list[str], folder: Path, environ: dict[str, str]) -> list[dict[str, int]]:
    """Return what a program has counted behind each run."""
    done = subprocess.run(argv, cwd=folder, env=environ, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


def grown(counts: list[dict[str, int]]) -> dict[str, tuple[int, int]]:
    """Return what is more in the end than it was after the warm-up."""
    warm, last = counts[WARM_UP], counts[-1]
    return {name: (warm[name], last[name]) for name in warm if last[name] > warm[name]}


def test_runs_of_one_parent(
    fasttrain: Any, tmp_path: Path, short_tmp: Path, runs: int, record_property: Any
) -> None:
    if subprocess.run([*APART, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no process here can have a network and mounts of its own")
    environ = {**fasttrain.environ, "TMPDIR": str(short_tmp), "XDG_CACHE_HOME": str(tmp_path / "c")}
    argv = [*APART, sys.executable, str(PROGRAMS / "soak.py"), str(runs)]
    counts = counted(argv, tmp_path, environ)
    told(counts, "soak: runs of one parent", record_property)
    assert len(counts) == runs
    assert grown(counts) == {}


def test_runs_of_one_process(
    fasttrain: Any, script: Any, tmp_path: Path, runs: int, record_property: Any
) -> None:
    words = ("run", script("raise SystemExit(5)"), "--run-dir", "run", "--dry-run", "--json")
    planned = json.loads(fasttrain(*words).stdout)["data"]
    (tmp_path / "plan.json").write_text(json.dumps(planned))
    argv = [sys.executable, str(PROGRAMS / "soak_within.py"), str(runs), "plan.json"]
    counts = counted(argv, tmp_path, fasttrain.environ)
    told(counts, "soak: runs of one process", record_property)
    assert len(counts) == runs
    assert grown(counts) == {}


def told(counts: list[dict[str, int]], table: str, record_property: Any) -> None:
    for name in counts[-1]:
        for when, at in (("after 10", WARM_UP), (f"after {len(counts)}", -1)):
            record_property("table", (table, name, when, str(counts[at][name])))
