"""Scripts of real frameworks: helped where they leave the work, left alone where they do it."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.model.codec import loads
from fasttrain.model.outcome import Outcome, RankReport, State
from support.thinned import thinned

SCRIPTS = Path(__file__).parent / "frameworks"
PACKAGES = Path(str(importlib.util.find_spec("accelerate").origin)).parents[1]  # type: ignore[union-attr]

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Script:
    """A training script, and what is known of it before it runs.

    Attributes:
        name: Its file.
        forwards: Calls of roots, those without gradients too.
        steps: Optimizer steps.
        bf16: Arguments with which it computes in bf16 by itself.
        fused: Arguments with which it makes a fused optimizer by itself.
        compiled: Arguments with which it compiles the model by itself.
        same: Whether it trains in bf16 of its own exactly as in fasttrain's.
    """

    name: str
    forwards: int
    steps: int
    bf16: tuple[str, ...]
    fused: tuple[str, ...] = ("--fused",)
    compiled: tuple[str, ...] = ()
    same: bool = True

    def __str__(self) -> str:
        return self.name


HF = Script(
    "hf_trainer",
    forwards=6 * 2 + 2,  # two of accumulation in each step, and two of evaluation
    steps=6,
    bf16=("--bf16",),
    fused=("--optim", "adamw_torch_fused"),
    compiled=("--torch-compile-backend", "aot_eager"),
)
ACCELERATE = Script("accelerate_loop", 2 * 8, 8, ("--mixed-precision", "bf16"))
LIGHTNING = Script(
    "lightning_trainer",
    forwards=2 * (8 + 4),
    steps=8,
    bf16=("--precision", "bf16-mixed"),
    compiled=("--compile",),
)
# Fabric leaves calls of a method other than forward in fp32 unless it wrapped the module.
FABRIC = Script("fabric_loop", 8 * 2, 8, ("--precision", "bf16-mixed"), same=False)
MMENGINE = Script("mmengine_runner", 2 * (8 + 4), 8, ("--wrapper", "Bf16OptimWrapper"))
TIMM = Script("timm_loop", 8 + 2, 8, ("--amp",))
# Its own bf16 is that of the parameters, which is not mixed.
TORCHTUNE = Script("torchtune_loop", 6, 6, ("--dtype", "bf16"), same=False)
ALL = [HF, ACCELERATE, LIGHTNING, FABRIC, MMENGINE, TIMM, TORCHTUNE]


@dataclass(frozen=True)
class Training:
    """What came of a run."""

    stdout: bytes
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        return list(self._told["losses"])

    @property
    def weights(self) -> str:
        return str(self._told["weights"])

    @property
    def _told(self) -> dict[str, Any]:
        return dict(json.loads(self.stdout.splitlines()[-1]))


OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@functools.cache
def plain(script: Script, *args: str) -> Training:
    """Return what Python alone makes of a script; asked for by several tests, run once."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / f"{script}.py", *args],
        env={**os.environ, **OFFLINE}, capture_output=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return Training(done.stdout)


Run = Callable[..., Training]


@pytest.fixture
def run(fasttrain: Any, tmp_path: Path) -> Run:
    """Run a script under fasttrain with options, and give what came of it."""

    def run(script: Script, options: str, *args: str) -> Training:
        environ = {**OFFLINE, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
        own = ("--device", "cpu", "--quiet", "--run-dir", tmp_path / "run")
        path = SCRIPTS / f"{script}.py"
        done = fasttrain(
            "run", path, *own, *options.split(), "--", *args, env=environ, timeout_s=280
        )
        assert done.returncode == 0, done.stderr.decode()
        report = loads(RankReport, (tmp_path / "run" / "rank-0.json").read_bytes())
        assert report.finished
        return Training(done.stdout, {outcome.lever: outcome for outcome in report.outcomes})

    return run


def line_at(reason: str) -> str:
    """Return the line of code that a reason's place names."""
    found = re.search(r"\((.+\.py):(\d+)\)$", reason)
    assert found, reason
    lines = (PACKAGES / found[1]).read_text().splitlines()  # or the place's own absolute path
    return lines[int(found[2]) - 1]


@pytest.mark.parametrize("script", thinned(ALL, 7, 3))
def test_with_all_levers_off_it_prints_what_python_prints(script: Script, run: Run) -> None:
    fast = run(script, "--preset exact")
    assert fast.stdout == plain(script).stdout
    assert {fast.outcomes[lever].state for lever in ("amp", "compile", "optimizer")} == {State.OFF}


@pytest.mark.parametrize("script", thinned(ALL, 7, 1))
def test_what_a_framework_leaves_undone_is_done(script: Script, run: Run) -> None:
    fast = run(script, "--amp bf16 --optimizer fused")
    amp, optimizer = fast.outcomes["amp"], fast.outcomes["optimizer"]
    assert (amp.state, amp.counts) == (State.APPLIED, {"forwards": script.forwards})
    assert (optimizer.state, optimizer.counts) == (State.APPLIED, {"steps": script.steps})
    # bf16 has 8 bits: each of a few layers is off by up to 0.4 %.
    assert fast.losses == pytest.approx(plain(script).losses, rel=2e-2)
    assert fast.weights != plain(script).weights
    if script.same:
        assert fast.weights == plain(script, *script.bf16, *script.fused).weights


# What stands at the place that does the lever's work; not that of a package's generator, such as
# a context manager, but of who enters it.
CALLS = {
    HF: {"amp": "model_forward(", "optimizer": "optimizer_cls("},
    ACCELERATE: {"amp": "model_forward(", "optimizer": "torch.optim.AdamW("},
    LIGHTNING: {"amp": "train_step_context()", "optimizer": "torch.optim.Adam("},
    FABRIC: {"amp": "forward_context()", "optimizer": "torch.optim.SGD("},
    MMENGINE: {"amp": "autocast(dtype=", "optimizer": "obj_cls("},
    TIMM: {"amp": "torch.amp.GradScaler(", "optimizer": "torch.optim.SGD("},
}


@pytest.mark.parametrize("script", thinned(list(CALLS), 6, 2))
def test_what_a_framework_does_is_left_to_it(script: Script, run: Run) -> None:
    own = (*script.bf16, *script.fused)
    fast = run(script, "--amp bf16 --optimizer fused", *own)
    assert fast.stdout == plain(script, *own).stdout
    for lever, call in CALLS[script].items():
        outcome = fast.outcomes[lever]
        assert (outcome.state, outcome.counts) == (State.CEDED, {}), outcome
        assert call in line_at(outcome.reason)


@pytest.mark.parametrize("script", thinned([HF, LIGHTNING], 0, left=2))
def test_what_a_framework_compiles_is_left_to_it(script: Script, run: Run) -> None:
    own = (*script.bf16, *script.fused, *script.compiled)
    fast = run(script, "--amp bf16 --optimizer fused --compile default", *own)
    assert fast.stdout == plain(script, *own).stdout
    amp, compiled = fast.outcomes["amp"], fast.outcomes["compile"]
    assert (compiled.state, compiled.counts) == (State.CEDED, {})
    assert "torch.compile(" in line_at(compiled.reason)
    # Precision that is managed inside of what is compiled is never seen at run time.
    assert (amp.state, amp.counts) == (State.CEDED, {})


@pytest.mark.matrix
def test_a_recipe_that_does_everything_itself_is_left_alone(run: Run) -> None:
    own = ("--dtype", "bf16", "--compile", "--fused")
    fast = run(TORCHTUNE, "--amp bf16 --compile default --optimizer fused --matmul medium", *own)
    assert fast.stdout == plain(TORCHTUNE, *own).stdout
    amp = fast.outcomes.pop("amp")
    assert (amp.state, amp.counts) == (State.SKIPPED, {})
    assert "bfloat16" in amp.reason
    assert {outcome.state for outcome in fast.outcomes.values()} == {State.CEDED}
    assert "layer.compile(" in line_at(fast.outcomes["compile"].reason)
    assert "torch.optim.AdamW(" in line_at(fast.outcomes["optimizer"].reason)
    assert "set_float32_matmul_precision(" in line_at(fast.outcomes["matmul"].reason)


@pytest.mark.parametrize(
    ("script", "graphs"),
    [
        pytest.param(HF, 2, id="hf_trainer", marks=pytest.mark.full),
        pytest.param(TIMM, 3, id="timm", marks=pytest.mark.matrix),
    ],
)
def test_what_a_framework_leaves_uncompiled_is_compiled(
    script: Script, graphs: int, run: Run
) -> None:
    fast = run(script, "--amp off --compile default --optimizer keep")
    compiled = fast.outcomes["compile"]
    assert compiled.state is State.APPLIED
    # One with and one without gradients; the averaged copy is a model of its own.
    assert (compiled.counts["graphs"], compiled.counts["breaks"]) == (graphs, 0)
    assert (compiled.counts["failures"], compiled.counts["limits"]) == (0, 0)
    assert fast.losses == pytest.approx(plain(script).losses, rel=1e-4)


@pytest.mark.matrix
def test_a_module_that_fabric_wraps_is_compiled_with_its_precision(run: Run) -> None:
    """Fabric's wrapper hands attributes that are set on it to the module inside."""
    fast = run(FABRIC, "--amp off --compile default --optimizer keep", *FABRIC.bf16)
    compiled = fast.outcomes["compile"]
    # The wrapper is called, and the module inside by its own loss().
    assert (compiled.state, compiled.counts["targets"]) == (State.APPLIED, 2)
    assert fast.losses == pytest.approx(plain(FABRIC, *FABRIC.bf16).losses, rel=2e-2)


@pytest.mark.full
def test_fused_steps_alone_change_the_last_bits_only(run: Run) -> None:
    fast = run(ACCELERATE, "--amp off --optimizer fused")
    assert fast.outcomes["optimizer"].counts == {"steps": ACCELERATE.steps}
    assert fast.losses == pytest.approx(plain(ACCELERATE).losses, rel=1e-5)


@pytest.mark.matrix
def test_fp16_under_accelerate_is_the_loop_by_hand(run: Run) -> None:
    fast = run(ACCELERATE, "--amp fp16 --optimizer keep")
    assert fast.stdout == plain(ACCELERATE, "--by-hand").stdout
    amp, scaling = fast.outcomes["amp"], fast.outcomes["loss_scaling"]
    assert (amp.state, amp.counts) == (State.APPLIED, {"forwards": 16})
    assert scaling.state is State.APPLIED
    assert (scaling.counts["backward passes"], scaling.counts["steps"]) == (16, 8)


@pytest.mark.matrix
def test_what_mmengine_refuses_on_a_cpu_is_refused(fasttrain: Any) -> None:
    words = ("--wrapper", "AmpOptimWrapper")
    done = fasttrain(
        "run", SCRIPTS / "mmengine_runner.py", "--device", "cpu", "--amp", "bf16", "--", *words
    )
    assert done.returncode == 1
    assert b"AssertionError: ``AmpOptimizerWrapper`` is only available" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.matrix
def test_mmengines_own_scaler_is_left_alone(fasttrain: Any) -> None:
    words = ("--wrapper", "AmpOptimWrapper")
    path = SCRIPTS / "mmengine_runner.py"
    done = fasttrain("run", path, "--amp", "bf16", "--run-dir", "run", "--", *words, timeout_s=200)
    assert done.returncode == 0, done.stderr.decode()
    report = loads(RankReport, (fasttrain.cwd / "run" / "rank-0.json").read_bytes())
    amp = next(outcome for outcome in report.outcomes if outcome.lever == "amp")
    assert amp.state is State.CEDED
    assert "scaler_type(" in line_at(amp.reason)
