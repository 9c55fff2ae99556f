"""Small scripts in a hundred styles, each alone and under fasttrain, in forks of one process.

``styles/zygote.py`` runs them and says what that gives up; real processes: ``test_scripts.py``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fasttrain.model.codec import dumps
from fasttrain.model.plan import LaunchPlan
from support.plans import plan_for

HERE = Path(__file__).parent
SCRIPTS = sorted((HERE.parent / "scripts" / "styles").glob("*.py"))

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
every_script = pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])


@dataclass(frozen=True)
class Run:
    """What one run printed and left behind."""

    cwd: Path
    returncode: int

    @property
    def stdout(self) -> str:
        """What it printed, if it ended well."""
        assert self.returncode == 0, (self.cwd / "stderr").read_text()
        return (self.cwd / "stdout").read_text()

    def outcome(self, lever: str) -> dict[str, Any]:
        """What became of a lever."""
        report = json.loads((self.cwd / "run/rank-0.json").read_text())
        return next(outcome for outcome in report["outcomes"] if outcome["lever"] == lever)


class Zygote:
    """Runs scripts in forks of one process, each kind of run of a script once."""

    def __init__(self, base: Path, environ: dict[str, str]) -> None:
        self._base = base
        self._runs: dict[Path, Run] = {}
        self._process = subprocess.Popen(
            [sys.executable, HERE / "styles" / "zygote.py"], env=environ, cwd=base, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, script: Path, kind: str, plan: LaunchPlan | None = None, **job: Any) -> Run:
        """Run a script; ``job`` is what ``zygote.py`` knows."""
        cwd = self._base / script.stem / kind
        if cwd not in self._runs:
            (cwd / "run").mkdir(parents=True)
            if plan is not None:
                plan = replace(plan, run_dir=str(cwd / "run"), cwd=str(cwd))
                (cwd / "run" / "plan.json").write_text(dumps(plan))
                job["plan"] = str(cwd / "run" / "plan.json")
            self._runs[cwd] = Run(cwd, self._ask({"script": str(script), "cwd": str(cwd), **job}))
        return self._runs[cwd]

    def _ask(self, job: dict[str, Any]) -> int:
        streams = self._process.stdin, self._process.stdout
        assert streams[0]
        assert streams[1]
        streams[0].write(json.dumps(job) + "\n")
        streams[0].flush()
        return int(streams[1].readline())

    def end(self) -> None:
        """End the process."""
        self._process.communicate()


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path_factory.mktemp("styles"), environ)
    yield zygote
    zygote.end()


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


@every_script
def test_levers_off_is_plain_python(path: Path, zygote: Zygote) -> None:
    found = zygote.run(path, "exact", plan_for("cpu-amx", "exact"))
    plain = zygote.run(path, "plain")
    assert found.stdout == plain.stdout
    assert len(losses(plain.stdout)) > 2, "prints no losses"


@every_script
def test_defaults_without_bf16_are_fused_optimizers_by_hand(path: Path, zygote: Zygote) -> None:
    found = zygote.run(path, "defaults", plan_for("cpu-laptop"))
    twin = zygote.run(path, "fused-by-hand", fused=True)
    assert found.stdout == twin.stdout
    fused = "fused by hand" in (twin.cwd / "stderr").read_text()
    assert (found.outcome("optimizer")["state"] == "applied") == fused


@every_script
def test_bf16_is_autocast_by_hand(path: Path, zygote: Zygote) -> None:
    found = zygote.run(path, "bf16", plan_for("cpu-amx", amp="bf16"))
    twin = zygote.run(path, "bf16-by-hand", autocast="bfloat16", fused=True)
    assert found.stdout == twin.stdout


@every_script
def test_fp16_is_autocast_and_a_scaler_by_hand(path: Path, zygote: Zygote) -> None:
    found = zygote.run(path, "fp16", plan_for("cpu-amx", amp="fp16"))
    if path.stem in NO_FP16:
        assert found.returncode == 78
        assert f"[{NO_FP16[path.stem]}]" in (found.cwd / "stderr").read_text()
        return
    twin = zygote.run(path, "fp16-by-hand", autocast="float16", scaled=True, fused=True)
    if path.stem == "rnn_carried_state":  # torch has no LSTM in fp16, and the call is repeated
        assert twin.returncode
        assert found.stdout == zygote.run(path, "defaults", plan_for("cpu-laptop")).stdout
    elif path.stem == "hooks_activations":  # hooks see unscaled gradients, and by hand scaled ones
        pairs = list(zip(losses(found.stdout), losses(twin.stdout), strict=True))
        assert all(a == b or a * 2**16 == b for a, b in pairs)
        assert pairs[0][0] == pairs[0][1]
    else:
        assert found.stdout == twin.stdout


def test_compiled_without_code_generation_is_plain_python(compiled: Path, zygote: Zygote) -> None:
    plan = plan_for("cpu-laptop", compile="default", amp="off", optimizer="keep")
    found = zygote.run(compiled, "compile", plan, backend="eager")
    expected = losses(zygote.run(compiled, "plain").stdout)
    assert losses(found.stdout) == pytest.approx(expected, rel=1e-5)
