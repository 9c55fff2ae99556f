"""Returns equal bytes on all ranks where the script draws from the operating system's randomness.

Rank 0 draws a secret once and sends it to the others. The result of the k-th call is derived from
it: equal on all ranks, and different in each run.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import secrets
import sys
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch

from fasttrain.model.vendors import LIKE_CUDA
from fasttrain.shim.data_parallel.answers.clocks import replace_in_users_modules
from fasttrain.shim.data_parallel.answers.places import asking, is_handing_on
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks import patching
from fasttrain.shim.process.import_hook import after_import

SECRET_BYTES = 32
_STATE_BYTES = 2496  # of random.Random. Source: CPython's Modules/_randommodule.c, N words
_UUID_TICKS = 0x01B21DD213814000  # 100 ns each, from 1582 to 1970. Source: CPython's uuid.py
# These draw names of files, semaphores and sockets, which must differ between ranks.
_NAMING = ("/tempfile.py", "/multiprocessing/", "/concurrent/", "/asyncio/", "/socket.py")


class Seeds:
    """Replaces the functions that read random numbers from the operating system.

    Args:
        ranks: All ranks.

    Attributes:
        live: True if all ranks draw the same.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.live = False
        self._ranks = ranks
        self._secret = b""
        self._drawn: Counter[tuple[str, str]] = Counter()  # by thread and line
        self._family: tuple[int, ...] = ()  # path of fork numbers from the rank to this process
        self._forks = 0

    def install(self, undo: ExitStack) -> None:
        """Get the secret from rank 0, and replace the functions that draw."""
        store, key = self._ranks.store, "secret"
        if self._ranks.rank == 0:
            store.set(key, secrets.token_hex(SECRET_BYTES))
        with self._ranks.waits():
            self._secret = bytes.fromhex(store.get(key).decode())
        self.live = True
        undo.callback(self.close)
        _follow_forks(self)
        self._install_bytes(undo)
        self._install_python(undo)
        self._install_torch(undo)
        undo.callback(after_import("numpy.random.bit_generator", self._numpy(undo)))

    def close(self) -> None:
        """Have each rank draw for itself from now on."""
        self.live = False

    def draw(self, size: int) -> bytes:
        """Return the next bytes for the line that is running, equal on all ranks.

        Draws are counted per line. So a library that draws on one rank alone, such as to write a
        cache for all, doesn't shift what other lines get.
        """
        frame = _drawing(sys._getframe(1))
        line = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
        thread = threading.current_thread().name  # numbered by Python, alike on all ranks
        self._drawn[thread, line] += 1
        whole = hashlib.shake_256(self._secret)
        whole.update(repr((self._family, thread, line, self._drawn[thread, line])).encode())
        return whole.digest(size)

    def _number(self, bits: int) -> int:
        return int.from_bytes(self.draw((bits + 7) // 8), "big") >> (-bits % 8)

    # --- bytes, UUIDs

    def _install_bytes(self, undo: ExitStack) -> None:
        """Replace what the user's code draws; libraries mostly want names that are unique."""
        original, uuid1 = os.urandom, uuid.uuid1

        @functools.wraps(original)
        def urandom(size: int, /) -> bytes:
            if self.live and type(size) is int and size >= 0 and asking(sys._getframe(1)):
                return self.draw(size)
            return original(size)

        @functools.wraps(uuid1)
        def shared_uuid1(node: int | None = None, clock_seq: int | None = None) -> uuid.UUID:
            if not self.live or asking(sys._getframe(1)) is None:
                return uuid1(node, clock_seq)
            return self._uuid1(node, clock_seq)

        patching.put(os, "urandom", urandom, undo)
        patching.put(random, "_urandom", urandom, undo)
        patching.put(uuid, "uuid1", shared_uuid1, undo)
        replaced = {id(original): urandom, id(uuid1): shared_uuid1}
        replace_in_users_modules(replaced, undo)

    def _uuid1(self, node: int | None, clock_seq: int | None) -> uuid.UUID:
        """Return a UUID with a random time, since rank 0's time isn't known here."""
        ticks = _UUID_TICKS + self._number(55)
        node = self._number(48) | 1 << 40 if node is None else node  # multicast: no network card
        sequence = self._number(14) if clock_seq is None else clock_seq & 0x3FFF
        low, middle, high = ticks & 0xFFFFFFFF, ticks >> 32 & 0xFFFF, ticks >> 48 & 0x0FFF
        fields = (low, middle, high, sequence >> 8, sequence & 0xFF, node)
        return uuid.UUID(fields=fields, version=1)

    # --- generators

    def _install_python(self, undo: ExitStack) -> None:
        original = random.Random.seed

        @functools.wraps(original)
        def seed(generator: Any, a: Any = None, version: int = 2) -> None:
            if a is None and self.live and not _is_naming(sys._getframe(1)):
                a, version = int.from_bytes(self.draw(_STATE_BYTES), "big"), 2
            original(generator, a, version)

        before = random.seed
        patching.put(random.Random, "seed", seed, undo)
        new = random._inst.seed
        patching.put(random, "seed", new, undo)
        replace_in_users_modules({id(before): new}, undo)

    def _numpy(self, undo: ExitStack) -> Callable[[Any], None]:
        """Return a hook that replaces the source of entropy of NumPy's `SeedSequence`."""

        def replace(module: Any) -> None:
            original = module.randbits

            def randbits(bits: int) -> int:
                return self._number(bits) if self.live else int(original(bits))

            patching.put(module, "randbits", randbits, undo)

        return replace

    def _install_torch(self, undo: ExitStack) -> None:
        original = torch.seed

        @functools.wraps(original)
        def seed() -> int:
            if not self.live:
                return original()
            number = self._number(64)
            torch.manual_seed(number)
            return number

        for module in (torch, torch.random):
            patching.put(module, "seed", seed, undo)
        replace_in_users_modules({id(original): seed}, undo)
        generator: Any = torch.Generator
        of_generator = generator.seed

        def seed_generator(own: Any) -> int:
            if not self.live:
                return int(of_generator(own))
            number = self._number(64)
            own.manual_seed(number)
            return number

        patching.put(generator, "seed", seed_generator, undo)
        for name in LIKE_CUDA:
            self._accelerator(getattr(torch, name, None), undo)

    def _accelerator(self, module: Any, undo: ExitStack) -> None:
        for name, seeded in (("seed", "manual_seed"), ("seed_all", "manual_seed_all")):
            original = getattr(module, name, None)
            if original is not None:
                put: Any = functools.partial(self._seed_device, original, getattr(module, seeded))
                patching.put(module, name, functools.wraps(original)(put), undo)

    def _seed_device(self, original: Callable[[], None], seeded: Callable[[int], None]) -> None:
        if self.live:
            seeded(self._number(64))
        else:
            original()

    # --- children

    def fork(self) -> None:
        """Count a forked child."""
        self._forks += 1

    def forget_fork(self) -> None:
        """Count the last forked child no more: the other ranks have none like it."""
        self._forks -= 1

    def begin_in_child(self) -> None:
        """Have a forked child draw other bytes than its parent and siblings."""
        self._family = (*self._family, self._forks)
        self._forks = 0
        self._drawn.clear()


_FORKING: weakref.WeakSet[Seeds] = weakref.WeakSet()


def _follow_forks(seeds: Seeds) -> None:
    if not _FORKING:
        os.register_at_fork(
            before=lambda: _each(Seeds.fork), after_in_child=lambda: _each(Seeds.begin_in_child)
        )
    _FORKING.add(seeds)


def forget_fork() -> None:
    """Have the children of this rank still be numbered as those of ranks that didn't fork."""
    _each(Seeds.forget_fork)


def _each(act: Callable[[Seeds], None]) -> None:
    for seeds in _FORKING:
        act(seeds)


def _drawing(frame: FrameType | None) -> FrameType | None:
    """Return the frame that draws, past frames that only forward what is drawn."""
    while frame is not None and is_handing_on(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_naming(frame: FrameType | None) -> bool:
    frame = _drawing(frame)
    return frame is not None and any(name in frame.f_code.co_filename for name in _NAMING)
