"""Run a script under `fasttrain tune`, which then compares results alone, and no times.

Each lever is compared by itself, and on top of those before it whose results were right. A line of
JSON for each is added to results.jsonl in the run directory. The script is run as ``__main__`` with
its own arguments. A number is added to each seed that it sets, with which torch, NumPy and `random`
are seeded before: so scripts without an option for the seed, or without any seed, have one.

    fasttrain tune results_alone.py --amp bf16 -- NUMBER train.py --lr 3e-4
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Generator
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fasttrain.model.tuning import UNBOUNDED, Compared, Parity, Ratio
from fasttrain.shim.tune import tuner as tuners
from fasttrain.shim.tune.confirmed import confirmed

WARM_STEPS = 2  # of which the first one compiles
Levers = frozenset[str]
done: set[Levers] = set()


def results_of(
    self: Any, levers: tuple[str, ...], _: Levers, changed: Levers, *, known_right: bool
) -> Generator[None, None, Compared]:
    """Compare results in the place of `Tuner._compare_now`, which would compare times as well."""
    parity, reason = None, ""
    for on in (frozenset(levers), changed):
        if on in done or len(levers) != 1 or known_right or reason:
            continue
        done.add(on)
        yield from self._settle(on)
        looks: list[list[Parity]] = []
        reason = self._idle(levers)
        while not reason and (parity := confirmed(looks, last=self._late())) is None:
            looks.append([(yield from self._own_parity(levers, on))])
        line = {"levers": sorted(on), "idle": reason, "looks": [asdict(one) for (one,) in looks]}
        note(self, line | (asdict(parity) if parity else {}))
    right = parity is not None and parity.right is True
    verdict = "no effect" if reason else "faster"  # what is undecided is compared once more
    nothing = Ratio(0.0, 1.0, UNBOUNDED)
    return Compared(levers, "", verdict, nothing, parity=parity, kept=right, reason=reason)


def note(tuner: Any, line: dict[str, Any]) -> None:
    with tuner._path.with_name("results.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def seed_all(number: int) -> None:
    """Seed all generators with a number, and add it to each seed that is set from now on."""
    for module, name in ((random, "seed"), (np.random, "seed"), (torch, "manual_seed")):
        plain = getattr(module, name)
        plain(number)
        setattr(module, name, shifted(plain, number))
    torch.random.manual_seed = torch.manual_seed


def shifted(plain: Callable[..., Any], number: int) -> Callable[..., Any]:
    @wraps(plain)
    def seed(value: Any = None, *args: Any) -> Any:
        return plain(value + number if isinstance(value, int) else value, *args)

    return seed


def run(path: str) -> None:
    """Run a script as ``__main__``, as ``python PATH`` would."""
    module = ModuleType("__main__")
    module.__file__ = str(Path(path).resolve())
    sys.modules["__main__"] = module
    sys.path[0] = str(Path(path).resolve().parent)
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))


if __name__ == "__main__":
    tuners.settled = lambda times: len(times) >= WARM_STEPS
    tuners.Tuner._compare_now = results_of
    seed_all(int(sys.argv[1]))
    del sys.argv[:2]
    run(sys.argv[0])
