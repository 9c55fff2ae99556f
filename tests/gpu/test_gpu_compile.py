"""Every mode of torch.compile on a GPU: the eager results, and CUDA graphs where they are safe.

By the real command line, because the plan and the worker both decide about CUDA graphs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fasttrain.model.outcome import Outcome, State
from fasttrain.shim.levers.compile.graphs import WITHOUT_GRAPHS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

PROGRAMS = Path(__file__).parent / "programs"
MODES = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
# The modes that record CUDA graphs, and what they begin as; on the CPU there are no graphs.
GRAPHED = ["reduce-overhead", "max-autotune"]
USED = {
    "cuda": {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"},
    "cpu": {},
}


Results = dict[str, list[float]]


class Programs:
    """Runs a program by Python, or by fasttrain with the levers that are named."""

    def __init__(self, fasttrain: Any, read_report: Any, run_dir: Path, device: str) -> None:
        self.fasttrain, self.read_report = fasttrain, read_report
        self.run_dir, self.device = run_dir, device

    def plain(self, program: str, *words: str) -> Results:
        argv = [sys.executable, str(PROGRAMS / program), self.device, *words]
        done = subprocess.run(argv, env=self.fasttrain.environ, capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr.decode()
        return dict(json.loads(done.stdout))

    def __call__(self, levers: str, program: str, *words: str) -> tuple[Results, Outcome]:
        """Return what it printed, and what became of the compile lever."""
        options = ("--device", self.device, "--run-dir", self.run_dir, "--strict", *levers.split())
        cache = {"XDG_CACHE_HOME": str(self.run_dir.parent / "cache")}
        target = (PROGRAMS / program, *options, "--", self.device, *words)
        done = self.fasttrain("run", *target, env=cache, timeout_s=600)
        assert done.returncode == 0, done.stderr.decode()
        outcomes = {o.lever: o for o in self.read_report(self.run_dir).outcomes}
        if "--amp off" not in levers:
            assert outcomes["amp"].state is State.APPLIED
        return dict(json.loads(done.stdout)), outcomes["compile"]


@pytest.fixture
def run(fasttrain: Any, read_report: Any, tmp_path: Path, device: str) -> Programs:
    return Programs(fasttrain, read_report, tmp_path / "run", device)


def assert_close(found: Results, expected: Results, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=tolerance, abs=tolerance / 100), name


@pytest.mark.parametrize("mode", MODES)
def test_accumulation_repeated_calls_and_kept_outputs(run: Programs, mode: str) -> None:
    """CUDA graphs would be wrong here, and none is taken."""
    found, compiled = run(f"--amp off --compile {mode}", "kept_outputs.py")
    assert_close(found, run.plain("kept_outputs.py"), 1e-3)
    assert (compiled.state, compiled.asked) == (State.APPLIED, mode)
    assert compiled.counts["graphs"] >= 1
    assert compiled.counts["failures"] == compiled.counts["breaks"] == 0
    assert "CUDA graph calls" not in compiled.counts
    told = [note for note in compiled.notes if note.startswith(WITHOUT_GRAPHS)]
    assert bool(told) == (mode in GRAPHED and run.device == "cuda")


@pytest.mark.parametrize("mode", GRAPHED)
def test_a_loop_that_is_safe_for_cuda_graphs_gets_them(run: Programs, mode: str) -> None:
    """All that the loop keeps is what it would be without them."""
    found, compiled = run(f"--amp off --compile {mode}", "graph_friendly.py")
    assert_close(found, run.plain("graph_friendly.py"), 1e-3)
    # Twelve steps, less three of probation, one that warms up and the batch of another size.
    expected = 12 - 3 - 1 - 1 if run.device == "cuda" else 0
    assert compiled.counts.get("CUDA graph calls", 0) == expected


@pytest.mark.parametrize("mode", GRAPHED)
def test_gradients_of_inputs_can_be_kept(run: Programs, mode: str) -> None:
    """A replay's backward pass writes them to the same memory, too."""
    found, _ = run(f"--amp off --compile {mode}", "graph_friendly.py", "input-gradients")
    assert_close(found, run.plain("graph_friendly.py", "input-gradients"), 1e-3)


@pytest.mark.parametrize("where", ["features", "state", "list"])
@pytest.mark.parametrize("mode", GRAPHED)
def test_tensors_that_a_forward_puts_on_its_module_are_right(
    run: Programs, mode: str, where: str
) -> None:
    """They lie in a CUDA graph's memory, where the next replay overwrites them: graphs or not."""
    found, _ = run(f"--amp off --compile {mode}", "keeps_tensors.py", where)
    assert_close(found, run.plain("keeps_tensors.py", where), 1e-3)


@pytest.mark.parametrize("mode", ["default", *GRAPHED])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_compiled_in_low_precision(request: Any, run: Programs, precision: str, mode: str) -> None:
    """Close to the same precision without compilation."""
    if precision == "bf16":
        request.getfixturevalue("bf16")
    levers = f"--amp {precision} --compile {mode}"
    found, compiled = run(levers, "graph_friendly.py")
    plain = run.plain("graph_friendly.py")
    assert found["losses"] != plain["losses"]
    assert found["losses"] == pytest.approx(plain["losses"], rel=2e-2)
    assert found["kept"] == pytest.approx(plain["kept"], rel=5e-2)
    assert found["weights"] == pytest.approx(plain["weights"], rel=1e-2, abs=1e-2)
    assert compiled.state is State.APPLIED


@pytest.mark.parametrize("mode", MODES)
def test_the_plan_says_which_mode_stands_in_for_cuda_graphs(
    fasttrain: Any, device: str, mode: str
) -> None:
    options = ("--device", device, "--compile", mode, "--dry-run", "--json")
    done = fasttrain("run", PROGRAMS / "kept_outputs.py", *options, "--", device)
    assert done.returncode == 0, done.stderr.decode()
    decision = json.loads(done.stdout)["data"]["levers"]["compile"]
    used = USED[device].get(mode, mode)
    assert (decision["value"]["asked"], decision["value"]["mode"]) == (mode, used)
    graphs = mode if mode in GRAPHED and device == "cuda" else None
    assert decision["value"]["graphs"] == graphs
    assert ("CUDA graphs" in decision["reason"]) is (mode in GRAPHED)
