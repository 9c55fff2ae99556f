"""Has one process of a run compile a graph, and the others load it.

Ranks call the same model at the same time, and would all compile the same graphs at once, as would
children that a script starts by multiprocessing to train copies of one model. A rank, or a child,
that doesn't find a graph in the cache takes a lock of the node, looks again, and holds the lock
while it compiles: the others find the graph when they come to have it. With a warm cache nobody
waits. The system frees the lock of a rank that dies, and nothing waits for one rank in particular,
so that ranks may compile different graphs, or none.

Nodes that share a folder have a lock in common, and the node that compiles leaves its graphs there:
the caches of nodes may be their own. A node that waited and finds nothing for itself, since it is
another machine, compiles beside the others.
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

import torch

from fasttrain.files import open_regular, write_private
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder

LOCK = "compiling-{node}.lock"
LOCK_OF_ALL = "compiling.lock"
GRAPHS = "graphs-{rank}.bin"
LOOK_EVERY_S = 0.02
MOST_S = 600.0  # after which a rank compiles by itself, as without the lock
TOLD_S = 1.0  # shorter waits aren't worth a note
FROM_ANOTHER_NODE = "another node compiled graphs, which came by the run directory"


class CompileOnce:
    """Holds a lock while this rank compiles what isn't in the cache.

    Args:
        folder: Where the locks are, and the graphs; all ranks of a node have the same one.
        node: Rank of this node.
        recorder: Is told how long this rank waited.
        graphs: The graphs of other nodes; None if they don't share the folder.
        most_s: Seconds to wait for a lock.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        recorder: OutcomeRecorder,
        graphs: SharedGraphs | None = None,
        most_s: float = MOST_S,
    ) -> None:
        self._recorder, self._graphs = recorder, graphs
        self._of_node = _Lock(folder / LOCK.format(node=node), most_s)
        self._of_all = _Lock(folder / LOCK_OF_ALL, most_s)
        self._compiling = False

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
        if not name and self._graphs is not None and self._of_all.is_held:
            self._graphs.save()
        self._free()

    def _make(self, original: Any) -> Any:
        def lookup(*args: Any, **kwargs: Any) -> Any:
            return self._found(lambda: original.__func__(*args, **kwargs))

        return staticmethod(lookup)

    def _found(self, look: Callable[[], Any]) -> Any:
        found = look()
        if found is not None or not self._compiling or self._of_node.is_held:
            return found
        try:
            found = self._found_in_turn(look)
        except OSError:  # a file system without locks, or a run directory that is lost
            self._free()
            return None
        if found is not None:
            self._free()
        return found

    def _found_in_turn(self, look: Callable[[], Any]) -> Any:
        """Take the locks, and look for what another rank has compiled meanwhile."""
        if self._take(self._of_node) and (found := look()) is not None:
            return found
        if self._graphs is None:
            return None
        waited = self._take(self._of_all)
        loaded = self._graphs.load()
        if (loaded or waited) and (found := look()) is not None:
            if loaded:
                self._recorder.note(FROM_ANOTHER_NODE)
            return found
        if waited:  # the other node compiles something else
            self._of_all.free()
        return None

    def _take(self, lock: _Lock) -> bool:
        """Take a lock, and return whether another rank had it until then."""
        waited, waited_s = lock.take()
        if waited_s >= TOLD_S:
            self._recorder.note(f"waited {waited_s:.0f} s while another process compiled")
        return waited

    def _free(self) -> None:
        self._of_all.free()
        self._of_node.free()


class _Lock:
    """A lock that the system frees if its holder dies."""

    def __init__(self, path: Path, most_s: float) -> None:
        self._path, self._most_s = path, most_s
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this rank has it, or has given up waiting for it."""
        return self._descriptor is not None

    def take(self) -> tuple[bool, float]:
        """Wait for it; return whether another rank had it, and for how many seconds.

        Raises:
            OSError: There can be no lock.
        """
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        began_s, waited = time.perf_counter(), False
        while not self._locked() and time.perf_counter() - began_s < self._most_s:
            waited = True
            time.sleep(LOOK_EVERY_S)
        return waited, time.perf_counter() - began_s

    def _locked(self) -> bool:
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def free(self) -> None:
        """Release it, if this rank has it."""
        if self._descriptor is not None:
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # forked children may have it, too
            os.close(self._descriptor)
            self._descriptor = None


class SharedGraphs:
    """Passes compiled graphs on to other nodes, in files that only their user can read.

    Args:
        folder: The folder that nodes share.
        rank: Rank of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._own = folder, folder / GRAPHS.format(rank=rank)
        self._loaded: dict[Path, tuple[int, int]] = {}

    def save(self) -> None:
        """Leave all graphs of this process for the others, if there is room."""
        saved = torch.compiler.save_cache_artifacts()
        if saved is not None:
            with suppress(OSError):  # the others compile themselves
                write_private(self._own, saved[0], durable=False)

    def load(self) -> bool:
        """Put what others have left since the last time into the cache; True if there was any."""
        loaded = False
        for path in sorted(self._folder.glob(GRAPHS.format(rank="*"))):
            if path == self._own:
                continue
            with open_regular(path) as file:
                about = os.fstat(file.fileno())
                state = (about.st_ino, about.st_mtime_ns)
                if about.st_uid != os.geteuid() or self._loaded.get(path) == state:
                    continue
                torch.compiler.load_cache_artifacts(file.read())
                self._loaded[path] = state
                loaded = True
        return loaded


def _ranks_meet_in_it() -> bool:
    """Whether ranks exchange shapes while they compile: one that waits would hold the others up."""
    config = importlib.import_module("torch._dynamo.config")
    return bool(getattr(config, "enable_compiler_collectives", False))
