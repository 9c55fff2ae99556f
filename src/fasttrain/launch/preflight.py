"""Checks the target and the ports before anything is started."""

from __future__ import annotations

import shutil
import socket
import warnings
from collections.abc import Mapping
from pathlib import Path

from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.plan import LaunchPlan, Processes, Target


def check_target(target: Target, cwd: str, *, parsed: bool = True) -> None:
    """Check that a script can be read and parsed.

    Args:
        target: What is started.
        cwd: Working directory.
        parsed: Whether this Python's syntax is that of the one that runs it.

    Raises:
        FasttrainError: It is missing, a directory, unreadable, or not Python.
    """
    if target.kind != "script":
        return
    path = Path(cwd, target.name)
    try:
        if path.is_dir():
            raise _error(target.name, "it is a directory", "name the file, or a module with -m")
        if not path.exists():
            raise _error(target.name, f"there is no such file in {cwd}", "check the path")
        if not path.is_file():  # opening a pipe could block for ever
            raise _error(target.name, "it is not a regular file", "name a Python file")
        source = path.read_bytes()
    except OSError as error:
        why = error.strerror or str(error)
        raise _error(target.name, why, "name a file that can be read") from error
    if parsed:
        _parse(source, target.name)


def _parse(source: bytes, name: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the worker shows them when it compiles the script
            compile(source, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f"{name}:{error.lineno}" if error.lineno else name
        text = (error.text or "").strip()
        why = f"{error.msg}: {text}" if text else error.msg
        raise _no_python(where, why) from error
    except ValueError as error:  # null bytes, up to Python 3.11.3
        raise _no_python(name, str(error)) from error
    except (RecursionError, MemoryError) as error:
        raise _error(name, f"Python can't parse it: {error}", "name a Python file") from error


def _no_python(where: str, why: str) -> FasttrainError:
    return FasttrainError(
        f"{where} is not valid Python",
        why=why,
        fix=f"mend {where}; other programs run with --no-python",
        slug="script-syntax",
    )


def find_program(plan: LaunchPlan, environ: Mapping[str, str]) -> str:
    """Return the path of the program that starts this node's processes.

    Args:
        plan: The plan.
        environ: The environment of the processes; its PATH is searched.

    Raises:
        FasttrainError: There is no such program, or no such command for the agent to start.
    """
    named = (plan.target.name,) if plan.target.kind == "command" else ()
    program = ""
    for name in (*named, plan.argv[0]):
        program = shutil.which(name, path=environ.get("PATH")) or ""
        if not program:
            raise FasttrainError(
                f"{name} can't be started",
                why="there is no program of that name that may be executed",
                fix="check the name; a program outside PATH is named by its path",
                slug="cannot-start",
                exit_code=ExitCode.CANNOT_START,
            )
    return program


def check_port(processes: Processes) -> None:
    """Check that the port of a static run is free on the node that is to open it.

    Raises:
        FasttrainError: Something listens on it.
    """
    if not processes.master_port or processes.node_rank:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", processes.master_port))
        except OSError as error:
            raise FasttrainError(
                f"port {processes.master_port} can't be opened on this node",
                why=error.strerror or str(error),
                fix="choose another with --master-port, the same on every node",
                slug="port-in-use",
                exit_code=ExitCode.CANNOT_START,
            ) from error


def _error(name: str, why: str, fix: str) -> FasttrainError:
    return FasttrainError(
        f"{name} can't be run",
        why=why,
        fix=fix,
        slug="script-unusable",
        exit_code=ExitCode.CANNOT_START,
    )
