"""What the receipt and the environment of a GPU run say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.model.outcome import RankReport, State

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).parent / "programs" / "memory.py"


@pytest.fixture
def run(fasttrain: Any, read_report: Any, tmp_path: Path, device: str) -> Any:
    runs = itertools.count()

    def start(*options: str) -> tuple[dict[str, Any], RankReport]:
        run_dir = tmp_path / f"run-{next(runs)}"
        words = (*options, "--device", device, "--run-dir", run_dir)
        done = fasttrain("run", PROGRAM, *words, "--", device, timeout_s=120)
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout), read_report(run_dir)

    return start


def test_the_report_names_the_device_and_the_work(run: Any, device: str, bf16: None) -> None:
    _, report = run("--amp", "bf16")
    assert report.device == ("cuda:0" if device == "cuda" else "cpu")
    assert report.stats.steps == 4
    assert report.stats.samples_per_s > 0
    amp = report.outcomes[0]
    assert (amp.state, amp.counts) == (State.APPLIED, {"forwards": 4})


def test_a_model_that_is_gone_at_the_end_leaves_its_device(
    fasttrain: Any, script: Any, read_report: Any, tmp_path: Path, device: str, bf16: None
) -> None:
    """As most are, being local to a function."""
    path = script(
        "import torch\n"
        "def main():\n"
        f"    model = torch.nn.Linear(4, 1, device={device!r})\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"    model(torch.ones(2, 4, device={device!r})).sum().backward()\n"
        "    optimizer.step()\n"
        "main()\n"
    )
    done = fasttrain("run", path, "--device", device, "--amp", "bf16", "--run-dir", "run")
    assert done.returncode == 0, done.stderr.decode()
    assert read_report(tmp_path / "run").device == ("cuda:0" if device == "cuda" else "cpu")


def test_peak_memory_is_the_allocators(run: Any, cuda: str) -> None:
    found, report = run("--amp", "off")
    # The last report comes behind the script's last line, so that the peak can't have fallen.
    assert report.stats.peak_memory_bytes == found["peak"] > 0


def test_bf16_peaks_below_fp32(run: Any, cuda: str, bf16: None) -> None:
    full, _ = run("--amp", "off")
    half, _ = run("--amp", "bf16")
    assert half["peak"] < full["peak"]


@pytest.mark.parametrize(("precision", "expected"), [("bf16", "1"), ("fp16", None), ("off", None)])
def test_cudnn_is_told_to_convolve_in_bf16(
    request: Any, run: Any, cuda: str, precision: str, expected: str | None
) -> None:
    if precision == "bf16":
        request.getfixturevalue("bf16")
    found, _ = run("--amp", precision)
    assert found["cudnn"] == expected


def test_without_flags_a_gpu_run_is_bf16_with_fused_optimizers(run: Any, cuda: str) -> None:
    """Compute capability 8.0 or later has bf16; older GPUs keep fp32 and say so."""
    _, report = run()
    states = {o.lever: o.state for o in report.outcomes}
    native = torch.cuda.get_device_capability() >= (8, 0)
    assert states["amp"] is (State.APPLIED if native else State.SKIPPED)
    assert states["optimizer"] is State.APPLIED
