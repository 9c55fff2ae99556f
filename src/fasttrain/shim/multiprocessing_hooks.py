"""Installs the levers in processes that the script starts by multiprocessing.

A forked child has them already; only its record starts from zero. A spawned child, and the server
whose forks are the children of the start method ``forkserver``, is a fresh interpreter: a line is
put in front of the program that multiprocessing passes on its command line.

Source: CPython 3.11 and 3.14, ``multiprocessing/popen_spawn_posix.py`` and ``forkserver.py``
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from fasttrain.files import load
from fasttrain.model.plan import LaunchPlan
from fasttrain.shim.hooks import patching
from fasttrain.shim.process.import_hook import after_import, after_torch

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


_SERVER = "from multiprocessing.forkserver import main"


def follow_started(plan_path: Path, rank: int, undo: ExitStack) -> None:
    """Call `prepare` first in each interpreter that multiprocessing starts, once it is imported."""
    prepare = _PREPARE.format(plan=str(plan_path), rank=rank)

    def prepared(program: str) -> str:
        return f"exec({prepare!r}, {{}}); {program}"

    undo.callback(after_import("multiprocessing.spawn", partial(_follow_spawned, prepared, undo)))
    undo.callback(after_import("multiprocessing.util", partial(_follow_servers, prepared, undo)))


def _follow_spawned(prepared: Callable[[str], str], undo: ExitStack, spawn: Any) -> None:
    original = spawn.get_command_line

    def get_command_line(**kwargs: Any) -> list[str]:
        argv: list[str] = original(**kwargs)
        if "-c" in argv:  # a frozen program has none
            program = argv.index("-c") + 1
            argv[program] = prepared(argv[program])
        return argv

    patching.put(spawn, "get_command_line", get_command_line, undo)


def _follow_servers(prepared: Callable[[str], str], undo: ExitStack, util: Any) -> None:
    original = util.spawnv_passfds

    def spawnv_passfds(path: Any, args: list[Any], passfds: Any) -> int:
        *first, program = args
        if isinstance(program, str) and program.startswith(_SERVER):
            args = [*first, prepared(program)]
        return int(original(path, args, passfds))

    patching.put(util, "spawnv_passfds", spawnv_passfds, undo)


def follow_forked(reset: Callable[[], None]) -> None:
    """Call ``reset`` in each child that multiprocessing forks, while the object of it exists."""
    from multiprocessing.util import register_after_fork

    owner = getattr(reset, "__self__", reset)
    register_after_fork(owner, lambda _: reset())


def at_exit(finish: Callable[[], None]) -> None:
    """Call ``finish`` when a process of multiprocessing ends: a forked one runs no atexit."""
    from multiprocessing.util import Finalize

    Finalize(None, finish, exitpriority=-100)


def prepare(plan_path: str, rank: int) -> None:
    """Install the levers once this child, or one that it forks, imports torch."""
    started_s, pid = time.perf_counter(), os.getpid()
    plan = load(LaunchPlan, Path(plan_path))
    follow_started(Path(plan_path), rank, ExitStack())
    after_torch(lambda: install_in_child(plan, rank, started_s if os.getpid() == pid else None))


def install_in_child(plan: LaunchPlan, rank: int, started_s: float | None = None) -> None:
    """Install the levers in a process that the script has started, and that has imported torch.

    Args:
        plan: The plan.
        rank: Global rank of the worker whose script it is.
        started_s: When it started, by `time.perf_counter`; None for now.
    """
    from fasttrain.shim.runtime import Runtime

    now = time.perf_counter() if started_s is None else started_s
    Runtime(plan, rank, now, child=True).install()
