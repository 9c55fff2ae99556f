"""The answers of rank 0 by the ranks' store, where they are on several nodes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from fasttrain.shim.data_parallel.answers.channels import FLOAT, INT, SLOTS

OFTEN = 64  # answers after which a rank says how far it has read
_TAG = struct.Struct("<q")
_FLOAT = struct.Struct("<d")


class StoredAnswers:
    """Passes answers from rank 0 to the other ranks, as `Ring` does.

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
        self._deleted = 0  # answers that all have read

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
        """Ask no more, and have nobody wait for this rank."""
        self._store.set(f"gone/{self._rank}", "")
        if self._rank:
            self._store.set(f"read/{self._rank}", str(2**62))

    def ended(self) -> list[int]:
        """Return the ranks that have come to their end."""
        return [rank for rank in self._all if self._store.check([f"gone/{rank}"])]

    def come_to(self) -> list[tuple[int, int]]:
        """Return the last question to which each rank came and waited for others, and its place."""
        keys = [f"come/{rank}" for rank in self._all]
        return [(self._number(key), self._number(f"{key}/place")) for key in keys]

    def _number(self, key: str) -> int:
        return int(self._store.get(key)) if self._store.check([key]) else 0
