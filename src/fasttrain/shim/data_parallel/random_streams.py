"""Separates the random stream that all ranks share from each rank's own stream.

Initial weights and the order of the data must be equal on all ranks. They are drawn from the shared
stream: the generators as the script has seeded them. Dropout and augmentations must differ, since
each rank has its own samples. They are drawn from the rank's own stream, which is swapped in around
them: how much is drawn there depends on the samples, and must not advance the shared stream.

A script that seeds torch's generator once more, or goes back to a state of it, wants what it has
drawn from there before, dropout included: the rank's own stream follows.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from fasttrain.model.vendors import LIKE_CUDA
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks import patching
from fasttrain.shim.process.import_hook import after_import

TRIES = 8  # batches after which a generator that was never drawn from is swapped no more
READ = 16  # states that the script has read last, to which it may go back


class Generator(ABC):
    """One generator, and the state of the stream that is not swapped in."""

    def __init__(self) -> None:
        self._own: Any = None
        self._seeded: Any = None
        self._shared: Any = None
        self._tries = 0
        self._used = False
        self._drew = False  # before its own stream began again
        self._read: list[tuple[Any, Any]] = []  # shared states, and those of its own stream

    @property
    def streams(self) -> tuple[Any, ...]:
        """The states of its streams, as a snapshot holds them."""
        return self._own, self._shared, self._tries, self._used, self._read

    @streams.setter
    def streams(self, kept: tuple[Any, ...]) -> None:
        self._own, self._shared, self._tries, self._used, self._read = kept

    @property
    def drew(self) -> bool:
        """True if anything was drawn from the rank's own stream."""
        return self._drew or (self._own is not None and not alike(self._own, self._seeded))

    def was_seeded(self) -> None:
        """Begin its own stream again when it is next swapped in, if the shared one is seeded."""
        self._go_on_with(None)

    def was_read(self, state: Any) -> None:
        """Keep the state of its own stream along with one of the shared stream."""
        if self._shared is None:
            self._read = [*self._read[1 - READ :], (state.clone(), self._own)]

    def was_set(self, state: Any) -> None:
        """Go back to what its own stream was when a state was read; begin it again if unknown."""
        read = (own for shared, own in reversed(self._read) if alike(shared, state))
        self._go_on_with(next(read, None))

    def _go_on_with(self, own: Any) -> None:
        self._drew = self.drew
        self._own = own  # while it is swapped in, swapping it back replaces this

    @abstractmethod
    def get(self) -> Any:
        """Return its state; None if there is no such generator."""

    @abstractmethod
    def set(self, state: Any) -> None:
        """Set its state."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed it."""

    @abstractmethod
    def encoded(self) -> Any:
        """Return its state in types that JSON has."""

    @abstractmethod
    def decoded(self, state: Any) -> Any:
        """Return an `encoded` state in the form that `set` takes."""

    def swap(self, rank: int, *, always: bool = False) -> bool:
        """Swap in the rank's own stream, which is seeded the first time; return True if done.

        Args:
            rank: The rank.
            always: Swap also if it was never drawn from, where skipping would save time.
        """
        unused = not (always or self._used) and self._tries >= TRIES
        if unused or self._shared is not None:  # or another block has swapped it
            return False
        shared = self.get()
        if shared is None:
            return False
        self._shared = shared
        if self._own is None:
            digest = hashlib.sha256(f"{rank} {self.encoded()}".encode()).digest()
            self.seed(int.from_bytes(digest[:4], "big"))
            self._own = self._seeded = self.get()
        else:
            self.set(self._own)
        self._tries += 1
        return True

    def swap_back(self) -> None:
        """Return to the shared stream."""
        if self._shared is None:
            return
        own = self.get()
        if not self._used and self._tries <= TRIES:  # not compared later
            self._used = not alike(own, self._own)
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
        return torch.tensor(state, dtype=torch.uint8, device="cpu")


class _Accelerator(_Torch):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        # torch.cuda, torch.npu and torch.xpu all call it default_generators.
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
    """NumPy's global generator, if the script has imported it."""

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
    """Return torch's generator on the CPU, and those of Python and NumPy."""
    return [_Torch(), _Python(), _NumPy()]


def on_accelerator(device: torch.device) -> Generator:
    """Return torch's generator on a GPU or an NPU."""
    return _Accelerator(device)


def seed_accelerators() -> None:
    """Seed the generators of all accelerators by the seed of torch's generator on the CPU.

    Without that each process of a script that doesn't seed itself has others: CUDA's begin with a
    seed by chance, when the device is first used. Initialises no device, as torch puts it off.

    Source: ``getDefaultCUDAGenerator`` in aten/src/ATen/cuda/CUDAGeneratorImpl.cpp.
    """
    seed = torch.default_generator.initial_seed()
    for name in LIKE_CUDA:
        seed_all = getattr(getattr(torch, name, None), "manual_seed_all", None)
        if seed_all is not None:
            seed_all(seed)


def _follow(name: str, then: Callable[..., None], undo: ExitStack) -> None:
    """Call ``then`` after a function of torch, with what it returned and its arguments."""
    original = getattr(torch, name)

    @functools.wraps(original)
    def followed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then(result, *args, *kwargs.values())
        return result

    for module in (torch, torch.random):
        patching.put(module, name, followed, undo)


def alike(one: Any, other: Any) -> bool:
    """True if two states of generators, or containers of them, are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool((one == other).all() if hasattr(one, "all") else one == other)


class RandomStreams:
    """The generators of one rank."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._generators = on_cpu()
        self._diverged: list[
            Generator
        ] = []  # those from which the script draws the rank's own stream
        self._accelerators: dict[torch.device, Generator] = {}
        self._for_samples = _Apart(self._generators, ranks.rank)
        self._for_forward: dict[torch.device | None, _Apart] = {}
        self._shared = _Together((), ranks.rank)

    def install(self, undo: ExitStack) -> None:
        """Have the rank's own stream follow when the script seeds torch, or sets its state.

        The shim itself uses the methods of ``torch.default_generator``, which aren't followed.
        """
        cpu = self._generators[0]

        def seeded(*_: object) -> None:
            for generator in (cpu, *self._accelerators.values()):
                generator.was_seeded()

        _follow("manual_seed", seeded, undo)
        _follow("get_rng_state", cpu.was_read, undo)
        _follow("set_rng_state", lambda _, state: cpu.was_set(state), undo)

    @property
    def drew(self) -> bool:
        """True if anything was drawn from the rank's own stream, such as by dropout."""
        return any(it.drew for it in (*self._generators, *self._accelerators.values()))

    def agree(self) -> None:
        """Copy the states of rank 0's generators; those of accelerators get its seed.

        This changes nothing for a script that seeds itself.
        """
        ranks, key = self._ranks, "random-state"
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random")  # NumPy imports it lazily
        else:
            after_import("numpy.random", self._seed_numpy)
        if ranks.rank == 0:
            ranks.store.set(key, json.dumps([g.encoded() for g in self._generators]))
            seed_accelerators()
            return
        states = json.loads(ranks.store.get(key))
        for generator, state in zip(self._generators, states, strict=True):
            if state is not None and generator.get() is not None:
                generator.set(generator.decoded(state))
        seed_accelerators()

    def _seed_numpy(self, module: Any) -> None:
        """Seed NumPy's generator on its late import, before the script can seed it."""
        state = torch.default_generator.initial_seed()
        module.seed(state % 2**32)

    def for_samples(self) -> _Apart:
        """Return a context for reading samples: all generators draw from the rank's own stream."""
        return self._for_samples

    def for_forward(self, device: torch.device | None) -> _Apart:
        """Return such a context for a call of the model, for the CPU and the device."""
        found = self._for_forward.get(device)
        if found is None:
            found = _Apart(self._of(device), self._ranks.rank, always=True)
            self._for_forward[device] = found
        return found

    def _of(self, device: torch.device | None) -> list[Generator]:
        """Return the generators that a model on a device may draw from, except diverged ones."""
        generators = [self._generators[0]]
        if device is not None and device.type != "cpu":
            if device not in self._accelerators:
                self._accelerators[device] = on_accelerator(device)
            generators.append(self._accelerators[device])
        return [g for g in generators if g not in self._diverged]

    def shared(self) -> _Together:
        """Return a context with the shared stream, even if the script draws from the rank's own."""
        return self._shared

    def diverge(self) -> None:
        """Have the script itself draw from the rank's own stream from now on."""
        self._diverged = [*self._generators, *self._accelerators.values()]
        rank = self._ranks.rank
        for generator in self._diverged:
            generator.swap(rank, always=True)
        self._leave_diverged()

    def _leave_diverged(self) -> None:
        """Swap only the generators that haven't diverged from now on."""
        rank = self._ranks.rank
        shared = [g for g in self._generators if g not in self._diverged]
        self._for_samples = _Apart(shared, rank)
        self._for_forward.clear()
        self._shared = _Together(self._diverged, rank)

    def state(self) -> dict[str, Any]:
        """Return the states of both streams, except the generators' present ones."""
        generators = [*self._generators, *self._accelerators.values()]
        return {
            "streams": [generator.streams for generator in generators],
            "accelerators": [str(device) for device in self._accelerators],
            "diverged": [generators.index(generator) for generator in self._diverged],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`."""
        devices = map(torch.device, state["accelerators"])
        self._accelerators = {device: on_accelerator(device) for device in devices}
        generators = [*self._generators, *self._accelerators.values()]
        for generator, streams in zip(generators, state["streams"], strict=True):
            generator.streams = streams
        self._diverged = [generators[index] for index in state["diverged"]]
        self._leave_diverged()


class _Apart:
    """Context that draws from the rank's own stream; created once, as it is entered often.

    Args:
        generators: The generators to swap.
        rank: The rank.
        always: Swap also those that were never drawn from.
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
    """Context that draws from the shared stream where the script draws from the rank's own."""

    def __init__(self, diverged: Sequence[Generator], rank: int) -> None:
        self._diverged, self._rank = diverged, rank

    def __enter__(self) -> None:
        for generator in self._diverged:
            generator.swap_back()

    def __exit__(self, *_: object) -> None:
        for generator in self._diverged:
            generator.swap(self._rank, always=True)
