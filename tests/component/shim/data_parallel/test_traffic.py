"""What a step of 8 and of 64 ranks sends, in torch's fake process group: as much as by hand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[4] / "benchmarks/data_parallel_traffic.py"
RANKS = ("8", "64")
TASKS = ("mlp", "convnet")
pytestmark = [pytest.mark.slow, pytest.mark.matrix]
Counts = dict[tuple[str, str, str], dict[str, float]]


@pytest.fixture(scope="module")
def counts() -> Counts:
    """Return the counts of a step by task, side and number of ranks."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *TASKS, "--ranks", *RANKS],
        capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    lines = [re.split(r"\s{2,}", line.strip()) for line in done.stdout.splitlines()]
    (names,) = (words[2:] for words in lines if words[0] == "a step of")
    rows: Any = [words for words in lines if "," in words[0] and len(words) == 2 + len(names)]
    return {
        (*words[0].split(", "), words[1]): dict(zip(names, map(float, words[2:]), strict=True))
        for words in rows
    }


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("task", TASKS)
def test_a_step_sends_what_it_sends_by_hand(counts: Counts, task: str, ranks: str) -> None:
    hand, ours = counts[task, "hand", ranks], counts[task, "fasttrain", ranks]
    # A loss outside of the model: two numbers of a large result, or the gathered small one.
    assert ours["all-reduces"] + ours["gathers"] == hand["all-reduces"] + 1
    assert ours["broadcasts"] == 0
    # BatchNorm's moments come from each rank, as by SyncBatchNorm on a GPU; here hand adds them up.
    moments = 3 * int(ranks) if task == "convnet" else 0
    assert ours["KiB"] <= hand["KiB"] + 24 + moments
    # For the call and for the backward pass; and before the first moments of a BatchNorm.
    assert ours["meetings"] == (3 if task == "convnet" else 2)


@pytest.mark.parametrize("task", TASKS)
def test_a_step_waits_for_no_device(counts: Counts, task: str) -> None:
    for ranks in RANKS:
        ours = counts[task, "fasttrain", ranks]
        assert (ours["reads"], ours["tensors of numbers"], ours["copies"]) == (0, 0, 0)
