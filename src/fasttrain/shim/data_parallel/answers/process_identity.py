"""Shows the script one process: rank 0's number and host, on all ranks.

Runs are named by them, temporary files and seeds too. What the script sends to its own process by
that number is sent to the rank that sends it.
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
from fasttrain.shim.data_parallel.answers.places import is_users

_KILLING = ("kill", "killpg", "getpgid", "getsid", "waitpid", "sched_getaffinity")


class Identity:
    """Takes the place of what tells a process its number and its host.

    Args:
        answers: Rank 0's; they are installed already.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._pid = os.getpid()
        self._shown: list[Any] = []

    def install(self, undo: ExitStack) -> None:
        """Ask rank 0 once; every rank must call this alike."""
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

        undo.callback(setattr, owner, name, original)
        setattr(owner, name, own)
        replaced[id(original)] = own

    def _number(self, original: Callable[[], int]) -> int:
        """Return rank 0's number for this rank's: in its forked children that is their parent's."""
        true = original()
        return self._shown[0] if true == self._pid else true

    def _host(self, _: Callable[[], str]) -> str:
        return str(self._shown[1])

    def _to_itself(self, original: Callable[..., Any], pid: int, *args: Any) -> Any:
        return original(self._pid if pid == self._shown[0] else pid, *args)
