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
from collections.abc import Sequence
from typing import Any

import torch

from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.process.import_hook import after_import

# Generators of random numbers, each with a second stream that can take the place of the first.


TRIES = 8  # batches after which a generator that was never drawn from is left out


class Generator(ABC):
    """One generator, and the state of its other stream."""

    def __init__(self) -> None:
        self._own: Any = None
        self._shared: Any = None
        self._tries = 0
        self._used = False

    @property
    def streams(self) -> tuple[Any, ...]:
        """What is kept of its streams."""
        return self._own, self._shared, self._tries, self._used

    @streams.setter
    def streams(self, kept: tuple[Any, ...]) -> None:
        self._own, self._shared, self._tries, self._used = kept

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
        """Return a state that `encoded` gave as `set` takes it."""

    def swap(self, rank: int, *, always: bool = False) -> bool:
        """Go to the rank's own stream, which begins at the first time.

        Args:
            rank: The rank.
            always: Not to leave out one that was never drawn from, which saves its swapping.
        """
        unused = not (always or self._used) and self._tries >= TRIES
        if unused or self._shared is not None:  # or inside of another block that swaps it
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


class _Torch(Generator):
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


class _Python(Generator):
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


class _NumPy(Generator):
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


def on_cpu() -> list[Generator]:
    """Give torch's generator on the CPU, and those of Python and NumPy."""
    return [_Torch(), _Python(), _NumPy()]


def on_accelerator(device: torch.device) -> Generator:
    """Give torch's generator on a GPU or an NPU."""
    return _Accelerator(device)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple):
        return all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)


class RandomStreams:
    """The generators of one rank."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._generators = on_cpu()
        self._diverged: list[Generator] = []  # of which the script itself has the rank's own
        self._accelerators: dict[torch.device, Generator] = {}
        self._for_samples = _Apart(self._generators, ranks.rank)
        self._for_forward: dict[torch.device | None, _Apart] = {}
        self._shared = _Together((), ranks.rank)

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

    def for_samples(self) -> _Apart:
        """Draw from the rank's own stream in all generators, while its samples are read."""
        return self._for_samples

    def for_forward(self, device: torch.device | None) -> _Apart:
        """Draw from the rank's own stream on the CPU and the device, while the model is called."""
        found = self._for_forward.get(device)
        if found is None:
            found = _Apart(self._of(device), self._ranks.rank, always=True)
            self._for_forward[device] = found
        return found

    def _of(self, device: torch.device | None) -> list[Generator]:
        """Return what a model on a device may draw from, unless the script has its own of it."""
        generators = [self._generators[0]]
        if device is not None and device.type != "cpu":
            if device not in self._accelerators:
                self._accelerators[device] = on_accelerator(device)
            generators.append(self._accelerators[device])
        return [g for g in generators if g not in self._diverged]

    def shared(self) -> _Together:
        """Draw from the shared stream, also where the script has its own."""
        return self._shared

    def diverge(self) -> None:
        """Let the script itself draw from the rank's own stream from now on."""
        self._diverged = [*self._generators, *self._accelerators.values()]
        rank = self._ranks.rank
        for generator in self._diverged:
            generator.swap(rank, always=True)
        self._leave_diverged()

    def _leave_diverged(self) -> None:
        """Swap from now on only what the script itself does not draw from its own stream."""
        rank = self._ranks.rank
        shared = [g for g in self._generators if g not in self._diverged]
        self._for_samples = _Apart(shared, rank)
        self._for_forward.clear()
        self._shared = _Together(self._diverged, rank)

    def state(self) -> dict[str, Any]:
        """Give what is kept of both streams, beside the generators' own states."""
        generators = [*self._generators, *self._accelerators.values()]
        return {
            "streams": [generator.streams for generator in generators],
            "accelerators": [str(device) for device in self._accelerators],
            "diverged": [generators.index(generator) for generator in self._diverged],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        devices = map(torch.device, state["accelerators"])
        self._accelerators = {device: on_accelerator(device) for device in devices}
        generators = [*self._generators, *self._accelerators.values()]
        for generator, streams in zip(generators, state["streams"], strict=True):
            generator.streams = streams
        self._diverged = [generators[index] for index in state["diverged"]]
        self._leave_diverged()


class _Apart:
    """Draws from the rank's own stream inside of a block; made once, because it is entered often.

    Args:
        generators: Those to be swapped.
        rank: The rank.
        always: Not to leave out those that were never drawn from.
    """

    def __init__(self, generators: Sequence[Generator], rank: int, *, always: bool = False):
        self._generators, self._rank, self._always = generators, rank, always
        self._depth = 0  # a dataset may read another one
        self._swapped: list[Generator] = []

    def __enter__(self) -> None:
        if not self._depth:
            self._swapped = [g for g in self._generators if g.swap(self._rank, always=self._always)]
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            for generator in self._swapped:
                generator.swap_back()


class _Together:
    """Draws from the shared stream inside of a block, where the script has its own outside."""

    def __init__(self, diverged: Sequence[Generator], rank: int) -> None:
        self._diverged, self._rank = diverged, rank

    def __enter__(self) -> None:
        for generator in self._diverged:
            generator.swap_back()

    def __exit__(self, *_: object) -> None:
        for generator in self._diverged:
            generator.swap(self._rank, always=True)
