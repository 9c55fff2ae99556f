"""Checkpoints interchange: saved under any levers and loaded without fasttrain, and the reverse.

``checkpoints/train.py`` is a script as users write it. The matrix runs it in this process, where
the compile lever takes the backend "eager"; a few cases run it by the real command line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoint_matrix import CASES, HALF, Case, Runs, losses_in
from support.command import clean_environ
from support.thinned import thinned

PROGRAMS = Path(__file__).parent / "checkpoints"
BLOCKS = 3  # of the script's model
# torch alone: fasttrain is installed beside it, and an import would find it.
WITHOUT_FASTTRAIN = """
import importlib.abc, runpy, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "fasttrain":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# dynamo warns while it compiles; here that would be an error inside the compiler
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
AMPS, COMPILED = ["off", "bfloat16", "float16"], ["off", "model", "blocks"]


def in_pairs(case: Case) -> bool:
    """Whether a case is one of those that bring any two choices together."""
    if case.kind != "adamw":
        return case.kind == ("sgd" if case.amp == "float16" else "adam") and case.amp != "off"
    compiled = case.scope if case.compile != "off" else "off"
    both = AMPS.index(case.amp) + COMPILED.index(compiled)
    return case.optimizer == ["keep", "fused"][both % 2]


every_case = pytest.mark.parametrize(
    "case", thinned(CASES, 0, left=5, always=list(filter(in_pairs, CASES)))
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PROGRAMS)
        yield Runs(tmp_path_factory.mktemp("checkpoints"))
    sys.modules.pop("nets", None)


def load(folder: Path) -> dict[str, Any]:
    return dict(torch.load(folder / "checkpoint.pt", weights_only=True))


def described(value: Any) -> Any:
    """Return a checkpoint's structure: tensors by dtype, shape and device, the rest as it is."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.device.type
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    return [described(item) for item in value] if isinstance(value, list) else value


@every_case
def test_a_checkpoint_is_the_one_that_the_script_alone_saves(runs: Runs, case: Case) -> None:
    found, expected = load(runs.folder(case)), load(runs.folder(case.plain))
    assert described(found) == described(expected)
    for part in ("model", "ema"):
        assert list(found[part]) == list(expected[part])
        assert {v.dtype for v in found[part].values()} == {torch.float32, torch.int64}
    state = found["optimizer"]["state"]
    counters = [s["step"].item() for s in state.values() if "step" in s]
    assert counters == ([] if case.kind == "sgd" else [float(HALF)] * len(state))
    assert found["scheduler"] == expected["scheduler"]


@every_case
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(runs: Runs, case: Case) -> None:
    """To the last bit, with fp16 too.

    The script knows nothing of a loss scale, so that a resumed run starts again at 2**16. That
    changes nothing as long as the run that went on is still at 2**16: nothing overflowed, and it
    takes 2000 good steps until the scale grows.
    """
    first, second, whole = runs.first(case), runs.second(case, case), runs.whole(case)
    if case.amp == "float16":
        scaling = [run.outcomes["loss_scaling"].counts for run in (first, second, whole)]
        assert [(counts.get("skipped steps"), counts["scale"]) for counts in scaling] == [
            (None, 2**16)
        ] * 3
    assert first.printed + second.printed == whole.printed
    assert len(whole.losses) == 2 * HALF


@pytest.mark.parametrize("optimizer", ["keep", "fused"])
def test_fp16_resumed_after_an_overflow_differs_by_rounding_alone(
    runs: Runs, optimizer: str, tmp_path: Path
) -> None:
    """The resumed run is at 2**16 where the other one had backed off to 2**15.

    Both are powers of two, so that the same gradients come out but for those that are too small for
    fp16's 11 bits at one of the scales. A model that overflows at 2**16 with every batch would skip
    a step again after each start, which a script that saves its own GradScaler would not.
    """
    case = Case("float16", optimizer=optimizer)
    spike = ("--spike", 1)
    whole = runs.run(case, "--steps", 2 * HALF, *spike)
    first = runs.run(case, "--steps", HALF, "--save", tmp_path, *spike)
    second = runs.run(case, "--steps", 2 * HALF, "--resume", tmp_path, *spike)
    scales = [run.outcomes["loss_scaling"].counts["scale"] for run in (whole, first, second)]
    assert scales == [2**15, 2**15, 2**16]
    assert first.outcomes["loss_scaling"].counts["skipped steps"] == 1
    steps = {s["step"].item() for s in load(tmp_path)["optimizer"]["state"].values()}
    assert steps == {HALF - 1.0}
    assert first.losses == whole.losses[:HALF]
    assert second.losses[0] == whole.losses[HALF]
    assert second.losses == pytest.approx(whole.losses[HALF:], rel=2**-11)


@every_case
@pytest.mark.parametrize("levers_first", [True, False], ids=["then-plain", "plain-first"])
def test_a_run_goes_on_with_and_without_levers(runs: Runs, case: Case, levers_first: bool) -> None:
    then, saved_by = (case.plain, case) if levers_first else (case, case.plain)
    losses = runs.first(saved_by).losses + runs.second(then, saved_by).losses
    assert losses == pytest.approx(runs.whole(case.plain).losses, rel=case.tolerance)


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_levers_that_are_off_change_no_bit(runs: Runs, kind: str) -> None:
    """What all cases are compared with is what Python prints without fasttrain."""
    words = ["train.py", "--optimizer", kind, "--steps", str(2 * HALF)]
    alone = subprocess.run(
        [sys.executable, *words], cwd=PROGRAMS, capture_output=True, text=True, check=True,
        env=alone_environ(),
    )  # fmt: skip
    assert runs.whole(Case(kind=kind)).printed == alone.stdout


@every_case
def test_the_averaged_copy_is_a_model_of_its_own(runs: Runs, case: Case) -> None:
    run = runs.first(case)
    model, ema = run.training.model, run.training.ema
    targets = 0 if case.compile == "off" else BLOCKS if case.scope == "blocks" else 1
    assert (run.slots, run.ema_slots) == (targets, 0)
    assert type(ema) is type(model)
    assert list(ema.state_dict()) == list(model.state_dict())
    pairs = list(zip(ema.parameters(), model.parameters(), strict=True))
    assert all(not torch.equal(mine, theirs) for mine, theirs in pairs)
    assert all(mine.data_ptr() != theirs.data_ptr() for mine, theirs in pairs)
    assert run.validations == pytest.approx(runs.first(case.plain).validations, rel=case.tolerance)


def alone_environ() -> dict[str, str]:
    return {**clean_environ(), "PYTHONDONTWRITEBYTECODE": "1"}


def by_torch_alone(program: str, *words: str | Path) -> list[str]:
    """Run a program where fasttrain can't be imported, and give the lines that it printed."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FASTTRAIN, str(PROGRAMS / program), *map(str, words)],
        capture_output=True, text=True, timeout=240, env=alone_environ(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def inspect(*folders: Path) -> list[dict[str, Any]]:
    *found, modules = map(json.loads, by_torch_alone("inspect_saved.py", *folders))
    assert modules == []
    return found


@pytest.fixture(scope="module")
def inspected(runs: Runs, request: pytest.FixtureRequest) -> dict[Case, dict[str, Any]]:
    """What torch alone finds in the checkpoints of all cases that are tested."""
    cases = [case for case in CASES if any(_takes(item, case) for item in request.session.items)]
    return dict(zip(cases, inspect(*map(runs.folder, cases)), strict=True))


def _takes(item: pytest.Item, case: Case) -> bool:
    return getattr(item, "callspec", None) is not None and item.callspec.params.get("case") is case


@every_case
@pytest.mark.parametrize("name", ["model", "ema"])
def test_whole_models_load_where_fasttrain_is_not(
    runs: Runs, inspected: dict[Case, dict[str, Any]], case: Case, name: str
) -> None:
    found = inspected[case][name]
    assert found["type"] == "nets.Net"
    assert found["attributes"] == sorted(vars(getattr(runs.first(case.plain).training, name)))
    assert found["whole"] == found["from weights"]
    assert b"fasttrain" not in (runs.folder(case) / f"{name}.pt").read_bytes()


# --- by the real command line -------------------------------------------------------------------

Train = Callable[..., str]


@pytest.fixture
def train(fasttrain: Any, tmp_path: Path) -> Train:
    """Run a program by fasttrain, with compilations kept among the runs of one test."""
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(levers: str, program: str, *words: str | Path) -> str:
        options = ("--device", "cpu", "--strict", "--quiet", *levers.split())
        done = fasttrain("run", PROGRAMS / program, *options, "--", *words, env=cache,
                         timeout_s=240)  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        return str(done.stdout.decode())

    return run


LEVERS = "--amp bf16 --compile default --optimizer auto"


@pytest.mark.slow
@pytest.mark.matrix
def test_saved_and_resumed_with_inductor(runs: Runs, train: Train, tmp_path: Path) -> None:
    half, both, once = (tmp_path / name for name in ("half", "both", "once"))
    first = train(LEVERS, "train.py", "--steps", str(HALF), "--save", half)
    second = train(LEVERS, "train.py", "--resume", half, "--save", both)
    assert first + second == train(LEVERS, "train.py", "--save", once)
    resumed, expected = load(both)["model"], load(once)["model"]
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())
    assert described(load(half)) == described(load(runs.folder(Case())))
    for found in inspect(half, both):
        assert found["model"]["type"] == found["ema"]["type"] == "nets.Net"
        assert found["model"]["whole"] == found["model"]["from weights"]
    then_plain = losses_in("\n".join(by_torch_alone("train.py", "--resume", half)))
    plain_first = train(LEVERS, "train.py", "--resume", runs.folder(Case()))
    for losses in (then_plain, losses_in(plain_first)):
        assert losses == pytest.approx(runs.whole(Case()).losses[HALF:], rel=2e-2)


@pytest.mark.slow
def test_pickles_of_classes_in_the_script_itself(train: Train, tmp_path: Path) -> None:
    """A whole model and a whole optimizer, both pickled by reference to __main__."""
    path = tmp_path / "saved.pt"
    train("--amp fp16 --optimizer fused", "single_file.py", "save", path)
    assert by_torch_alone("single_file.py", "load", path) == ["Adam None None {5.0}", "[]"]
