"""Scripts of the wild against themselves without fasttrain, and against twins written by hand.

What a script prints and saves is compared; ``support/scripts_table.py``
has what the receipt must say.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.model.codec import dumps
from fasttrain.model.outcome import State
from support.command import NO_BF16_LSTM
from support.plans import plan_for
from support.scripts_table import SCRIPTS
from support.thinned import thinned
from support.zygote import Fork, Zygote

HERE = Path(__file__).parent
SCRIPTS_DIR = HERE.parent / "scripts"

BY_HAND = HERE / "styles" / "by_hand.py"
NAMES = [script.name for script in SCRIPTS]
TIMEOUT_S = 250.0

# What the real command is started with; "inductor" generates code.
OPTIONS = {
    "command": ("--preset", "exact"),
    "inductor": ("--compile", "default", "--amp", "off", "--optimizer", "keep"),
}
# What is planned the same way and run by the worker's own entry, in a process that has imported
# torch already: starting the command costs ten times what a script does.
PLANNED = {
    "exact": {"preset": "exact"},
    "bf16": {"amp": "bf16", "optimizer": "keep"},
    "fp16": {"amp": "fp16", "optimizer": "keep"},
    "fused": {"optimizer": "auto", "amp": "off"},
    "compile": {"compile": "default", "amp": "off", "optimizer": "keep"},
}


def scripts(every: int, first: int = 0) -> pytest.MarkDecorator:
    """Parametrize a test by every script; an ordinary run takes one of so many."""
    named = thinned(SCRIPTS, every, first, left=8, ids=lambda script: script.name)
    return pytest.mark.parametrize("script", named)


pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Run:
    """What one run printed and left behind."""

    cwd: Path
    returncode: int
    stdout: str
    stderr: str

    @property
    def saved(self) -> Any:
        """What the script saved."""
        assert self.returncode == 0, self.stderr
        return torch.load(self.cwd / "model.pt")

    @property
    def final_loss(self) -> float:
        """The last loss, as the script printed it."""
        assert self.returncode == 0, self.stderr
        return float(re.findall(r"^final loss (\S+)$", self.stdout, re.MULTILINE)[-1])

    def outcome(self, lever: str) -> dict[str, Any]:
        """What became of a lever."""
        report = json.loads((self.cwd / "run/rank-0.json").read_text())
        return next(outcome for outcome in report["outcomes"] if outcome["lever"] == lever)


class Runner:
    """Runs scripts alone and under fasttrain, each in a directory of its own, and each once."""

    def __init__(self, base: Path, zygote: Zygote) -> None:
        self._base = base
        self._zygote = zygote
        self._runs: dict[tuple[str, str], Run] = {}

    def __call__(self, name: str, kind: str, fasttrain: Any) -> Run:
        """Return one run of a script."""
        if (name, kind) not in self._runs:
            cwd = self._base / name / kind
            (cwd / "run").mkdir(parents=True)
            self._runs[name, kind] = self._run(SCRIPTS_DIR / f"{name}.py", kind, cwd, fasttrain)
        return self._runs[name, kind]

    def _run(self, script: Path, kind: str, cwd: Path, fasttrain: Any) -> Run:
        if kind in OPTIONS:
            return self._command(script, kind, cwd, fasttrain)
        if kind in PLANNED:
            return self._planned(script, kind, cwd)
        twin = kind.partition("twin-")[2]
        path, args = (twin_of(script.stem), ("--precision", twin)) if twin else (script, ())
        return self._ended(self._zygote.python(path, *args, cwd=cwd, timeout_s=TIMEOUT_S), cwd)

    def _planned(self, script: Path, kind: str, cwd: Path) -> Run:
        path = cwd / "run" / "plan.json"
        plan = plan_for("cpu-laptop", **PLANNED[kind])
        path.write_text(dumps(replace(plan, cwd=str(cwd), run_dir=str(cwd / "run"))))
        prepare = [(str(BY_HAND), "compile_with", "aot_eager")] if kind == "compile" else []
        fork = self._zygote.worker(path, script, cwd=cwd, prepare=prepare, timeout_s=TIMEOUT_S)
        return self._ended(fork, cwd)

    def _ended(self, fork: Fork, cwd: Path) -> Run:
        end = self._zygote.wait(fork)
        return Run(cwd, end.returncode, end.stdout, end.stderr)

    def _command(self, script: Path, kind: str, cwd: Path, fasttrain: Any) -> Run:
        environ = {
            "TORCHINDUCTOR_CACHE_DIR": str(self._base / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of compilers would import torch first
        }
        done: subprocess.CompletedProcess[bytes] = fasttrain(
            "run", script, *OPTIONS[kind], "--quiet", "--run-dir", cwd / "run",
            cwd=cwd, env=environ, timeout_s=TIMEOUT_S,
        )  # fmt: skip
        return Run(cwd, done.returncode, done.stdout.decode(), done.stderr.decode())


def twin_of(name: str) -> Path:
    """Return where the script lies that does by hand what a lever does; not all have one."""
    return SCRIPTS_DIR / "twins" / f"{name}.py"


class Runs:
    """The runs of one script."""

    def __init__(self, runner: Runner, name: str, fasttrain: Any) -> None:
        self._runner, self._name, self._fasttrain = runner, name, fasttrain

    def __getitem__(self, kind: str) -> Run:
        """Return a run, by what it is made with."""
        return self._runner(self._name, kind, self._fasttrain)

    def twin(self, precision: str) -> Run:
        """Return the run by hand in a precision, or the plain one."""
        return self[f"twin-{precision}" if twin_of(self._name).exists() else "plain"]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Runner:
    return Runner(tmp_path_factory.mktemp("scripts"), zygote)


@pytest.fixture
def runs(runner: Runner, script: Any, fasttrain: Any) -> Runs:
    return Runs(runner, script.name, fasttrain)


def differences(found: Any, expected: Any, where: str = "model.pt") -> list[str]:
    """Name what is not the same, bit for bit."""
    if isinstance(expected, torch.Tensor):
        same = found.dtype is expected.dtype and torch.equal(found, expected)
        return [] if same else [where]
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return [f"keys of {where}"]
        pairs = [(found[key], expected[key], key) for key in expected]
    elif isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return [f"length of {where}"]
        pairs = [(a, b, str(i)) for i, (a, b) in enumerate(zip(found, expected, strict=True))]
    else:
        return [] if found == expected else [where]
    return [text for a, b, key in pairs for text in differences(a, b, f"{where}[{key}]")]


def without_tensors(value: Any, *, state: bool = False) -> Any:
    """Return the keys and hyper-parameters of a checkpoint, and the shapes of its tensors."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.device)
    if isinstance(value, dict):
        return {key: without_tensors(v, state=state or key == "state") for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_tensors(part, state=state) for part in value]
    if state and isinstance(value, float):
        return float  # L-BFGS keeps its last loss and step size as numbers
    return value


def assert_same(found: Run, expected: Run) -> None:
    assert differences(found.saved, expected.saved) == []
    assert found.stdout == expected.stdout


def test_every_script_is_in_both_tables() -> None:
    assert sorted(NAMES) == sorted(path.stem for path in SCRIPTS_DIR.glob("*.py"))
    told = re.findall(
        r"^\| (?!script \|)(\w+) \|", (SCRIPTS_DIR / "README.md").read_text(), re.MULTILINE
    )
    assert told == sorted(NAMES)


def test_every_script_has_a_twin_but_the_one_with_its_own_precision() -> None:
    twins = {path.stem for path in (SCRIPTS_DIR / "twins").glob("*.py")} - {"by_hand"}
    assert set(NAMES) - twins == {"own_amp"}
    assert twins <= set(NAMES)


@scripts(1)
def test_levers_off_is_plain_python(script: Any, runs: Runs) -> None:
    assert_same(runs["exact"], runs["plain"])


@scripts(9)
def test_the_command_with_levers_off_is_plain_python(script: Any, runs: Runs) -> None:
    assert_same(runs["command"], runs["plain"])


@scripts(3)
def test_bf16_is_the_twin_by_hand(script: Any, runs: Runs) -> None:
    found, twin = runs["bf16"], runs.twin("bf16")
    if twin.returncode and NO_BF16_LSTM in twin.stderr:
        assert_same(found, runs["plain"])  # every call was repeated in fp32
        assert found.outcome("amp")["missed"]
        return
    assert_same(found, twin)
    outcome = found.outcome("amp")
    assert outcome["state"] == script.bf16
    assert outcome["counts"].get("forwards", 0) == script.forwards
    if script.bf16 is State.APPLIED:
        assert differences(found.saved, runs["plain"].saved), "precision made no difference"
    else:
        assert script.reason in outcome["reason"]


@scripts(3, 1)
def test_fp16_is_the_twin_by_hand(script: Any, runs: Runs) -> None:
    found, twin = runs["fp16"], runs.twin("fp16")
    if script.no_fp16 == "refused":
        assert found.returncode == 78
        assert "[fp16-closure]" in found.stderr
        return
    if script.no_fp16 == "unsupported" and twin.returncode:
        assert_same(found, runs["plain"])  # every call was repeated in fp32
        assert found.outcome("amp")["missed"]
        return
    assert_same(found, twin)
    amp = found.outcome("amp")
    assert amp["state"] == script.fp16
    assert amp["counts"].get("forwards", 0) == script.forwards
    if script.fp16 is State.APPLIED:
        assert_same_overflows(script, found.outcome("loss_scaling")["counts"], twin)
    else:
        assert script.reason in amp["reason"]


def assert_same_overflows(script: Any, counts: dict[str, int], twin: Run) -> None:
    told = re.search(r"^skipped (\d+) scale (\d+)$", twin.stderr, re.MULTILINE)
    assert told, "the twin counts"
    skipped, scale = map(int, told.groups())
    assert skipped > 0, "an overflow is part of every script"
    if script.steps:
        assert counts["skipped steps"] == skipped
        assert counts["steps"] == script.steps - skipped
    assert counts["scale"] == scale


@scripts(3)
def test_compiled_gives_the_same_loss(script: Any, runs: Runs) -> None:
    assert_compiled(script, runs["compile"], runs["plain"])


# Generating and compiling code takes up to half a minute for each script.
@pytest.mark.parametrize(
    "script",
    thinned(SCRIPTS, 0, always=SCRIPTS[1:2], left=36, first=5, ids=lambda script: script.name),
)
def test_generated_code_gives_the_same_loss(script: Any, runs: Runs) -> None:
    assert_compiled(script, runs["inductor"], runs["plain"])


def assert_compiled(script: Any, found: Run, plain: Run) -> None:
    assert found.final_loss == pytest.approx(plain.final_loss, rel=1e-4)
    assert without_tensors(found.saved) == without_tensors(plain.saved)
    outcome = found.outcome("compile")
    assert outcome["state"] == script.compiled, outcome["reason"]
    if script.compiled is not State.APPLIED:
        assert script.reason in outcome["reason"]
    counts = outcome["counts"]
    assert counts.get("targets", 0) == script.targets
    assert counts.get("graphs", 0) == script.graphs, outcome["notes"]


@scripts(3, 2)
def test_fused_steps_give_the_same_loss_and_checkpoint(script: Any, runs: Runs) -> None:
    found = runs["fused"]
    assert found.final_loss == pytest.approx(runs["plain"].final_loss, rel=1e-5)
    assert without_tensors(found.saved) == without_tensors(runs["plain"].saved)
    outcome = found.outcome("optimizer")
    assert outcome["state"] == script.fused, outcome["reason"]
    if script.fused is not State.APPLIED:
        assert script.reason in outcome["reason"]
