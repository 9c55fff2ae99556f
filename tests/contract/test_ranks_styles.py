"""Training scripts in many styles as two ranks: the same numbers as under python, and no hang.

The scripts stand in ``tests/scripts/ranks``. Many of them are run in one launch, by
``ranks_styles/run_many.py``; those in which ranks would part, ``part_*.py``, have one each.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fasttrain.shim.data_parallel.split.number_reads import CLASSES
from fasttrain.shim.data_parallel.split.surroundings import READS
from support.script_runs import Alone, assert_same_prints, differences, forked_ranks
from support.thinned import thinned
from support.zygote import Zygote

HERE = Path(__file__).parent
DRIVER = HERE / "ranks_styles/run_many.py"
SCRIPTS = sorted((HERE.parent / "scripts/ranks").glob("*.py"))
PARTING = [path for path in SCRIPTS if path.stem.startswith("part_")]
TOGETHER = [path for path in SCRIPTS if path not in PARTING]
EACH = 15  # scripts of a launch
LAUNCHES = -(-len(TOGETHER) // EACH)
EXACT = ("--preset", "exact")
TIMEOUT_S = 240.0
NO_HANG_S = 60.0
# Models that are split, and why others aren't.
ON_READING: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "checked_by_torch": (("Policy", "Regression", "Causal"), {}),
    "labels_one_hot": (
        ("ConditionalAutoencoder", "Quantizer"),
        {"Counting": CLASSES, "Reading": READS},
    ),
}
ENDED = {1, 75, 78}  # an error of the script's, a hang that was ended, ranks that parted

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Shown:
    """What one script of a launch printed and saved; None for one that wasn't come to."""

    lines: list[str] | None
    saved: Any
    stderr: str


class Launches:
    """Runs of the driver, each made once: alone with all scripts, and as ranks with some."""

    def __init__(self, base: Path, zygote: Zygote) -> None:
        self._base = base
        self._zygote = zygote
        self._alone = Alone(zygote)
        self._made: dict[str, Any] = {}

    def alone(self, script: Path) -> Shown:
        """Return what a script did under python."""
        if "alone" not in self._made:
            paths = map(str, TOGETHER)
            self._made["alone"] = self._alone(self._base / "alone", DRIVER, *paths)
        return _shown(self._made["alone"], script)

    def as_ranks(self, script: Path) -> Shown:
        """Return what a script did as two ranks, of which every other launch gathers lazily."""
        number = TOGETHER.index(script) % LAUNCHES  # the like are not all in one launch
        name = f"ranks-{number}"
        if name not in self._made:
            words = ["--lazily"] * (number % 2) + [str(p) for p in TOGETHER[number::LAUNCHES]]
            self._made[name] = forked_ranks(
                self._zygote, self._base / name, DRIVER, *words, options=EXACT, timeout_s=TIMEOUT_S
            )
        return _shown(self._made[name], script)


def _shown(run: Any, script: Path) -> Shown:
    blocks = dict(_blocks(run.stdout))
    model = run.cwd / script.stem / "model.pt"
    saved = torch.load(model, weights_only=False) if model.exists() else None
    return Shown(blocks.get(script.stem), saved, run.stderr)


def _blocks(stdout: str) -> Iterator[tuple[str, list[str]]]:
    for block in f"\n{stdout}".split("\n=== ")[1:]:
        name, *lines = block.splitlines()
        yield name, lines


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Launches:
    return Launches(tmp_path_factory.mktemp("styles"), zygote)


def closely(_: str) -> dict[str, float]:
    return {"rel": 1e-4, "abs": 1.5e-6}  # one in the sixth decimal, which scripts print


def in_structure(_: str) -> dict[str, float]:
    return {"abs": float("inf")}


def finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.isfinite().all())
    if isinstance(value, int | float):
        return math.isfinite(value)
    items = value.values() if isinstance(value, dict) else value
    return all(map(finite, items))


def launched() -> list[Any]:
    """Return the scripts as parameters; half of the launches are left to .ci/run."""
    later = {path for at, path in enumerate(TOGETHER) if at % LAUNCHES >= LAUNCHES // 2}
    marks = {path: pytest.mark.matrix if path in later else () for path in TOGETHER}
    return [pytest.param(path, id=path.stem, marks=marks[path]) for path in TOGETHER]


@pytest.mark.parametrize("script", launched())
def test_two_ranks_do_what_python_does(script: Path, launches: Launches) -> None:
    alone = launches.alone(script)
    assert alone.lines, alone.stderr
    assert not alone.lines[-1].startswith("ERROR")
    assert alone.saved is not None
    found = launches.as_ranks(script)
    assert found.lines is not None, f"not come to: {found.stderr}"
    by_chance = script.stem.startswith("dropout_")
    assert_same_prints(found.lines, alone.lines, in_structure if by_chance else closely)
    far = {"rtol": 0.0, "atol": float("inf")} if by_chance else {}
    assert differences(found.saved, alone.saved, **far) == []
    assert finite(found.saved)


def test_numbers_close_to_a_kink_are_split(tmp_path: Path, zygote: Zygote) -> None:
    script = HERE.parent / "scripts/ranks/close_to_a_kink.py"
    run = forked_ranks(zygote, tmp_path / "ranks", script, options=EXACT, timeout_s=TIMEOUT_S)
    strategy = run.outcome("strategy")
    assert strategy["missed"] == []
    assert strategy["counts"]["split calls"] == 3


@pytest.mark.matrix
def test_lists_are_named_as_what_is_not_split(tmp_path: Path, zygote: Zygote) -> None:
    script = HERE.parent / "scripts/ranks/detection_lists.py"
    run = forked_ranks(zygote, tmp_path / "ranks", script, options=EXACT, timeout_s=TIMEOUT_S)
    assert "it takes a list" in run.outcome("strategy")["missed"][0]


def test_what_takes_no_tensors_is_named_and_its_parts_are_split(
    tmp_path: Path, zygote: Zygote
) -> None:
    script = HERE.parent / "scripts/ranks/batch_objects.py"
    run = forked_ranks(zygote, tmp_path / "ranks", script, options=EXACT, timeout_s=TIMEOUT_S)
    strategy = run.outcome("strategy")
    told = {text.partition(" ")[0]: text.rpartition(": ")[2] for text in strategy["missed"]}
    assert told == {
        "Net": "it takes no tensor with rows, but Batch",
        "Texts": "it takes no tensor with rows, but list",
        "Prototypes": "it takes no arguments",
    }
    (body,) = (site for site in strategy["sites"] if site["what"] == "Sequential")
    assert body["count"] == 9 - 4, "split but for calls 1, 2, 4 and 8, which are verified"


@pytest.mark.parametrize("name", ON_READING)
def test_what_torch_reads_for_itself_is_split(name: str, tmp_path: Path, zygote: Zygote) -> None:
    script, (split, why) = HERE.parent / f"scripts/ranks/{name}.py", ON_READING[name]
    run = forked_ranks(zygote, tmp_path / "ranks", script, options=EXACT, timeout_s=TIMEOUT_S)
    strategy = run.outcome("strategy")
    told = {text.partition(" ")[0]: text.rpartition(": ")[2] for text in strategy["missed"]}
    assert told == why
    counts = {site["what"]: site["count"] for site in strategy["sites"]}
    calls = 9 - 4  # calls 1, 2, 4 and 8 are verified
    assert {model: counts.get(model) for model in split} == dict.fromkeys(split, calls)


@pytest.mark.parametrize("script", thinned(PARTING, 23, ids=lambda path: path.stem))
def test_ranks_that_would_part_end(
    script: Path, fasttrain: Any, tmp_path: Path, zygote: Zygote
) -> None:
    alone = Alone(zygote)(tmp_path / "alone", script).good
    process = fasttrain.start(
        "run", script, "--nproc-per-node", "2", "--device", "cpu", *EXACT, "--quiet",
        "--run-dir", "run", stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=NO_HANG_S)
    except subprocess.TimeoutExpired:
        family = [psutil.Process(process.pid)]
        family += family[0].children(recursive=True)
        for each in family:
            each.kill()
        out, err = process.communicate()
        pytest.fail(f"it hangs, with {out.decode()!r} on stdout and on stderr:\n{err.decode()}")
    if process.returncode == 0:
        assert out.decode() == alone.stdout
        return
    assert process.returncode in ENDED, err.decode()
    assert re.search(r"^(error|fasttrain): ", err.decode(), re.MULTILINE), err.decode()
    assert re.search(rf"\b{script.name}:\d+", err.decode()), err.decode()
