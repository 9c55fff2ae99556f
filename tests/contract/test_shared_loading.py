"""DataLoaders with workers in many styles on several ranks: each batch is read once per node."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.script_runs import assert_same_prints, with_ranks

HERE = Path(__file__).parent
SCRIPTS = HERE / "shared_loading"
TIMEOUT_S = 100.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory files of Linux are missing"),
]


def closely(text: str) -> dict[str, float]:
    return {"rel": 1e-4} if text.startswith(("loss", "held")) else {"abs": 0.0}


def logged(cwd: Path, rank: int) -> list[str]:
    text = (cwd / f"run/rank-{rank}.log").read_text()
    return [line for line in text.splitlines() if re.match(r"[a-z].*\d", line)]


def temporary() -> set[str]:
    folders = (Path("/dev/shm"), Path("/tmp"))
    return {path.name for folder in folders for path in folder.glob("*fasttrain*")}


@pytest.fixture(scope="module")
def lines_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Return a function: what python prints, with methods that take seconds to start workers."""

    @functools.cache
    def run(*methods: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", SCRIPTS / "styles.py", *methods],
            cwd=tmp_path_factory.mktemp("alone"), capture_output=True, text=True,
            timeout=TIMEOUT_S, check=True,
        )  # fmt: skip
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize(
    ("ranks", "methods"),
    [
        (2, ()),
        pytest.param(3, (), marks=pytest.mark.matrix),
        pytest.param(2, ("spawn", "forkserver"), marks=pytest.mark.full),
    ],
)
def test_ranks_read_what_python_reads(
    ranks: int,
    methods: tuple[str, ...],
    fasttrain: Any,
    tmp_path: Path,
    lines_alone: Callable[..., list[str]],
) -> None:
    before = temporary()
    run = with_ranks(
        fasttrain, tmp_path / "ranks", SCRIPTS / "styles.py", *methods, ranks=ranks,
        timeout_s=TIMEOUT_S,
    ).good  # fmt: skip
    expected = lines_alone(*methods)
    assert [x for x in expected if x.startswith("children")] == ["children 2"] * 3
    assert_same_prints(run.stdout.splitlines(), expected, closely)
    of_others = [
        line.replace("children 2", "children 0")
        for line in expected
        if not line.startswith("worker")
    ]
    for rank in range(1, ranks):
        assert_same_prints(logged(run.cwd, rank), of_others, closely)
    for outcome in run.outcomes("loading"):
        assert outcome["state"] == "applied"
        assert outcome["counts"]["shared batches"] > 150
        assert "holds sharedctypes.Synchronized" in json.dumps(outcome["notes"])
    assert temporary() == before


def test_a_worker_that_dies_is_seen_by_all_ranks(fasttrain: Any, tmp_path: Path) -> None:
    before, began_s = temporary(), time.monotonic()
    run = with_ranks(
        fasttrain, tmp_path / "ranks", SCRIPTS / "worker_dies.py", "killed", timeout_s=TIMEOUT_S
    )
    assert run.returncode == 1
    assert "[loader-worker]" in run.stderr
    assert "is killed by signal: Killed" in run.stderr
    assert time.monotonic() - began_s < 80
    assert temporary() == before
