"""Reads how a worker was called: its command line, its plan and its rank."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fasttrain.files import load
from fasttrain.model.attempts import restart_count
from fasttrain.model.codec import CodecError
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.plan import LaunchPlan

# Ends the worker when its launcher dies, so that a killed launcher leaves no process behind.


PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_launcher() -> None:
    """Have the kernel kill this process when the one that started it ends (Linux only)."""
    if sys.platform != "linux":
        return
    launcher = os.getppid()
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The launcher may have died before the call above: the signal would then never come.
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)


# The environment variables in which torchrun passes a worker its rank.
#
# They are hidden from a script that fasttrain makes data-parallel: with them, the script or a
# library that it uses might set up ranks of its own, or work on its share of the data only.


# Source: the documentation of torchrun, torch 2.13, "Environment Variables".
NAMES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip

_hidden: dict[str, str] = {}


def hide() -> None:
    """Remove the variables from the environment."""
    for name in NAMES:
        if name in os.environ:
            _hidden[name] = os.environ.pop(name)


def restore() -> None:
    """Put the variables back, for a script that sets up its ranks itself after all."""
    os.environ.update(_hidden)
    _hidden.clear()


def put(name: str, value: str) -> None:
    """Set one variable; hidden if the others are."""
    (_hidden or os.environ)[name] = value


def get(name: str, default: str = "") -> str:
    """Return the value of one variable, hidden or not."""
    return _hidden.get(name, os.environ.get(name, default))


# Reads how a worker was called: its command line, its plan and its rank.


@dataclass(frozen=True, slots=True)
class Entry:
    """The call of one worker.

    Attributes:
        plan: The plan.
        kind: ``script`` or ``module``.
        name: The script's path, or the module's name.
        args: The script's arguments; in the plan their secrets are masked.
        rank: Global rank.
        local_rank: Rank on this node.
        restarts: How often SLURM and torchrun have restarted the run, together; None if torchrun
            has not.
    """

    plan: LaunchPlan
    kind: str
    name: str
    args: tuple[str, ...]
    rank: int = 0
    local_rank: int = 0
    restarts: int | None = None


def read_entry(argv: Sequence[str], environ: Mapping[str, str]) -> Entry:
    """Return the call that ``PLAN script|module TARGET [ARGS...]`` and the environment make up.

    Raises:
        FasttrainError: ``worker-call`` if the command line has another form, ``worker-plan`` if the
            plan can't be used, ``worker-rank`` if torchrun's variables hold no numbers.
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
        "only fasttrain starts this program",
        why=f"it takes the arguments {form}",
        fix="fasttrain run train.py",
        slug="worker-call",
        exit_code=ExitCode.USAGE,
    )


def read_plan(path: Path) -> LaunchPlan:
    """Return the plan of a run.

    Raises:
        FasttrainError: ``worker-plan`` if it can't be read, or if its run directory is gone.
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
        fix="start the run again with fasttrain run, which writes a plan",
        slug="worker-plan",
        exit_code=ExitCode.CANNOT_START,
    )


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    if text.isascii() and text.isdecimal() and len(text) < 10:
        return int(text)
    raise FasttrainError(
        f"{name} is {text!r}" if text else f"{name} is not set",
        why="the launcher of the ranks sets it to a number for each rank",
        fix=f"leave {name} to fasttrain run, which starts the ranks",
        slug="worker-rank",
        exit_code=ExitCode.CANNOT_START,
    )
