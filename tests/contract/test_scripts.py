"""Scripts of the wild against themselves without fasttrain, and against twins written by hand.

What a script prints and saves is compared; ``support/scripts_table.py``
has what the receipt must say.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.model.codec import dumps
from fasttrain.model.outcome import State
from support.plans import plan_for
from support.scripts_alone import run_alone
from support.scripts_table import SCRIPTS

HERE = Path(__file__).parent
SCRIPTS_DIR = HERE.parent / "scripts"
NAMES = [script.name for script in SCRIPTS]
TIMEOUT_S = 250.0

# What the real command is started with; "compile" takes inductor.
OPTIONS = {
    "exact": ("--preset", "exact"),
    "compile": ("--compile", "default", "--amp", "off", "--optimizer", "keep"),
}
# What is planned the same way and run by the worker's own entry, in a process that has imported
# torch already: starting the command costs ten times what a script does.
PLANNED = {
    "bf16": {"amp": "bf16", "optimizer": "keep"},
    "fp16": {"amp": "fp16", "optimizer": "keep"},
    "fused": {"optimizer": "auto", "amp": "off"},
}

every_script = pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
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

    def __init__(self, base: Path) -> None:
        self._base = base
        self._runs: dict[str, dict[str, Run]] = {}
        self._environ = {
            "TORCHINDUCTOR_CACHE_DIR": str(base / "inductor"),
            "TORCHINDUCTOR_VEC_ISA_OK": "0",  # as the runs by fasttrain are
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of compilers would import torch first
        }
        self._helpers = multiprocessing.get_context("forkserver")
        self._helpers.set_forkserver_preload(["torch"])

    def runs(self, name: str, fasttrain: Any) -> dict[str, Run]:
        """Give all runs of a script, two at a time: the machine is taken to have two cores."""
        if name not in self._runs:
            jobs = {kind: partial(self._fast, fasttrain, name, kind) for kind in OPTIONS}
            jobs = {"compile": jobs.pop("compile"), **jobs}  # the longest one first
            jobs |= {kind: partial(self._planned, name, kind) for kind in PLANNED}
            jobs["plain"] = partial(self._alone, name, SCRIPTS_DIR / f"{name}.py")
            twin = SCRIPTS_DIR / "twins" / f"{name}.py"
            for precision in ("bf16", "fp16") if twin.exists() else ():
                jobs[f"twin-{precision}"] = partial(
                    self._alone, name, twin, "--precision", precision
                )
            with ThreadPoolExecutor(2) as pool:
                pending = {kind: pool.submit(job) for kind, job in jobs.items()}
                self._runs[name] = {kind: job.result() for kind, job in pending.items()}
        return self._runs[name]

    def _planned(self, name: str, kind: str) -> Run:
        cwd = self._base / name / kind
        (cwd / "run").mkdir(parents=True)
        plan = cwd / "run" / "plan.json"
        made = plan_for("cpu-laptop", **PLANNED[kind])
        plan.write_text(dumps(replace(made, cwd=str(cwd), run_dir=str(cwd / "run"))))
        return self._forked(SCRIPTS_DIR / f"{name}.py", cwd, plan=str(plan))

    def _alone(self, name: str, script: Path, *args: str) -> Run:
        cwd = self._base / name / "-".join(("alone", *args[1:]))
        cwd.mkdir(parents=True)
        return self._forked(script, cwd, *args)

    def _forked(self, script: Path, cwd: Path, *args: str, plan: str = "") -> Run:
        job = {
            "script": str(script), "args": args, "cwd": str(cwd), "environ": self._environ,
            "plan": plan,
        }  # fmt: skip
        process = self._helpers.Process(target=run_alone, args=(job,))
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        told = ((cwd / stream).read_text() for stream in ("stdout", "stderr"))
        return Run(cwd, int(process.exitcode or 0), *told)

    def _fast(self, fasttrain: Any, name: str, kind: str) -> Run:
        cwd = self._base / name / kind
        cwd.mkdir(parents=True)
        done: subprocess.CompletedProcess[bytes] = fasttrain(
            "run", SCRIPTS_DIR / f"{name}.py", *OPTIONS[kind], "--quiet", "--run-dir", cwd / "run",
            cwd=cwd, env=self._environ, timeout_s=TIMEOUT_S,
        )  # fmt: skip
        return Run(cwd, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("scripts"))


@pytest.fixture
def runs(runner: Runner, script: Any, fasttrain: Any) -> dict[str, Run]:
    return runner.runs(script.name, fasttrain)


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
    """Give the keys and hyper-parameters of a checkpoint, and the shapes of its tensors."""
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


@every_script
def test_levers_off_is_plain_python(script: Any, runs: dict[str, Run]) -> None:
    assert_same(runs["exact"], runs["plain"])


@every_script
def test_bf16_is_the_twin_by_hand(script: Any, runs: dict[str, Run]) -> None:
    found = runs["bf16"]
    assert_same(found, runs.get("twin-bf16", runs["plain"]))
    outcome = found.outcome("amp")
    assert outcome["state"] == script.bf16
    assert outcome["counts"].get("forwards", 0) == script.forwards
    if script.bf16 is State.APPLIED:
        assert differences(found.saved, runs["plain"].saved), "precision made no difference"
    else:
        assert script.reason in outcome["reason"]


@every_script
def test_fp16_is_the_twin_by_hand(script: Any, runs: dict[str, Run]) -> None:
    found, twin = runs["fp16"], runs.get("twin-fp16", runs["plain"])
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


@every_script
def test_compiled_gives_the_same_loss(script: Any, runs: dict[str, Run]) -> None:
    found = runs["compile"]
    assert found.final_loss == pytest.approx(runs["plain"].final_loss, rel=1e-4)
    assert without_tensors(found.saved) == without_tensors(runs["plain"].saved)
    outcome = found.outcome("compile")
    assert outcome["state"] == script.compiled, outcome["reason"]
    if script.compiled is not State.APPLIED:
        assert script.reason in outcome["reason"]
    counts = outcome["counts"]
    assert counts.get("targets", 0) == script.targets
    assert counts.get("graphs", 0) == script.graphs, outcome["notes"]


@every_script
def test_fused_steps_give_the_same_loss_and_checkpoint(script: Any, runs: dict[str, Run]) -> None:
    found = runs["fused"]
    assert found.final_loss == pytest.approx(runs["plain"].final_loss, rel=1e-5)
    assert without_tensors(found.saved) == without_tensors(runs["plain"].saved)
    outcome = found.outcome("optimizer")
    assert outcome["state"] == script.fused, outcome["reason"]
    if script.fused is not State.APPLIED:
        assert script.reason in outcome["reason"]
