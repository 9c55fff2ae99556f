"""Lets rank 0 alone write checkpoints, run commands and have a name outside of this run.

Other files that the script writes are in `fasttrain.shim.data_parallel.answers.files`, the runs of
TensorBoard and wandb in `trackers`. Output needs nothing: only rank 0's is shown.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fasttrain.model.outcome import State
from fasttrain.shim.data_parallel.answers.answers import Answers, itself
from fasttrain.shim.data_parallel.answers.clocks import replace_in_users_modules
from fasttrain.shim.data_parallel.answers.files import Files
from fasttrain.shim.data_parallel.answers.own_copies import OwnCopies, path_of
from fasttrain.shim.data_parallel.answers.places import asking, is_users, outside_of_torch
from fasttrain.shim.data_parallel.answers.standard_input import StandardInput
from fasttrain.shim.data_parallel.answers.trackers import Trackers
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.split.lazy_rows import gather_in
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.process.import_hook import after_import

# Has rank 0 alone run the script's commands; the other ranks get the result.
#
# A command creates folders, copies checkpoints, appends to files: it must run once. A process
# that runs concurrently with the script, as by `subprocess.Popen`, is started by each rank.


_RUNNING = ("run", "call", "check_call", "check_output", "getoutput", "getstatusoutput")
_DONE, _FAILED, _LATE = range(3)


class Commands:
    """Replaces the functions that run a command to its end.

    Args:
        answers: Rank 0's answers.
        files: Tells the script's calls from those of libraries.
    """

    def __init__(self, answers: Answers, files: Files) -> None:
        self._answers = answers
        self._files = files

    def install(self, undo: ExitStack) -> None:
        """Replace the functions."""
        for name in _RUNNING:
            self._files.replace(subprocess, name, functools.partial(self._run, name), undo)
        self._files.replace(os, "system", functools.partial(self._run, "system"), undo)

    def _run(
        self,
        name: str,
        frame: FrameType | None,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        place = self._files.place_of(frame, f"run a command by {name}")
        if not place:
            return original(*args, **kwargs)
        here: list[Any] = []

        def run() -> list[Any]:
            try:
                here.append(original(*args, **kwargs))
            except subprocess.CalledProcessError as error:
                here.append(error)
                return [_FAILED, error.returncode, error.output, error.stderr]
            except subprocess.TimeoutExpired as error:
                here.append(error)
                return [_LATE, error.timeout, error.output, error.stderr]
            return [_DONE, *_parts(here[0])]

        how, *parts = self._answers.do(place, run, itself)
        if here:  # on rank 0
            if how == _DONE:
                return here[0]
            raise here[0]
        self._files.forget_copies()
        return _outcome(how, parts, args[0] if args else kwargs.get("args"))


def _parts(result: Any) -> list[Any]:
    if isinstance(result, subprocess.CompletedProcess):
        return [True, result.returncode, result.stdout, result.stderr]
    if isinstance(result, tuple):
        return [False, *result]
    return [False, result]


def _outcome(how: int, parts: list[Any], command: Any) -> Any:
    """Return rank 0's result, or raise rank 0's error."""
    if how == _FAILED:
        raise subprocess.CalledProcessError(parts[0], command, *parts[1:])
    if how == _LATE:
        raise subprocess.TimeoutExpired(command, *parts)
    completed, *values = parts
    if completed:
        return subprocess.CompletedProcess(command, *values)
    return tuple(values) if len(values) > 1 else values[0]


# Shows the script rank 0's process id and host name on all ranks.
#
# Scripts name runs and temporary files by them, and seed generators. A signal that the script
# sends to its own process by that id goes to the rank that sends it.


_KILLING = ("kill", "killpg", "getpgid", "getsid", "waitpid", "sched_getaffinity")


class ProcessIdentity:
    """Replaces the functions that return the process id and the host name.

    Args:
        answers: Rank 0's answers, installed already.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._pid = os.getpid()
        self._shown: list[Any] = []

    def install(self, undo: ExitStack) -> None:
        """Ask rank 0 once; every rank must call this."""
        answers = self._answers
        if not answers.live:
            return
        place = answers.places.number(sys._getframe(), "begin")
        self._shown = answers.ask(place, lambda: [self._pid, socket.gethostname()])
        if not answers.rank:
            return
        replaced: dict[int, Any] = {}
        for name in ("getpid", "getppid"):
            self._replace(os, name, self._number, replaced, undo)
        self._replace(socket, "gethostname", self._host, replaced, undo)
        for name in _KILLING:
            self._replace(os, name, self._to_itself, replaced, undo)
        replace_in_users_modules(replaced, undo)

    def _replace(
        self, owner: Any, name: str, act: Callable[..., Any], replaced: Any, undo: ExitStack
    ) -> None:
        original = getattr(owner, name)
        answers = self._answers

        @functools.wraps(original)
        def own(*args: Any, **kwargs: Any) -> Any:
            if answers.ended or not is_users(sys._getframe(1).f_code.co_filename):
                return original(*args, **kwargs)
            return act(original, *args, **kwargs)

        patching.put(owner, name, own, undo)
        replaced[id(original)] = own

    def _number(self, original: Callable[[], int]) -> int:
        """Return rank 0's id in place of this rank's, also as a forked child's parent id."""
        true = original()
        return self._shown[0] if true == self._pid else true

    def _host(self, _: Callable[[], str]) -> str:
        return str(self._shown[1])

    def _to_itself(self, original: Callable[..., Any], pid: int, *args: Any) -> Any:
        return original(self._pid if pid == self._shown[0] else pid, *args)


_INTERNET = (socket.AF_INET, socket.AF_INET6)
_HERE = ("", "localhost", "0.0.0.0", "::", "::1")  # noqa: S104 - compared, not bound


class OwnNames:
    """Gives each rank its own ports, sockets and shared memory, which a machine has once per name.

    The script binds a port or creates shared memory under a name of its choice. Rank 0 gets that
    name and each other rank another one; a connection by the script's name goes to the rank's own.

    Args:
        answers: Rank 0's answers.
        copies: Knows which files are this rank's own.
    """

    def __init__(self, answers: Answers, copies: OwnCopies) -> None:
        self._answers = answers
        self._copies = copies
        self._pid = os.getpid()
        self._bound: dict[Any, Any] = {}  # this rank's address, by the script's

    def install(self, undo: ExitStack) -> None:
        """Replace the functions, except on rank 0."""
        if not self._answers.rank:
            return
        for name, act in (("bind", self._bind), ("connect", self._go), ("connect_ex", self._go)):
            self._replace(socket.socket, name, act, undo)

        def replace(module: Any) -> None:
            self._replace(module.SharedMemory, "__init__", self._share, undo)

        undo.callback(after_import("multiprocessing.shared_memory", replace))

    def _replace(self, kind: type, name: str, act: Callable[..., Any], undo: ExitStack) -> None:
        original = getattr(kind, name)
        answers = self._answers

        @functools.wraps(original)
        def own(this: Any, *args: Any, **kwargs: Any) -> Any:
            if answers.ended:
                return original(this, *args, **kwargs)
            return act(functools.partial(original, this), *args, **kwargs)

        patching.put(kind, name, own, undo)

    # --- sockets

    def _bind(self, original: Any, address: Any) -> Any:
        this = original.args[0]
        key = self._key(this, address)
        # Not in a child: this process would not learn the child's port, and could not connect.
        if not key or os.getpid() != self._pid or not _asked_by_user():
            return original(address)
        if this.family in _INTERNET:
            original((address[0], 0, *address[2:]))
            self._bound[key] = this.getsockname()[1]
            return None
        own = f"\0fasttrain-{self._pid}-{len(self._bound)}"
        original(own)
        self._bound[key] = own
        return None

    def _go(self, original: Any, address: Any) -> Any:
        this = original.args[0]
        own = self._bound.get(self._key(this, address))
        if own is None:
            return original(address)
        return original((address[0], own, *address[2:]) if this.family in _INTERNET else own)

    def _key(self, this: socket.socket, address: Any) -> Any:
        """Return the key of an address; None if it isn't a name on this machine."""
        if not this.type & socket.SOCK_STREAM:
            return None
        if this.family in _INTERNET and isinstance(address, tuple) and len(address) > 1:
            host, port = address[:2]
            here = host in _HERE or str(host).startswith("127.") or host == socket.gethostname()
            return port if here and port else None
        if this.family == socket.AF_UNIX and sys.platform == "linux":
            path = path_of(address)
            return path if path and "\0" not in path and not self._copies.is_own(path) else None
        return None

    # --- shared memory

    def _share(
        self,
        original: Any,
        name: str | None = None,
        create: bool = False,
        size: int = 0,
        **kwargs: Any,
    ) -> Any:
        ending = f"_rank{self._answers.rank}"
        if not name or name.endswith(ending):
            return original(name, create, size, **kwargs)
        if not create:  # created by the script, or else by another program
            try:
                return original(name + ending, create, size, **kwargs)
            except FileNotFoundError:
                return original(name, create, size, **kwargs)
        return original(name + ending, create, size, **kwargs)


def _asked_by_user() -> bool:
    frame = sys._getframe(3)  # the caller of the replaced method
    return asking(frame, for_libraries=True) is not None


# Lets rank 0 alone write checkpoints.


LEFT = "left to rank 0"
_OWN = "each rank saved its checkpoints to temporary files, of which it has its own"
# Methods of profilers that write a file, in C++ or for themselves.
_EXPORTS = ("export_chrome_trace", "export_stacks", "export_memory_timeline")
_LOOK_S = 0.01  # between looks whether rank 0 has saved
# Modules whose functions write a file themselves, not by `open`.
_SAVING_MODULES = {
    "safetensors.torch": "save_file", "safetensors.numpy": "save_file", "torch.export": "save",
}  # fmt: skip


class SideEffects:
    """Replaces the functions that write files, and what else a process has once.

    Args:
        recorder: This lever's recorder.
        ranks: All ranks.
        answers: Rank 0's answers, installed already.
        scratch: This rank's own folder.
    """

    def __init__(
        self, recorder: OutcomeRecorder, ranks: Ranks, answers: Answers, scratch: Path
    ) -> None:
        self.recorder = recorder
        self._ranks = ranks
        self._copies = OwnCopies(ranks.rank, scratch)
        self._files = Files(answers, self._copies, recorder)
        self._commands = Commands(answers, self._files)
        self._input = StandardInput(answers, self._files)
        self._identity = ProcessIdentity(answers)
        self._names = OwnNames(answers, self._copies)
        self._trackers = Trackers(answers, self._files, scratch)
        self._elsewhere: Counter[str] = Counter()  # saves in threads, by path
        self._counting = threading.Lock()

    def install(self, undo: ExitStack) -> None:
        """Replace what writes files, and what asks for them."""
        # Lives on, for what is replaced when the script imports it.
        undo = undo.enter_context(ExitStack())
        self.recorder.settle(State.ARMED, "no checkpoint was saved to a path")
        self.recorder.excuse(State.SKIPPED, "the script saved no checkpoint to a path")
        self._files.replace(torch, "save", self._save, undo)
        self._files.replace(torch.jit, "save", self._save, undo)
        scripted: Any = torch.jit
        for kind in (scripted.RecursiveScriptModule, scripted.ScriptModule):  # of a traced model
            self._files.replace(kind, "save", self._save_by_method, undo)
        self._saving_modules(undo)
        for name in _EXPORTS:
            self._files.replace(torch.profiler.profile, name, self._export, undo)
            if hasattr(torch.autograd.profiler.profile, name):
                kind = torch.autograd.profiler.profile
                self._files.replace(kind, name, self._export_by_script, undo)
        self._copies.install(undo)
        self._files.install(undo)
        self._commands.install(undo)
        self._input.install(undo)
        self._identity.install(undo)
        self._names.install(undo)
        self._trackers.install(undo)

    def refresh(self) -> None:
        """Do nothing: every file is counted as it is saved."""

    def _saving_modules(self, undo: ExitStack) -> None:
        """Replace the functions of modules that write files in C++ or Rust, once imported."""

        def replace(function: str, module: Any) -> None:
            self._files.replace(module, function, self._save, undo)

        for name, function in _SAVING_MODULES.items():
            undo.callback(after_import(name, functools.partial(replace, function)))

    # --- checkpoints

    def _save_by_method(
        self,
        frame: FrameType | None,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Save a ScriptModule by its own method, which `torch.jit.save` calls as well."""
        if outside_of_torch(frame) is not frame:
            return original(*args, **kwargs)
        return self._save(frame, original, *args, **kwargs)

    def _save(
        self,
        frame: FrameType | None,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        save = functools.partial(original, *args, **kwargs)
        target = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
        path = path_of(target) if isinstance(target, str | os.PathLike) else ""
        if not path:  # into memory, or an open file, which is a copy on other ranks
            return save()
        if self._copies.is_own(path):
            self.recorder.excuse(State.SKIPPED, _OWN)
            return save()
        if threading.current_thread() is threading.main_thread():
            gather_in(args)
        outside = outside_of_torch(frame) or frame
        if not self._files.leave(outside, "save a checkpoint", path, save):
            self._save_elsewhere(path, save)
        self._files.note_put(path)
        if self._ranks.rank:
            self.recorder.apply(LEFT, "")
        else:
            self.recorder.apply("saved", "")
            self.recorder.counts["files"] += 1
        return None

    # --- what a profiler has recorded

    def _export_by_script(
        self, frame: FrameType | None, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Export what the older profiler has recorded, on which the newer one stands."""
        if outside_of_torch(frame) is not frame:
            return original(*args, **kwargs)
        return self._export(frame, original, *args, **kwargs)

    def _export(
        self, frame: FrameType | None, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Export rank 0's records: each rank has its own, of the same steps."""
        export = functools.partial(original, *args, **kwargs)
        path = path_of(args[1] if len(args) > 1 else kwargs.get("path"))
        outside = outside_of_torch(frame)
        if not path or self._copies.is_own(path):
            return export()
        return None if self._files.leave(outside, "export a profile", path, export) else export()

    def _save_elsewhere(self, path: str, save: Callable[[], Any]) -> None:
        """Save in one of the script's threads: the other ranks' threads wait for rank 0's."""
        with self._counting:  # of a pool's threads it is chance which one saves
            self._elsewhere[path] += 1
            key = f"saved/{path}/{self._elsewhere[path]}"
        store = self._ranks.store
        if self._ranks.rank == 0:
            try:
                save()
            finally:
                store.set(key, "")
        elif threading.current_thread() is not threading.main_thread():
            while not store.check([key]):  # `wait` would have the store's lock meanwhile
                time.sleep(_LOOK_S)
            self._copies.forget(path)
