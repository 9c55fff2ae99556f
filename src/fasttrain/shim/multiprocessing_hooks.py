"""Installs the levers in processes that the script starts by multiprocessing.

A forked child has them already; only its record starts from zero. A spawned child is a fresh
interpreter: a line is put in front of the program that multiprocessing passes on its command line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any

from fasttrain.files import load
from fasttrain.model.plan import LaunchPlan
from fasttrain.shim.hooks import patching
from fasttrain.shim.process.import_hook import after_torch

_HOME = repr(str(Path(__file__).absolute().parents[2])).replace("{", "{{").replace("}", "}}")
# It runs by exec() and stays one line of the program, whose line numbers tracebacks show. With -c
# the working directory is first in sys.path, where something else may be called fasttrain.
_PREPARE = (
    "import sys\n"
    "first = sys.path.pop(0) if sys.path[:1] == [''] else None\n"
    f"sys.path.insert(0, {_HOME})\n"
    "import fasttrain\n"  # this one, though the child's Python may have none, or another
    "del sys.path[0]\n"
    "from fasttrain.shim.multiprocessing_hooks import prepare\n"
    "None if first is None else sys.path.insert(0, first)\n"
    "prepare({plan!r}, {rank!r})"
)


def follow_spawned(plan_path: Path, rank: int, undo: ExitStack) -> None:
    """Call `prepare` first in each interpreter that multiprocessing spawns."""
    original = spawn.get_command_line

    def get_command_line(**kwargs: Any) -> list[str]:
        argv: list[str] = original(**kwargs)
        if "-c" in argv:  # a frozen program has none
            prepare = _PREPARE.format(plan=str(plan_path), rank=rank)
            program = argv.index("-c") + 1
            argv[program] = f"exec({prepare!r}, {{}}); {argv[program]}"
        return argv

    patching.put(spawn, "get_command_line", get_command_line, undo)


def follow_forked(reset: Callable[[], None]) -> None:
    """Call ``reset`` in each child that multiprocessing forks, while the object of it exists."""
    owner = getattr(reset, "__self__", reset)
    util.register_after_fork(owner, lambda _: reset())


def at_exit(finish: Callable[[], None]) -> None:
    """Call ``finish`` when a process of multiprocessing ends: a forked one runs no atexit."""
    util.Finalize(None, finish, exitpriority=-100)


def prepare(plan_path: str, rank: int) -> None:
    """Install the levers in a spawned child once it imports torch, as in its parent."""
    started_s, pid = time.perf_counter(), os.getpid()
    plan = load(LaunchPlan, Path(plan_path))

    def install() -> None:
        from fasttrain.shim.runtime import Runtime

        Runtime(plan, rank, started_s, pid, child=True).install()

    after_torch(install)
