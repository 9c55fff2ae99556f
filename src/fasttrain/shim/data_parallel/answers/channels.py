"""The channels through which rank 0's answers reach the other ranks.

The ranks of one node use a ring buffer in shared memory; ranks on several nodes use their store.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

SLOTS = 2048  # a power of two
_SLOT = 64  # words of 8 bytes: number, tag, and the answer
_ROW = 8  # words per rank before the slots: last read, question waited at, its place, ended
_READ, _COME, _PLACE, _ENDED = range(4)
_ROOM = 8 * (_SLOT - 2)
FLOAT, INT = 0xFFFFFFFF, 0xFFFFFFFE  # in place of a text's length: the answer is a number


class Ring:
    """Passes answers from rank 0 to the other ranks through shared memory.

    Rank 0 writes answer after answer, and the others read them in the same order. Rank 0 only waits
    before it reuses a slot that another rank hasn't read yet.

    Args:
        memory: `size` bytes, all 0 at first.
        rank: This rank.
        world_size: Number of ranks.
        store: Key-value store of all ranks, for answers that don't fit into a slot.
        wait: Calls a function again and again until it returns true.
    """

    def __init__(
        self,
        memory: Any,
        rank: int,
        world_size: int,
        store: Any,
        wait: Callable[[Callable[[], bool]], None],
    ) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        self._floats = memoryview(memory).cast("d")
        self._slots = world_size * _ROW
        self._row = rank * _ROW
        self._others = [r * _ROW for r in range(1, world_size)]
        self._store, self._wait = store, wait
        self._last = SLOTS  # the last answer that has room without a check
        self._fence = threading.Lock()

    @staticmethod
    def size(world_size: int) -> int:
        """Return the number of bytes of memory that a ring needs."""
        return 8 * (world_size * _ROW + SLOTS * _SLOT)

    # --- rank 0

    def give(self, number: int, tag: int, value: float) -> None:
        """Write answer ``number``, a float or an integer of 64 bits.

        Args:
            number: Counted from 1.
            tag: The place, shifted by 32 bits, and `FLOAT` or `INT`.
            value: The answer.
        """
        if number > self._last:
            self._make_room(number)
        at = self._slots + (number & (SLOTS - 1)) * _SLOT
        (self._floats if type(value) is float else self._words)[at + 2] = value  # type: ignore[call-overload]
        self._words[at + 1] = tag
        # Taking a lock is a memory barrier: no processor may show the number before the answer.
        with self._fence:
            pass
        with self._fence:
            pass
        self._words[at] = number

    def give_text(self, number: int, place: int, text: bytes) -> None:
        """Write answer ``number``, of any length but 0."""
        if number > self._last:
            self._make_room(number)
        at = self._slots + (number & (SLOTS - 1)) * _SLOT
        if len(text) <= _ROOM:
            self._memory[8 * (at + 2) : 8 * (at + 2) + len(text)] = text
        else:
            self._store.set(f"answer/{number}", text)
        self._words[at + 1] = place << 32 | len(text)
        with self._fence:
            pass
        with self._fence:
            pass
        self._words[at] = number

    def _make_room(self, number: int) -> None:
        def is_room() -> bool:
            self._last = SLOTS + min(self._words[row + _READ] for row in self._others)
            return self._last >= number

        self._wait(is_room)

    def gather(self, number: int, place: int) -> list[int]:
        """Wait until the other ranks have come to question ``number``; return their places."""
        words = self._words
        self.come(number, place)
        self._wait(lambda: all(words[row + _COME] >= number for row in self._others))
        with self._fence:
            pass
        return [words[row + _PLACE] for row in self._others]

    def come(self, number: int, place: int) -> None:
        """Publish that this rank has reached a question and waits for the others there."""
        self._words[self._row + _PLACE] = place
        with self._fence:
            pass
        with self._fence:
            pass
        self._words[self._row + _COME] = number

    # --- the other ranks

    def take(self, number: int, place: int) -> tuple[int, Any]:
        """Return the tag and the value of answer ``number``: a number, or bytes."""
        at = self._slots + (number & (SLOTS - 1)) * _SLOT
        words = self._words
        if words[at] != number:
            self.come(number, place)
            self._wait(lambda: words[at] == number)
        with self._fence:
            pass
        tag = words[at + 1]
        length = tag & 0xFFFFFFFF
        value: Any
        if length == FLOAT:
            value = self._floats[at + 2]
        elif length == INT:
            value = words[at + 2]
        else:
            value = self._text(number, at + 2, length)
        with self._fence:
            pass
        words[self._row + _READ] = number
        return tag, value

    def _text(self, number: int, at: int, length: int) -> bytes:
        if length <= _ROOM:
            return bytes(self._memory[8 * at : 8 * at + length])
        key = f"answer/{number}"
        text = bytes(self._store.get(key))
        if self._store.add(f"{key}/read", 1) == len(self._others):
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/read")
        return text

    # --- all ranks

    def end(self) -> None:
        """Stop asking; no rank waits for this one from now on."""
        self._words[self._row + _ENDED] = 1
        if self._row:
            self._words[self._row + _READ] = 2**62

    def ended(self) -> list[int]:
        """Return the ranks that have come to their end."""
        rows = [0, *self._others]
        return [row // _ROW for row in rows if self._words[row + _ENDED]]

    def come_to(self) -> list[tuple[int, int]]:
        """Return the last question at which each rank waited for others, and its place."""
        words = self._words
        return [(words[row + _COME], words[row + _PLACE]) for row in [0, *self._others]]


OFTEN = 64  # answers after which a rank publishes how far it has read
_TAG = struct.Struct("<q")
_FLOAT = struct.Struct("<d")


class StoredAnswers:
    """Passes answers from rank 0 to the other ranks through the store, with `Ring`'s interface.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        store: Key-value store of all ranks.
        wait: Calls a function again and again until it returns true.
    """

    def __init__(
        self, rank: int, world_size: int, store: Any, wait: Callable[[Callable[[], bool]], None]
    ) -> None:
        self._rank, self._store, self._wait = rank, store, wait
        self._all = range(world_size)
        self._others = range(1, world_size)
        self._deleted = 0  # number of the last deleted answer: all ranks have read it

    # --- rank 0

    def give(self, number: int, tag: int, value: float) -> None:
        """Write answer ``number``; see `Ring.give`."""
        self._set(number, tag, (_FLOAT if type(value) is float else _TAG).pack(value))

    def give_text(self, number: int, place: int, text: bytes) -> None:
        """Write answer ``number``, of any length but 0."""
        self._set(number, place << 32 | len(text), text)

    def _set(self, number: int, tag: int, content: bytes) -> None:
        self._store.set(f"answer/{number}", _TAG.pack(tag) + content)
        if not number % OFTEN:
            self._wait(lambda: self._read_by_all() >= number - SLOTS)
            read = min(number, self._read_by_all())
            for old in range(self._deleted + 1, read + 1):
                self._store.delete_key(f"answer/{old}")
            self._deleted = max(self._deleted, read)

    def _read_by_all(self) -> int:
        return min(self._number(f"read/{rank}") for rank in self._others)

    def gather(self, number: int, place: int) -> list[int]:
        """Wait until the other ranks have come to question ``number``; return their places."""
        self.come(number, place)
        self._wait(lambda: all(self._number(f"come/{rank}") >= number for rank in self._others))
        return [self._number(f"come/{rank}/place") for rank in self._others]

    def come(self, number: int, place: int) -> None:
        """Publish that this rank has reached a question and waits for the others there."""
        self._store.set(f"come/{self._rank}/place", str(place))
        self._store.set(f"come/{self._rank}", str(number))

    # --- the other ranks

    def take(self, number: int, place: int) -> tuple[int, Any]:
        """Return the tag and the value of answer ``number``: a number, or bytes."""
        key = f"answer/{number}"
        if not self._store.check([key]):
            self.come(number, place)
            self._wait(lambda: bool(self._store.check([key])))
        whole = bytes(self._store.get(key))
        (tag,) = _TAG.unpack_from(whole)
        if not number % OFTEN:
            self._store.set(f"read/{self._rank}", str(number))
        kind, content = tag & 0xFFFFFFFF, whole[_TAG.size :]
        if kind in (FLOAT, INT):
            return tag, (_FLOAT if kind == FLOAT else _TAG).unpack(content)[0]
        return tag, content

    # --- all ranks

    def end(self) -> None:
        """Stop asking; no rank waits for this one from now on."""
        self._store.set(f"gone/{self._rank}", "")
        if self._rank:
            self._store.set(f"read/{self._rank}", str(2**62))

    def ended(self) -> list[int]:
        """Return the ranks that have come to their end."""
        return [rank for rank in self._all if self._store.check([f"gone/{rank}"])]

    def come_to(self) -> list[tuple[int, int]]:
        """Return the last question at which each rank waited for others, and its place."""
        keys = [f"come/{rank}" for rank in self._all]
        return [(self._number(key), self._number(f"{key}/place")) for key in keys]

    def _number(self, key: str) -> int:
        return int(self._store.get(key)) if self._store.check([key]) else 0
