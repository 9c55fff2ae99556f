"""The cases of test_checkpoints.py, and the runs that they are made of."""

from __future__ import annotations

import contextlib
import functools
import io
import runpy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fasttrain.model.outcome import Outcome, State
from support.rig import backend, rig

SCRIPT = Path(__file__).parents[1] / "contract/checkpoints/train.py"
HALF = 4  # steps


@dataclass(frozen=True)
class Case:
    """Levers, and the optimizer of the script that runs under them."""

    amp: str = "off"
    compile: str = "off"
    scope: str = "model"
    optimizer: str = "keep"
    kind: str = "adamw"

    def __str__(self) -> str:
        compiled = f"compile-{self.scope}" if self.compile != "off" else "eager"
        return f"{self.amp}-{compiled}-{self.optimizer}-{self.kind}"

    @property
    def plain(self) -> Case:
        """The same script with every lever off."""
        return Case(kind=self.kind)

    @property
    def levers(self) -> dict[str, Any]:
        return {n: getattr(self, n) for n in ("amp", "compile", "scope", "optimizer")}

    @property
    def applied(self) -> set[str]:
        """The levers that have to take effect."""
        chosen = {name for name, value in self.levers.items() if value not in ("off", "keep")}
        return chosen - {"scope"} | ({"loss_scaling"} if self.amp == "float16" else set())

    @property
    def tolerance(self) -> float:
        """How far losses may be from plain ones: the rounding of a few steps, relative."""
        # bf16 rounds to 2**-9, fp16 to 2**-12; fused kernels and graphs only reorder fp32 sums.
        return {"off": 1e-4, "float16": 2e-3, "bfloat16": 2e-2}[self.amp]


COMPILED = [("off", "model"), ("default", "model"), ("default", "blocks")]
CASES = [
    *(Case(amp, *compiled, optimizer)
      for amp, compiled, optimizer
      in product(["off", "bfloat16", "float16"], COMPILED, ["keep", "fused"])),
    *(Case(amp, "default", "model", "fused", kind)
      for amp, kind in product(["off", "bfloat16", "float16"], ["adam", "sgd"])),
]  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What a run of the script printed, left in memory and made of its levers."""

    printed: str
    training: Any
    outcomes: dict[str, Outcome]
    slots: int  # modules that had a compiled call when the script ended
    ema_slots: int

    @property
    def losses(self) -> list[float]:
        return losses_in(self.printed)

    @property
    def validations(self) -> list[float]:
        return losses_in(self.printed, word=5)


def losses_in(printed: str, word: int = 3) -> list[float]:
    return [float(line.split()[word]) for line in printed.splitlines()]


class Runs:
    """Runs the script once for each case and arguments."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.main = runpy.run_path(str(SCRIPT))["main"]

    def folder(self, case: Case) -> Path:
        """Return where the first half of a run under these levers was saved."""
        self.first(case)
        return self.root / str(case)

    @functools.cache  # noqa: B019 - lives as long as the tests of its module
    def first(self, case: Case) -> Run:
        return self.run(case, "--steps", HALF, "--save", self.root / str(case))

    @functools.cache  # noqa: B019 - lives as long as the tests of its module
    def second(self, case: Case, first: Case) -> Run:
        """Return the second half under ``case``, resumed from what ``first`` saved."""
        return self.run(case, "--steps", 2 * HALF, "--resume", self.folder(first))

    @functools.cache  # noqa: B019 - lives as long as the tests of its module
    def whole(self, case: Case) -> Run:
        return self.run(case, "--steps", 2 * HALF)

    def run(self, case: Case, *words: Any) -> Run:
        with contextlib.ExitStack() as stack:
            if case.compile != "off":
                stack.enter_context(backend("eager"))
            runtime = stack.enter_context(rig(**case.levers))
            printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            training = self.main(["--optimizer", case.kind, *map(str, words)])
            slots = [
                sum(part._compiled_call_impl is not None for part in model.modules())
                for model in (training.model, training.ema)
            ]
            outcomes = runtime.outcomes()
        applied = {name for name, o in outcomes.items() if o.state is State.APPLIED}
        assert applied == case.applied
        return Run(printed.getvalue(), training, outcomes, *slots)
