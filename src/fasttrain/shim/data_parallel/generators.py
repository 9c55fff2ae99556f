"""Generators of random numbers, each with a second stream that can take the place of the first."""

from __future__ import annotations

import hashlib
import random
import sys
from abc import ABC, abstractmethod
from typing import Any

import torch

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
        """Give a state that `encoded` gave as `set` takes it."""

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
