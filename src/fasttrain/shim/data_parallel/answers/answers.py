"""Rank 0 answers questions on which ranks could differ, such as the time or which files exist.

All ranks run one script and so ask the same questions in the same order. Every rank gets rank 0's
answer to the k-th question. An answer carries the line of the script that has asked: a rank that
asks from another line has diverged from rank 0, and the run ends with an error that names both.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from fasttrain.shim.data_parallel.answers.channels import Ring, StoredAnswers
from fasttrain.shim.data_parallel.answers.places import Places, users_place
from fasttrain.shim.data_parallel.node_memory import rest, shared_memory
from fasttrain.shim.data_parallel.rank_consistency import ranks_parted
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.process import refusal
from fasttrain.shim.process.refusal import refuse

# Encodes rank 0's answers as JSON: plain values, paths, results of stat, and errors.


_STATS = {"stat": os.stat_result, "statvfs": os.statvfs_result}
_TOP = (str, int, float, type(None))


class NotPlainError(Exception):
    """Raised if rank 0's answer can't be encoded: each rank has to find its own."""


def encoded(value: Any) -> bytes:
    """Return a value as JSON, for `decoded`."""
    try:
        return json.dumps(_plain(value)).encode()
    except NotPlainError:
        return b'{"own": true}'


def encoded_error(error: Exception) -> bytes:
    """Return an exception as JSON, for `decoded` to raise."""
    kind = type(error)
    args = [arg if isinstance(arg, _TOP) else str(arg) for arg in error.args]
    names = [_name(getattr(error, name, None)) for name in ("filename", "filename2")]
    return json.dumps({"error": [kind.__module__, kind.__qualname__, args, *names]}).encode()


def decoded(text: bytes) -> Any:
    """Return rank 0's answer.

    Raises:
        NotPlainError: If rank 0 could not encode it.
        Exception: The error that rank 0 got instead of an answer.
    """
    return _value(json.loads(text))


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return {"bytes": os.fsdecode(value)}
    if isinstance(value, os.PathLike):
        return {"path": os.fsdecode(value)}
    for name, kind in _STATS.items():
        if type(value) is kind:
            content: Any = value.__reduce__()[1]
            return {name: [list(content[0]), content[1]]}
    raise NotPlainError


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "bytes":
        return os.fsencode(content)
    if kind == "path":
        return Path(content)
    if kind in _STATS:
        make: Any = _STATS[kind]
        return make(tuple(content[0]), content[1])
    if kind == "error":
        raise _error(*content)
    raise NotPlainError


def _error(module: str, name: str, args: list[Any], *paths: str | None) -> Exception:
    """Return an exception like rank 0's; a RuntimeError if its class can't be created."""
    kind: Any = sys.modules.get(module, builtins)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    try:
        if not issubclass(kind, Exception):
            raise TypeError
        if issubclass(kind, OSError) and len(args) == 2:
            first, second = paths
            return OSError(*args, first, None, second) if first else OSError(*args)
        return kind(*args)  # type: ignore[no-any-return]
    except Exception:  # noqa: BLE001 - classes of any kind
        return RuntimeError(": ".join([name, *map(str, args)]))


def _name(path: Any) -> str | None:
    try:
        return None if path is None else os.fsdecode(path)
    except TypeError:
        return str(path)


# Rank 0 answers questions on which ranks could differ, such as the time or which files exist.


WAIT = "wait for other ranks"

LOOK_EVERY = 2000  # polls (0.1 to 0.2 s) between checks whether other ranks have ended
STUCK_S = 4.0  # two ranks that wait for each other this long are deadlocked
POLL_S = 0.5


def itself(value: Any) -> Any:
    """Return the value: an answer that other ranks get as it is."""
    return value


class Answers:
    """The questions of this rank, and rank 0's answers to them.

    Args:
        ranks: All ranks.

    Attributes:
        live: True if rank 0 answers: not in forked children, and not while rank 0 alone runs code.
        number: Number of the last question.
        thread: The thread whose questions are answered.
        places: Numbers the lines that ask.
        waiting_elsewhere: Functions that return a rank that waits for this one other than for an
            answer, the number of the place where this one is to act, and how often it has acted.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.live = False
        self.number = 0
        self.rank = ranks.rank
        self.thread = threading.get_ident()
        self.places = Places(ranks.store)
        self.channel: Ring | StoredAnswers
        self.waiting_elsewhere: list[Callable[[], tuple[int, int, int] | None]] = []
        self._ranks = ranks
        self._place = 0
        self._closed = threading.Event()

    def install(self, undo: ExitStack) -> None:
        """Connect to the other ranks and start to answer; every rank must call this."""
        ranks = self._ranks
        with ranks.waits():
            size = Ring.size(ranks.world_size)
            memory = shared_memory(ranks.store, "ring", ranks.rank, ranks.world_size, size)
        whom = ranks.rank, ranks.world_size, ranks.store, self._wait
        self.channel = StoredAnswers(*whom) if memory is None else Ring(memory, *whom)
        self.live = True
        _forget_in_children(self)
        # Before other functions that wait at the end: no rank may wait for an answer by then.
        refusal.at_clean_end.insert(0, self.close)
        undo.callback(refusal.at_clean_end.remove, self.close)
        undo.callback(self.close)
        watch = threading.Thread(target=self._watch, name="fasttrain-answers", daemon=True)
        watch.start()
        undo.callback(watch.join)
        undo.callback(self._closed.set)

    def close(self) -> None:
        """Have each rank find its own answers from now on."""
        if self.live:
            self.live = False
            self._closed.set()
            self.channel.end()

    @property
    def ended(self) -> bool:
        """True if this was closed, which a forked child inherits."""
        return self._closed.is_set()

    def answers(self) -> bool:
        """True if rank 0 answers this thread's questions."""
        return self.live and threading.get_ident() == self.thread

    def next_number(self, place: int) -> int:
        """Count a question, and return its number."""
        self._place = place
        self.number = number = self.number + 1
        return number

    def ask(self, place: int, find: Callable[[], Any], tell: Callable[[Any], Any] = itself) -> Any:
        """Return what ``find`` returns on rank 0; raise what it raises there.

        Args:
            place: The number of the line and its question.
            find: Finds the answer; other ranks call it only if rank 0's can't be encoded.
            tell: Converts the result for other ranks.
        """
        number = self.next_number(place)
        if self.rank == 0:
            return self._find(number, place, find, tell)
        try:
            return self._await_answer(number, place)
        except NotPlainError:
            with self.apart():
                return find()

    def do(
        self, place: int, act: Callable[[], Any], tell: Callable[[Any], Any] = lambda _: None
    ) -> Any:
        """Have rank 0 act once all ranks have come here; return when it has.

        Args:
            place: The number of the line and its action.
            act: Called on rank 0 alone.
            tell: Converts the result for other ranks.

        Returns:
            The result of ``act`` on rank 0, and that of ``tell`` on other ranks.
        """
        number = self.next_number(place)
        if self.rank:
            return self._await_answer(number, place)
        others = self.channel.gather(number, place)
        for rank, other in enumerate(others, 1):
            if other != place:
                self.channel.give_text(number, place, b"null")
                self._part(place, rank, other)
        return self._find(number, place, act, tell)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Have this rank find its own answers in a block that other ranks may not run."""
        if threading.get_ident() != self.thread:
            yield  # other threads find their own answers anyway; the answered one may ask meanwhile
            return
        before, self.live = self.live, False
        try:
            yield
        finally:
            self.live = before and not self._closed.is_set()

    def _find(
        self, number: int, place: int, find: Callable[[], Any], tell: Callable[[Any], Any]
    ) -> Any:
        try:
            with self.apart():
                found = find()
        except Exception as error:
            self.channel.give_text(number, place, encoded_error(error))
            raise
        self.channel.give_text(number, place, encoded(tell(found)))
        return found

    def _await_answer(self, number: int, place: int) -> Any:
        return decoded(self.take(number, place << 32))

    def take(self, number: int, tag: int) -> Any:
        """Return rank 0's answer to a question.

        Raises:
            SystemExit: ``ranks-parted`` if rank 0 has asked another one.
        """
        place = tag >> 32
        found, value = self.channel.take(number, place)
        if found >> 32 != place:
            self._part(place, 0, found >> 32)
        return value

    def _part(self, place: int, rank: int, other: int) -> NoReturn:
        refuse(ranks_parted({self.rank: self.places.words(place), rank: self.places.words(other)}))

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Wait for other ranks.

        Raises:
            SystemExit: ``ranks-parted`` if one of them has ended.
        """
        looks = 0
        with self._ranks.waits(), self.apart():
            while not is_over():
                looks += 1
                rest(looks)
                if not looks % LOOK_EVERY:
                    self._look_for_ended(is_over)

    def _look_for_ended(self, is_over: Callable[[], bool]) -> None:
        ended = self.channel.ended()
        gone = [rank for rank in ended if self.rank == 0 or rank == 0]
        if gone and not is_over():
            refuse(ranks_parted({self.rank: self.places.words(self._place), gone[0]: "end"}))

    # --- deadlocks

    def _watch(self) -> None:
        """End the run if this rank and rank 0 wait for each other at different places."""
        before: Any = None
        since_s = 0.0
        while not self._closed.wait(POLL_S):
            try:
                now = self._stuck()
            except (RuntimeError, OSError):  # the store is gone: the run has ended
                return
            if now is None or now != before:
                before, since_s = now, time.monotonic()
            elif time.monotonic() - since_s > STUCK_S:
                self._end_stuck(*now[:2])

    def _stuck(self) -> tuple[int, int, int, float] | None:
        """Return a rank that waits for this one, its place and question, and a start of waiting."""
        elsewhere = [found for look in self.waiting_elsewhere if (found := look())]
        waiting_s = self._ranks.waiting_since_s
        if not waiting_s or not self.live:  # not live: it waits for an answer itself
            return None
        come = self.channel.come_to()
        for rank, (number, place) in enumerate(come):
            if rank != self.rank and 0 in (rank, self.rank) and number > self.number:
                return rank, place, number, waiting_s
        return (*elsewhere[0], waiting_s) if elsewhere else None

    def _end_stuck(self, rank: int, place: int) -> None:
        here = f"{WAIT} at {users_place(self.thread)}"
        error = ranks_parted({self.rank: here, rank: self.places.words(place)})
        with suppress(OSError, ValueError):
            os.write(2, f"{error}\n".encode())
        refusal.ended_by_us(error)
        os._exit(int(error.exit_code))  # a thread's sys.exit wouldn't end the process


_IN_CHILDREN: weakref.WeakSet[Answers] = weakref.WeakSet()


def _forget_in_children(answers: Answers) -> None:
    """Have forked children find their own answers."""
    if not _IN_CHILDREN:
        os.register_at_fork(after_in_child=_in_child)
    _IN_CHILDREN.add(answers)


def _in_child() -> None:
    for answers in _IN_CHILDREN:
        answers.live = False
