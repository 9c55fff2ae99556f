"""Takes the levers along into processes that the script starts by multiprocessing.

A forked child has them already, and only its account begins anew. A spawned one is a fresh
interpreter: the program that multiprocessing gives it on its command line gets a line in front.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any

from fasttrain.model.plan import LaunchPlan
from fasttrain.model.reading import load
from fasttrain.shim.hooks import patching
from fasttrain.shim.process.import_hook import after_torch

_HOME = repr(str(Path(__file__).absolute().parents[2])).replace("{", "{{").replace("}", "}}")
# One line, for the tracebacks of multiprocessing. With -c the working directory leads the path,
# where something may be called fasttrain.
_PREPARE = (
    "import sys\n"
    "first = sys.path.pop(0) if sys.path[:1] == [''] else None\n"
    f"sys.path.insert(0, {_HOME})\n"
    "import fasttrain\n"  # this one, also for a Python that has none, or another
    "del sys.path[0]\n"
    "from fasttrain.shim.multiprocessing_hooks import prepare\n"
    "None if first is None else sys.path.insert(0, first)\n"
    "prepare({plan!r}, {rank!r})"
)


def follow_spawned(plan_path: Path, rank: int, undo: ExitStack) -> None:
    """Have interpreters that multiprocessing spawns prepare themselves before they do anything."""
    original = spawn.get_command_line

    def get_command_line(**kwargs: Any) -> list[str]:
        argv: list[str] = original(**kwargs)
        if "-c" in argv:  # a frozen program has none
            prepare = _PREPARE.format(plan=str(plan_path), rank=rank)
            program = argv.index("-c") + 1
            argv[program] = f"exec({prepare!r}, {{}}); {argv[program]}"
        return argv

    patching.put(spawn, "get_command_line", get_command_line, undo)


def follow_forked(begin_anew: Callable[[], None]) -> None:
    """Call ``begin_anew`` in each child that multiprocessing forks, for as long as it exists."""
    owner = getattr(begin_anew, "__self__", begin_anew)
    util.register_after_fork(owner, lambda _: begin_anew())


def at_exit(finish: Callable[[], None]) -> None:
    """Call ``finish`` when a process of multiprocessing ends, which skips atexit if it forked."""
    util.Finalize(None, finish, exitpriority=-100)


def prepare(plan_path: str, rank: int) -> None:
    """Hook torch in a spawned child, as in its parent."""
    started_s, pid = time.perf_counter(), os.getpid()
    plan = load(LaunchPlan, Path(plan_path))

    def install() -> None:
        from fasttrain.shim.runtime import Runtime

        Runtime(plan, rank, started_s, pid, child=True).install()

    after_torch(install)
