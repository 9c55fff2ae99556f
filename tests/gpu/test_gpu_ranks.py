"""Two GPUs, one script that knows nothing of ranks: what one process gives, from both of them.

On a machine with one GPU both ranks use it (support/gpu_twice.py); on the CPU, two gloo ranks do
the same.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import support.gpu_twice
from fasttrain.model.errors import ExitCode
from fasttrain.model.outcome import State

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

PROGRAMS = Path(__file__).parent / "programs"
PROGRAM, STYLES = PROGRAMS / "ranks.py", PROGRAMS / "ranks_styles.py"
RANKS = 2
ON = re.compile(r"computed on (.+), one of (\d+)")
TOLERANCE = 1e-3
ENDS_IN_S = 150  # of which a watch takes 30
LIMIT_S = {"cuda": 300, "cpu": 900}  # a test of the tests may share its cores with other work


@pytest.fixture
def two(fasttrain: Any, tmp_path: Path, device: str) -> list[str]:
    """Return the options of a run of two ranks."""
    if device == "cpu":
        return ["--device", "cpu", "--nproc-per-node", str(RANKS)]
    if torch.cuda.device_count() < RANKS:
        path = (support.gpu_twice.write(tmp_path / "site"), fasttrain.environ.get("PYTHONPATH"))
        fasttrain.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return ["--gpus", "0,1"]


@pytest.fixture
def run(fasttrain: Any, tmp_path: Path, device: str, two: list[str]) -> Any:
    def start(*options: str, program: Path = PROGRAM, args: tuple[str, ...] = ()) -> Any:
        words = (*two, "--run-dir", tmp_path / "run", "--amp", "off", *options)
        done = fasttrain("run", program, *words, "--", device, *args, timeout_s=LIMIT_S[device])
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    return start


def plain(device: str, environ: dict[str, str], program: Path = PROGRAM, *args: str) -> Any:
    argv = [sys.executable, str(program), device, *args]
    done = subprocess.run(argv, env=environ, capture_output=True, timeout=LIMIT_S[device])
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def assert_close(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE), name


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_what_one_process_trains(
    run: Any, read_report: Any, environ: Any, tmp_path: Path, device: str, strategy: str
) -> None:
    assert_close(run("--strategy", strategy), plain(device, environ))
    places = []
    for rank in range(RANKS):
        report = read_report(tmp_path / "run", rank)
        outcome = next(o for o in report.outcomes if o.lever == "strategy")
        assert (outcome.state, outcome.missed) == (State.APPLIED, ())
        assert outcome.counts["ranks"] == RANKS
        assert bool(outcome.counts.get("sharded blocks")) is (strategy == "fsdp")
        assert report.device == ("cuda:0" if device == "cuda" else "cpu")
        places += ON.findall((tmp_path / "run" / f"rank-{rank}.log").read_text())
    # Each rank sees one GPU, and it is another one's if there are two.
    assert [count for _, count in places] == ["1"] * RANKS
    there = torch.cuda.device_count() if device == "cuda" else 1
    assert len({name for name, _ in places}) == min(RANKS, there)


def test_a_batch_per_rank_takes_both_gpus(
    run: Any, read_report: Any, tmp_path: Path, device: str
) -> None:
    """Without what makes ranks equal: each trains on its own GPU, and none waits for ever."""
    run("--batch", "per-rank")
    devices = [read_report(tmp_path / "run", rank).device for rank in range(RANKS)]
    assert devices == ["cuda:0" if device == "cuda" else "cpu"] * RANKS


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_in_bf16_and_compiled(
    run: Any, read_report: Any, environ: Any, tmp_path: Path, device: str, bf16: None, strategy: str
) -> None:
    """Gradients and blocks are gathered while the graphs compute."""
    levers = ("--amp", "bf16", "--compile", "default", "--optimizer", "fused")
    found = run("--strategy", strategy, *levers)
    expected = plain(device, environ)
    assert found["losses"] != expected["losses"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=5e-2)
    assert found["weights"] == pytest.approx(expected["weights"], rel=2e-2)
    for rank in range(RANKS):
        outcomes = {o.lever: o for o in read_report(tmp_path / "run", rank).outcomes}
        for lever in ("amp", "compile", "optimizer", "strategy"):
            assert outcomes[lever].state is State.APPLIED, outcomes[lever]


def test_a_rank_that_ends_early_ends_the_run(
    fasttrain: Any, tmp_path: Path, device: str, two: list[str]
) -> None:
    """The other one waits for its gradients, and would for ten minutes and more."""
    words = (*two, "--run-dir", tmp_path / "run", "--amp", "off", "--compile", "off")
    done = fasttrain("run", STYLES, *words, "--", device, "leaves", timeout_s=ENDS_IN_S)
    assert b"[ranks-steps]" in done.stderr, done.stderr.decode()
    assert done.returncode == ExitCode.CONTRADICTION


@pytest.mark.parametrize("style", ["sparse", "graph", "chooses"])
def test_two_ranks_do_what_a_gpu_alone_makes_difficult(
    run: Any, environ: Any, device: str, style: str
) -> None:
    """Sparse gradients, indices beyond a rank's rows, and a script that chooses one GPU."""
    found = run(program=STYLES, args=(style,))
    assert_close(found, plain(device, environ, STYLES, style))
