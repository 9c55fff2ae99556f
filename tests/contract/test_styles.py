"""Small scripts in a hundred styles, each alone and under fasttrain, in forks of one process.

``support/zygote_process.py`` says what that gives up; real processes: ``test_scripts.py``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fasttrain.model.codec import dumps
from fasttrain.model.plan import LaunchPlan
from support.command import NO_BF16_LSTM
from support.plans import plan_for
from support.thinned import thinned
from support.zygote import Ended, Zygote

HERE = Path(__file__).parent
SCRIPTS = sorted((HERE.parent / "scripts" / "styles").glob("*.py"))

BY_HAND = HERE / "styles" / "by_hand.py"

ALWAYS = {"lazy_modules"}  # compiled in ordinary runs too
EVERY = 18  # of the scripts, where only few rounds are asked for; all with --rounds full
# Dropout inside of a compiled checkpoint draws other numbers, as it does where a script compiles it
# itself.
OTHER_DRAWS = {"checkpointed_blocks"}
# What fp16 is refused for, with the name of the refusal.
NO_FP16 = {
    "complex_parameters": "fp16-complex",
    "lbfgs_fit": "fp16-closure",
    "per_layer_optimizer": "fp16-step-in-backward",
    "sam_optimizer": "fp16-closure",
}


pytestmark = pytest.mark.slow


def scripts(first: int) -> pytest.MarkDecorator:
    """Parametrize a test by every script; an ordinary run takes a quarter, each test another."""
    every = thinned(SCRIPTS, 4, first, left=6, ids=lambda path: path.stem)
    return pytest.mark.parametrize("path", every)


@dataclass(frozen=True)
class Run:
    """What one run printed and left behind."""

    cwd: Path
    ended: Ended

    @property
    def stdout(self) -> str:
        """What it printed, if it ended well."""
        assert self.ended.returncode == 0, self.ended.stderr
        return self.ended.stdout

    def outcome(self, lever: str) -> dict[str, Any]:
        """What became of a lever."""
        report = json.loads((self.cwd / "run/rank-0.json").read_text())
        return next(outcome for outcome in report["outcomes"] if outcome["lever"] == lever)


class Styles:
    """Runs scripts in forks of one process, each kind of run of a script once."""

    def __init__(self, base: Path, zygote: Zygote) -> None:
        self._base = base
        self._zygote = zygote
        self._runs: dict[Path, Run] = {}

    def run(
        self, script: Path, kind: str, plan: LaunchPlan | None = None, **by_hand: tuple[str, ...]
    ) -> Run:
        """Run a script, after calls of functions of ``styles/by_hand.py`` by their names."""
        cwd = self._base / script.stem / kind
        if cwd not in self._runs:
            (cwd / "run").mkdir(parents=True)
            prepare = [(str(BY_HAND), name, *words) for name, words in by_hand.items()]
            if plan is None:
                fork = self._zygote.python(script, cwd=cwd, prepare=prepare)
            else:
                path = cwd / "run" / "plan.json"
                path.write_text(dumps(replace(plan, run_dir=str(cwd / "run"), cwd=str(cwd))))
                fork = self._zygote.worker(path, script, cwd=cwd, prepare=prepare)
            self._runs[cwd] = Run(cwd, self._zygote.wait(fork))
        return self._runs[cwd]


@pytest.fixture(scope="module")
def styles(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Styles:
    return Styles(tmp_path_factory.mktemp("styles"), zygote)


def losses(stdout: str) -> list[float]:
    """Return the numbers that a script has printed bit for bit."""
    return [float.fromhex(it) for it in re.findall(r"-?0x[01]\.[0-9a-f]+p[+-]\d+", stdout)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Take every script, or some of them in an ordinary run."""
    if "compiled" in metafunc.fixturenames:
        few = EVERY if metafunc.config.option.rounds == "few" else 1
        known = [path for path in SCRIPTS if path.stem not in OTHER_DRAWS]
        paths = [path for i, path in enumerate(known) if i % few == 0 or path.stem in ALWAYS]
        metafunc.parametrize("compiled", paths, ids=[path.stem for path in paths])


def test_a_hundred_scripts_know_nothing_of_fasttrain() -> None:
    assert len(SCRIPTS) >= 100
    assert not [path.stem for path in SCRIPTS if "fasttrain" in path.read_text()]


@scripts(0)
def test_levers_off_is_plain_python(path: Path, styles: Styles) -> None:
    found = styles.run(path, "exact", plan_for("cpu-amx", "exact"))
    plain = styles.run(path, "plain")
    assert found.stdout == plain.stdout
    assert len(losses(plain.stdout)) > 2, "prints no losses"


@scripts(1)
def test_defaults_without_bf16_are_fused_optimizers_by_hand(path: Path, styles: Styles) -> None:
    found = styles.run(path, "defaults", plan_for("cpu-laptop"))
    twin = styles.run(path, "fused-by-hand", fused=())
    assert found.stdout == twin.stdout
    fused = "fused by hand" in twin.ended.stderr
    assert (found.outcome("optimizer")["state"] == "applied") == fused


@scripts(2)
def test_bf16_is_autocast_by_hand(path: Path, styles: Styles) -> None:
    found = styles.run(path, "bf16", plan_for("cpu-amx", amp="bf16"))
    twin = styles.run(path, "bf16-by-hand", autocast=("bfloat16",), fused=())
    if twin.ended.returncode and NO_BF16_LSTM in twin.ended.stderr:  # the call is repeated
        assert found.stdout == styles.run(path, "defaults", plan_for("cpu-laptop")).stdout
        return
    assert found.stdout == twin.stdout


@scripts(3)
def test_fp16_is_autocast_and_a_scaler_by_hand(path: Path, styles: Styles) -> None:
    found = styles.run(path, "fp16", plan_for("cpu-amx", amp="fp16"))
    if path.stem in NO_FP16:
        assert found.ended.returncode == 78
        assert f"[{NO_FP16[path.stem]}]" in found.ended.stderr
        return
    twin = styles.run(path, "fp16-by-hand", autocast=("float16",), scaled=(), fused=())
    if path.stem == "rnn_carried_state":  # torch has no LSTM in fp16, and the call is repeated
        assert twin.ended.returncode
        assert found.stdout == styles.run(path, "defaults", plan_for("cpu-laptop")).stdout
    elif path.stem == "hooks_activations":  # hooks see unscaled gradients, and by hand scaled ones
        pairs = list(zip(losses(found.stdout), losses(twin.stdout), strict=True))
        assert all(a == b or a * 2**16 == b for a, b in pairs)
        assert pairs[0][0] == pairs[0][1]
    else:
        assert found.stdout == twin.stdout


def test_compiled_without_code_generation_is_plain_python(compiled: Path, styles: Styles) -> None:
    plan = plan_for("cpu-laptop", compile="default", amp="off", optimizer="keep")
    found = styles.run(compiled, "compile", plan, compile_with=("eager",))
    expected = losses(styles.run(compiled, "plain").stdout)
    assert losses(found.stdout) == pytest.approx(expected, rel=1e-5)
