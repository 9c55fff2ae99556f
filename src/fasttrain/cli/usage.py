"""Turns usage errors of the command line into fasttrain's three lines."""

from __future__ import annotations

import shlex

from fasttrain.cli.typed import as_ours, split, takes
from fasttrain.config.environ import read_environ
from fasttrain.config.values import nearest
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.secrets import mask_args


def translate(error: Exception, argv: list[str], commands: set[str]) -> FasttrainError:
    """Return the error in three lines, with the nearest option or the next thing to type.

    Args:
        error: A usage error of typer's.
        argv: The command line.
        commands: Names of the sub-commands.
    """
    command = argv[0] if argv and argv[0] in commands else ""
    option = getattr(error, "option_name", None)
    if option and command in ("run", "slurm") and type(error).__name__ == "NoSuchOption":
        return unknown_option(option, argv[1:], command)
    script = next((word for word in argv if word.endswith(".py")), None)
    named = argv[:1] == [script] or argv[0].startswith("-") if script else False
    if script and named and not commands.intersection(argv):
        return _no_command(script, argv)
    words = getattr(error, "format_message", error.__str__)()  # typer's message alone may be empty
    message = " ".join(words.split()).rstrip(".")
    return FasttrainError(
        message[:1].lower() + message[1:],
        why="the command line can't be understood",
        fix=f"see {' '.join(('fasttrain', command)).strip()} --help",
        slug="usage",
        exit_code=ExitCode.USAGE,
    )


def _no_command(script: str, argv: list[str]) -> FasttrainError:
    return FasttrainError(
        f"{script} is a script, and no command of fasttrain",
        why="a script is started by the command run",
        fix=_run_line(argv),
        slug="usage",
        exit_code=ExitCode.USAGE,
    )


def _run_line(argv: list[str]) -> str:
    typed = split(argv, "run")
    known = takes("run")
    if all(
        as_ours(group[0]).split("=")[0] in known or group[0][:1] != "-" for group in typed.after
    ):
        return f"fasttrain run {shlex.join(mask_args(argv))}"
    return typed.separated("run", typed.shared("run", read_environ(), unread=True))


def unknown_option(option: str, words: list[str], command: str = "run") -> FasttrainError:
    """Return the error for an option that isn't fasttrain's: its nearest one and the ``--`` form.

    Args:
        option: The option.
        words: The words behind the sub-command.
        command: The sub-command.
    """
    if option in takes(command) and option != "-m":
        return FasttrainError(
            f"{option} is not an option of fasttrain {command}",
            why="SLURM chooses the nodes and their GPUs, and the ranks meet on the first node",
            fix="say how many with --nodes and --gpus-per-node",
            slug="slurm-option",
            exit_code=ExitCode.USAGE,
        )
    near = nearest(option, (name for name in takes(command) if name.startswith("--")))
    typed = split(words, command)
    shared = typed.shared(command, read_environ(), unread=True)
    shared |= {"-m": ""} if option == "-m" else {}  # behind a script it is the script's
    return FasttrainError(
        f"{option} is not an option of fasttrain {command}",
        why="options of the script itself stand behind --"
        + (f"; the nearest of fasttrain's is {near}" if near else ""),
        fix=typed.separated(command, shared),
        slug="unknown-option",
        exit_code=ExitCode.USAGE,
    )
