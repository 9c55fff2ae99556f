"""A sweep: the same run once for each combination of values of the script's options."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fasttrain.model.decision import Setting
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.job import JobRequest
from fasttrain.planning.slurm.values import MOST_CELLS

_RANGE = re.compile(r"(-?\d{1,9}):(-?\d{1,9})(?::(\d{1,9}))?", re.ASCII)


def cells(request: JobRequest) -> tuple[JobRequest, ...]:
    """Return one request per cell, in the order of an odometer; the request itself without any.

    Raises:
        FasttrainError: ``sweep`` for values that make no sweep, or too many.
    """
    setting = request.slurm.sweep
    axes = [_axis(setting, text) for text in setting.value]
    if not axes:
        return (request,)
    combinations = list(itertools.islice(itertools.product(*axes), MOST_CELLS + 1))
    if len(combinations) > MOST_CELLS:
        raise _error(setting, "", f"it has more than {MOST_CELLS} cells", "sweep over fewer values")
    if len(combinations) == 1:
        return (_cell(request, "", dict(combinations[0])),)
    digits = len(str(len(combinations) - 1))
    return tuple(
        _cell(request, f"{index:0{digits}}", dict(combination))
        for index, combination in enumerate(combinations)
    )


def _cell(request: JobRequest, index: str, values: dict[str, str]) -> JobRequest:
    words = [word for name, value in values.items() for word in _words(name, value)]
    target = replace(request.target, args=(*request.target.args, *words))
    if not index:  # the only one: a job like any other
        return replace(request, target=target, cell=values)
    run_id, run_dir = f"{request.run_id}_{index}", str(Path(request.run_dir, f"cell-{index}"))
    return replace(request, run_id=run_id, run_dir=run_dir, target=target, cell=values)


def _words(name: str, value: str) -> tuple[str, ...]:
    """Return an option as scripts read it: ``--lr 0.1``, or ``model.lr=0.1`` for Hydra."""
    return (f"{name}={value}",) if "." in name or name[0] == "+" else (f"--{name}", value)


def _axis(setting: Setting[tuple[str, ...]], text: str) -> list[tuple[str, str]]:
    name, _, listed = text.removeprefix("--").partition("=")
    values = list(_values(listed))
    if not all(values) or not values:
        raise _error(setting, name, "a value is empty", f"write it like {name}=1e-3,1e-4")
    if len(set(values)) < len(values):
        raise _error(setting, name, "a value stands there twice", "name each value once")
    return [(name, value) for value in values]


def _values(listed: str) -> Iterator[str]:
    for part in listed.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            yield part.strip()
            continue
        step = int(found[3] or 1) or 1
        numbers = range(int(found[1]), int(found[2]), step)
        yield from map(str, itertools.islice(numbers, MOST_CELLS + 1))


def _error(setting: Setting[tuple[str, ...]], name: str, why: str, fix: str) -> FasttrainError:
    return FasttrainError(
        f"{setting.source} {name} makes no sweep".replace("  ", " "),
        why=why,
        fix=f"{fix}; FROM:TO counts up to, and without, TO",
        slug="sweep",
        exit_code=ExitCode.USAGE,
    )
