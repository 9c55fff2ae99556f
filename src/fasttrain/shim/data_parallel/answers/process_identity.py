"""Shows the script rank 0's process id and host name on all ranks.

Scripts name runs and temporary files by them, and seed generators. A signal that the script sends
to its own process by that id goes to the rank that sends it.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from fasttrain.shim.data_parallel.answers.answers import Answers
from fasttrain.shim.data_parallel.answers.clocks import replace_in_users_modules
from fasttrain.shim.data_parallel.answers.own_copies import OwnCopies, path_of
from fasttrain.shim.data_parallel.answers.places import asking, is_users
from fasttrain.shim.hooks import patching
from fasttrain.shim.process.import_hook import after_import

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
