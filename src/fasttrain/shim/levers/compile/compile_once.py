"""Has one rank of a node compile a graph, and the others load it.

Ranks call the same model at the same time, and would all compile the same graphs at once. A rank
that doesn't find a graph in the cache takes a lock of the node, looks again, and holds the lock
while it compiles: the others find the graph when they come to have it. With a warm cache nobody
waits. The system frees the lock of a rank that dies, and nothing waits for one rank in particular,
so that ranks may compile different graphs, or none.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder

LOCK = "compiling-{node}.lock"  # in the run directory, which nodes may share
LOOK_EVERY_S = 0.02
MOST_S = 600.0  # after which a rank compiles by itself, as without the lock
TOLD_S = 1.0  # shorter waits aren't worth a note


class OncePerNode:
    """Holds the lock of a node while this rank compiles what isn't in the cache.

    Args:
        run_dir: The run directory.
        node: Rank of this node.
        recorder: Is told how long this rank waited.
        most_s: Seconds to wait for the lock.
    """

    def __init__(
        self, run_dir: Path, node: str, recorder: OutcomeRecorder, most_s: float = MOST_S
    ) -> None:
        self._path = run_dir / LOCK.format(node=node)
        self._recorder, self._most_s = recorder, most_s
        self._compiling = False
        self._descriptor: int | None = None

    def install(self, undo: ExitStack) -> None:
        """Watch what AOTAutograd finds in its cache; does nothing if torch has no such function.

        Source: torch 2.13, torch/_functorch/_aot_autograd/autograd_cache.py
        """
        with suppress(ImportError):
            module = importlib.import_module("torch._functorch._aot_autograd.autograd_cache")
            if isinstance(vars(module.AOTAutogradCache).get("_lookup"), staticmethod):
                patching.wrap(module.AOTAutogradCache, "_lookup", self._make, undo)
                undo.callback(self._free)

    def compiling(self, name: str) -> None:
        """Notice that a compilation begins, or with an empty name that it has ended."""
        self._compiling = bool(name) and not _ranks_meet_in_it()
        self._free()

    def _make(self, original: Any) -> Any:
        def lookup(*args: Any, **kwargs: Any) -> Any:
            return self._found(lambda: original.__func__(*args, **kwargs))

        return staticmethod(lookup)

    def _found(self, look: Callable[[], Any]) -> Any:
        found = look()
        if found is not None or not self._compiling or self._descriptor is not None:
            return found
        try:
            waited = self._take()
        except OSError:  # a file system without locks, or a run directory that is lost
            self._free()
            return None
        if waited:
            found = look()
            if found is not None:
                self._free()
        return found

    def _take(self) -> bool:
        """Take the lock, and return whether another rank had it until then."""
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        began_s, waited = time.perf_counter(), False
        while not self._locked() and time.perf_counter() - began_s < self._most_s:
            waited = True
            time.sleep(LOOK_EVERY_S)
        waited_s = time.perf_counter() - began_s
        if waited_s >= TOLD_S:
            self._recorder.note(f"waited {waited_s:.0f} s while another rank compiled")
        return waited

    def _locked(self) -> bool:
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _free(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # forked children may have it, too
            os.close(self._descriptor)
            self._descriptor = None


def _ranks_meet_in_it() -> bool:
    """Whether ranks exchange shapes while they compile: one that waits would hold the others up."""
    config = importlib.import_module("torch._dynamo.config")
    return bool(getattr(config, "enable_compiler_collectives", False))
