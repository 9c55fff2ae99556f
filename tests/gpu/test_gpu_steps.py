"""The step times of the receipt against CUDA events, and what fasttrain costs per step."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fasttrain.model.outcome import RankReport

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).parent / "programs" / "timed_steps.py"
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu_speed.py"
# Of fasttrain over the same levers by hand. On the CPU the steps are too small to say anything.
MOST_OVERHEAD = {"cuda": 1.01, "cpu": math.inf}
TINY = ["--tiny", "--blocks", "3", "--steps", "2", "--warmup", "1"]
SIZES = {"cuda": ["--blocks", "20", "--steps", "10", "--warmup", "15"], "cpu": TINY}


@pytest.mark.parametrize("how", ["reads", "ahead"])
def test_the_receipt_has_the_step_times_of_cuda_events(
    fasttrain: Any, read_report: Any, tmp_path: Path, device: str, how: str
) -> None:
    # Samples are counted where a lever acts on the model; all GPUs have fp16.
    amp = {"cuda": "fp16", "cpu": "bf16"}[device]
    options = ("--device", device, "--amp", amp, "--run-dir", tmp_path / "run")
    done = fasttrain("run", PROGRAM, *options, "--", device, how, timeout_s=300)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    report: RankReport = read_report(tmp_path / "run")
    assert report.stats.median_step_s == pytest.approx(found["median_s"], rel=0.1)
    if how == "reads":  # else the last steps end after Python has made them
        rows = {"cuda": 8192, "cpu": 512}[device]
        expected = rows * (report.stats.steps - 1) / found["total_s"]
        assert report.stats.samples_per_s == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("levers", ["--amp off --compile off --optimizer keep", ""])
def test_a_step_that_is_captured_in_a_cuda_graph(
    fasttrain: Any, tmp_path: Path, cuda: str, levers: str
) -> None:
    """Nothing asks the device about earlier steps meanwhile, which would end the capture."""
    captured = PROGRAM.with_name("captured_step.py")
    options = ("--device", cuda, *levers.split(), "--run-dir", tmp_path / "run")
    done = fasttrain("run", captured, *options, timeout_s=300)
    assert done.returncode == 0, done.stderr.decode()
    plain = subprocess.run([sys.executable, captured], capture_output=True, timeout=300, check=True)
    assert float(done.stdout) == pytest.approx(
        float(plain.stdout), rel=2e-2 if not levers else 1e-6
    )


def lowest(ratios: list[float]) -> float:
    """Return the lower end of the 95 % interval of the median: noise must not fail a test."""
    rank = max(0, math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))
    return sorted(ratios)[rank]


@pytest.mark.parametrize("compiled", ["off", "default"])
def test_a_step_costs_one_percent_at_most(
    environ: dict[str, str], tmp_path: Path, device: str, compiled: str
) -> None:
    """Against the same levers by hand, in turns; the model is a GPT of 124 million parameters."""
    file = tmp_path / "blocks.json"
    argv = [sys.executable, str(BENCHMARK), "--device", device, "--models", "gpt"]
    argv += ["--sides", "same", "fasttrain", "--compile", compiled, "--json", str(file)]
    done = subprocess.run(
        [*argv, "--batch", "4", *SIZES[device]], env=environ, capture_output=True, timeout=800
    )
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(file.read_text())["models"]["gpt"]
    losses = [found["sides"][side][-1]["loss"] for side in ("same", "fasttrain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # they compute the same thing
    assert len(found["overheads"]) >= 3
    assert lowest(found["overheads"]) <= MOST_OVERHEAD[device], found["overheads"]
