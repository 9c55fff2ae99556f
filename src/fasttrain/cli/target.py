"""What a command line starts: a script, a module, or any command."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fasttrain.config.resolve import Resolved
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.plan import Target, TargetKind


@dataclass(frozen=True, slots=True)
class Starts:
    """How the first word is meant.

    Attributes:
        module: Value of ``-m``.
        no_python: Whether the target is any command.
        command: The sub-command, for the error.
    """

    module: str | None = None
    no_python: bool = False
    command: str = "run"


def choose_target(
    words: tuple[str, ...], behind: tuple[str, ...], wanted: Resolved, starts: Starts
) -> Target:
    """Give what is to be started, by the command line or else by the configuration.

    Args:
        words: Words without a dash: the script and arguments of its own.
        behind: Words behind ``--``.
        wanted: What the configuration says.
        starts: How the first word is meant.

    Raises:
        FasttrainError: ``script-missing`` when nothing names one, ``target-contradiction``.
    """
    if starts.module:
        if starts.no_python:
            raise _contradiction()
        return Target("module", starts.module, (*words, *behind))
    kind: TargetKind = "command" if starts.no_python else "script"
    if words:
        return Target(kind, words[0], (*words[1:], *behind))
    if starts.no_python and behind:
        return Target(kind, behind[0], behind[1:])
    if wanted.script is None:
        raise FasttrainError(
            "there is no script to run",
            why="neither the command line nor a fasttrain.yaml names one",
            fix=f"fasttrain {starts.command} train.py, or write `script: train.py` into"
            " fasttrain.yaml",
            slug="script-missing",
            exit_code=ExitCode.USAGE,
        )
    return Target(kind, wanted.script, (*wanted.args, *behind))


def script_folder(words: tuple[str, ...], starts: Starts, cwd: Path) -> Path | None:
    """Return the folder of the script that the command line names, if it is there."""
    if not words or starts.module or starts.no_python:
        return None
    script = cwd / words[0]
    there = os.path.isfile(script)  # noqa: PTH113 - a name that is too long is none
    return script.parent if there else None


def _contradiction() -> FasttrainError:
    return FasttrainError(
        "-m and --no-python exclude each other",
        why="a module is run by Python, and --no-python says that there is none",
        fix="leave one of them out",
        slug="target-contradiction",
        exit_code=ExitCode.USAGE,
    )
