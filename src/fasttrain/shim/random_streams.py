"""Keeps apart the random numbers that all ranks share and those of each rank's own.

Initial weights and the order of the data must agree, so the ranks draw them from one stream, the
generators as the script seeded them. What follows from a rank's own samples must differ: dropout
and augmentations come from a second stream, which is swapped in around them. How much is drawn
there depends on the samples, and must not move the shared stream.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fasttrain.shim.import_hook import after_import
from fasttrain.shim.ranks import Ranks

TRIES = 8  # batches after which a generator that was never drawn from is left out


class RandomStreams:
    """The generators of one rank."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._generators: list[_Generator] = [_Torch(), _Python(), _NumPy()]
        self._diverged: list[_Generator] = []  # of which the script itself has the rank's own
        self._last: Any = None
        self._accelerators: dict[torch.device, _Accelerator] = {}

    def agree(self) -> None:
        """Take over the state that rank 0's generators have.

        A script that seeds itself has it already, and nothing changes.
        """
        ranks, key = self._ranks, "random-state"
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random")  # which it imports at its first use only
        else:
            after_import("numpy.random", self._seed_numpy)
        if ranks.rank == 0:
            ranks.store.set(key, json.dumps([g.encoded() for g in self._generators]))
            return
        states = json.loads(ranks.store.get(key))
        for generator, state in zip(self._generators, states, strict=True):
            if state is not None and generator.get() is not None:
                generator.set(generator.decoded(state))

    def _seed_numpy(self, module: Any) -> None:
        """Seed a generator that is imported only now, and not yet seeded by the script."""
        state = torch.default_generator.initial_seed()
        module.seed(state % 2**32)

    @contextmanager
    def for_samples(self) -> Iterator[None]:
        """Draw from the rank's own stream in all generators, while its samples are read."""
        with self._swapped([g for g in self._generators if g not in self._diverged]):
            yield

    @contextmanager
    def for_forward(self, device: torch.device | None) -> Iterator[None]:
        """Draw from the rank's own stream on the CPU and the device, while the model is called."""
        generators = [self._generators[0]]
        if device is not None and device.type != "cpu":
            if device not in self._accelerators:
                self._accelerators[device] = _Accelerator(device)
            generators.append(self._accelerators[device])
        with self._swapped([g for g in generators if g not in self._diverged], always=True):
            yield

    @contextmanager
    def _swapped(self, generators: list[_Generator], *, always: bool = False) -> Iterator[None]:
        swapped = [g for g in generators if g.swap(self._ranks.rank, always=always)]
        try:
            yield
        finally:
            for generator in swapped:
                generator.swap_back()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Draw from the shared stream, also where the script has its own."""
        for generator in self._diverged:
            generator.swap_back()
        try:
            yield
        finally:
            for generator in self._diverged:
                generator.swap(self._ranks.rank, always=True)

    def moved(self) -> bool:
        """Whether the script itself has drawn from torch's generator since this was last asked."""
        state, before = self._generators[0].get(), self._last
        self._last = state
        return not self._diverged and before is not None and not torch.equal(state, before)

    def diverge(self, *, torch_alone: bool = False) -> None:
        """Let the script itself draw from the rank's own stream from now on.

        Args:
            torch_alone: Whether other generators go on to be shared, which decide on the way that
                a loop takes more often than they make tensors.
        """
        others = [] if torch_alone else self._generators[1:]
        self._diverged = [self._generators[0], *others, *self._accelerators.values()]
        for generator in self._diverged:
            generator.swap(self._ranks.rank, always=True)


class _Generator(ABC):
    """One generator, and the state of its other stream."""

    def __init__(self) -> None:
        self._own: Any = None
        self._shared: Any = None
        self._tries = 0
        self._used = False

    @abstractmethod
    def get(self) -> Any:
        """Give its state; None where there is no such generator."""

    @abstractmethod
    def set(self, state: Any) -> None:
        """Put it into a state."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Start it anew."""

    @abstractmethod
    def encoded(self) -> Any:
        """Give its state as JSON has it."""

    @abstractmethod
    def decoded(self, state: Any) -> Any:
        """Give a state that `encoded` gave as `set` takes it."""

    def swap(self, rank: int, *, always: bool = False) -> bool:
        """Go to the rank's own stream, which begins at the first time.

        Args:
            rank: The rank.
            always: Not to leave out one that was never drawn from, which saves its swapping.
        """
        if not (always or self._used) and self._tries >= TRIES:
            return False
        shared = self.get()
        if shared is None:
            return False
        self._shared = shared
        if self._own is None:
            digest = hashlib.sha256(f"{rank} {self.encoded()}".encode()).digest()
            self.seed(int.from_bytes(digest[:4], "big"))
            self._own = self.get()
        else:
            self.set(self._own)
        self._tries += 1
        return True

    def swap_back(self) -> None:
        """Return to the shared stream."""
        if self._shared is None:
            return
        own = self.get()
        if not self._used and self._tries <= TRIES:  # behind them nobody asks
            self._used = not _same(own, self._own)
        self._own = own
        self.set(self._shared)
        self._shared = None


class _Torch(_Generator):
    def get(self) -> Any:
        return torch.default_generator.get_state()

    def set(self, state: Any) -> None:
        torch.default_generator.set_state(state)

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def encoded(self) -> Any:
        return self.get().tolist()

    def decoded(self, state: Any) -> Any:
        return torch.tensor(state, dtype=torch.uint8)


class _Accelerator(_Torch):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        # torch.cuda, torch.npu and torch.xpu name it alike.
        self._generator: Any = getattr(torch, device.type).default_generators[device.index or 0]

    def get(self) -> Any:
        return self._generator.get_state()

    def set(self, state: Any) -> None:
        self._generator.set_state(state)

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)


class _Python(_Generator):
    def get(self) -> Any:
        return random.getstate()

    def set(self, state: Any) -> None:
        random.setstate(state)

    def seed(self, seed: int) -> None:
        random.seed(seed)

    def encoded(self) -> Any:
        return self.get()

    def decoded(self, state: Any) -> Any:
        version, words, gauss = state
        return version, tuple(words), gauss


class _NumPy(_Generator):
    """NumPy's global generator, where the script has imported it."""

    @property
    def _module(self) -> Any:
        return sys.modules.get("numpy.random")

    def get(self) -> Any:
        module = self._module
        return None if module is None else module.get_state()

    def set(self, state: Any) -> None:
        if self._module is not None:
            self._module.set_state(state)

    def seed(self, seed: int) -> None:
        self._module.seed(seed)

    def encoded(self) -> Any:
        state = self.get()
        return None if state is None else [state[0], state[1].tolist(), *state[2:]]

    def decoded(self, state: Any) -> Any:
        name, words, *rest = state
        return (name, sys.modules["numpy"].array(words, dtype="uint32"), *rest)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple):
        return all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)
