"""What a worker is called with: its command line, its plan and its place among the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fasttrain.model.attempts import restart_count
from fasttrain.model.codec import CodecError
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.plan import LaunchPlan
from fasttrain.model.reading import load


@dataclass(frozen=True, slots=True)
class Entry:
    """One worker as it was called.

    Attributes:
        plan: The plan.
        kind: ``script`` or ``module``.
        name: Its path or name.
        args: Its arguments, which the plan holds with its secrets masked.
        rank: Global rank.
        local_rank: Rank on this node.
        restarts: How often the run was started again, by SLURM and by torchrun together; None
            where torchrun hasn't.
    """

    plan: LaunchPlan
    kind: str
    name: str
    args: tuple[str, ...]
    rank: int = 0
    local_rank: int = 0
    restarts: int | None = None


def read_entry(argv: Sequence[str], environ: Mapping[str, str]) -> Entry:
    """Return the worker that ``PLAN script|module TARGET [ARGS...]`` and the environment stand for.

    Raises:
        FasttrainError: ``worker-call``, ``worker-plan`` or ``worker-rank``.
    """
    if len(argv) < 3 or argv[1] not in ("script", "module"):
        raise not_by_hand("PLAN script|module TARGET [ARGS...]")
    path, kind, name, *args = argv
    plan = read_plan(Path(path))
    called = Entry(plan, kind, name, tuple(args))
    # A run without an agent has one rank, whatever RANK the user's own launcher has set.
    if plan.processes.value.backend == "direct":
        return called
    rank, local_rank, _ = (_number(environ, it) for it in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    again = _number(environ, "TORCHELASTIC_RESTART_COUNT", "0")
    restarts = restart_count(environ) + again if again else None
    return Entry(plan, kind, name, tuple(args), rank, local_rank, restarts)


def not_by_hand(form: str) -> FasttrainError:
    """Return the error for a command line that fasttrain didn't write."""
    return FasttrainError(
        "this program is started by fasttrain alone",
        why=f"it is called with {form}",
        fix="fasttrain run train.py",
        slug="worker-call",
        exit_code=ExitCode.USAGE,
    )


def read_plan(path: Path) -> LaunchPlan:
    """Return the plan of a run.

    Raises:
        FasttrainError: ``worker-plan`` where it can't be read, or its run is gone.
    """
    try:
        plan = load(LaunchPlan, path)
    except (OSError, CodecError) as error:
        raise _unusable(path, getattr(error, "strerror", None) or str(error)) from error
    if not Path(plan.run_dir).is_dir():
        raise _unusable(path, f"there is no run directory {plan.run_dir}")
    return plan


def _unusable(path: Path, why: str) -> FasttrainError:
    return FasttrainError(
        f"the plan {path} can't be used",
        why=why,
        fix="start the run anew with fasttrain run, which writes it",
        slug="worker-plan",
        exit_code=ExitCode.CANNOT_START,
    )


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    if text.isascii() and text.isdecimal() and len(text) < 10:
        return int(text)
    raise FasttrainError(
        f"{name} is {text!r}" if text else f"{name} is not set",
        why="it holds a number that the launcher of the ranks gives each of them",
        fix=f"leave {name} to fasttrain run, which starts the ranks",
        slug="worker-rank",
        exit_code=ExitCode.CANNOT_START,
    )
