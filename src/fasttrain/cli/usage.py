"""Turns usage errors of the command line into fasttrain's three lines."""

from __future__ import annotations

import shlex

from fasttrain.config.nearest import nearest
from fasttrain.config.options import OPTIONS, SLURM_OPTIONS
from fasttrain.spec.errors import ExitCode, FasttrainError
from fasttrain.spec.secrets import mask_args

_SHARED = ("--config", "--preset", "--dry-run", "--json", "--no-python", "--help")
# Options of the commands that take a script: what is none of these may be the script's own.
COMMAND_OPTIONS = {
    "run": (*(spec.flag for spec in OPTIONS), *_SHARED, "--explain", "--machine"),
    "slurm": (
        *(spec.flag for spec in (*OPTIONS, *SLURM_OPTIONS)),
        *(*_SHARED, "--wait", "--follow", "--check"),
    ),
}


def translate(error: Exception, argv: list[str], commands: set[str]) -> FasttrainError:
    """Give the error in three lines, with the nearest option or the next thing to type.

    Args:
        error: A usage error of typer's.
        argv: The command line.
        commands: Names of the sub-commands.
    """
    command = argv[0] if argv and argv[0] in commands else ""
    option = getattr(error, "option_name", None)
    if option and command in COMMAND_OPTIONS and type(error).__name__ == "NoSuchOption":
        return unknown_option(option, argv[1:], command)
    message = str(getattr(error, "message", error)).strip().rstrip(".")
    return FasttrainError(
        message[:1].lower() + message[1:],
        why="the command line can't be understood",
        fix=f"see {' '.join(('fasttrain', command)).strip()} --help",
        slug="usage",
        exit_code=ExitCode.USAGE,
    )


def unknown_option(option: str, words: list[str], command: str = "run") -> FasttrainError:
    """Give the error for an option that isn't fasttrain's: its nearest one and the ``--`` form."""
    if option in COMMAND_OPTIONS[command]:
        return FasttrainError(
            f"{option} is not an option of fasttrain {command}",
            why="SLURM chooses the nodes and their GPUs, and the ranks meet on the first node",
            fix="say how many with --nodes and --gpus-per-node",
            slug="slurm-option",
            exit_code=ExitCode.USAGE,
        )
    near = nearest(option, COMMAND_OPTIONS[command])
    return FasttrainError(
        f"{option} is not an option of fasttrain {command}",
        why="options of the script itself stand behind --"
        + (f"; the nearest of fasttrain's is {near}" if near else ""),
        fix=f"fasttrain {command} {_with_separator(option, words)}"
        + (f", or {near} if that was meant" if near else ""),
        slug="unknown-option",
        exit_code=ExitCode.USAGE,
    )


def _with_separator(option: str, words: list[str]) -> str:
    """Give the words as typed, ``--`` before the unknown option."""
    at = next((i for i, word in enumerate(words) if word.split("=")[0].startswith(option)), 0)
    before, behind = words[:at], [word for word in words[at:] if word != "--"]
    if not any(word.endswith(".py") for word in before) and "-m" not in before:
        script = next((word for word in behind if word.endswith(".py")), None)
        behind = [word for word in behind if word is not script]
        before.append(script or "SCRIPT")
    return shlex.join([*mask_args(before), "--", *mask_args(behind)])
