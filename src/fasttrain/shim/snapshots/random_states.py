"""The states of all random number generators that a training loop draws from."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fasttrain.model.vendors import LIKE_CUDA
from fasttrain.shim.data_parallel.random_streams import RandomStreams, alike
from fasttrain.shim.process.import_hook import after_import


class RandomStates:
    """The states of torch, NumPy and Python, and a rank's streams if there are several ranks."""

    def __init__(self, streams: RandomStreams | None) -> None:
        self._streams = streams

    def capture(self) -> dict[str, Any]:
        """Return all states."""
        numpy = sys.modules.get("numpy.random")
        return {
            "torch": torch.get_rng_state(),
            "accelerator": {kind: module.get_rng_state_all() for kind, module in _accelerators()},
            "python": of_python(random.getstate()),
            "numpy": numpy.get_state() if numpy else None,
            "streams": self._streams.state() if self._streams else None,
        }

    @property
    def of_several(self) -> bool:
        """True if there are several ranks, each with its own streams."""
        return self._streams is not None

    def of_order(self) -> AbstractContextManager[Any]:
        """Return a context in which random numbers come from the stream that all ranks share."""
        return self._streams.shared() if self._streams else nullcontext()

    def restore(self, states: dict[str, Any]) -> None:
        """Restore all states; NumPy's as soon as it is imported."""
        torch.set_rng_state(states["torch"])
        for kind, of_devices in states["accelerator"].items():
            getattr(torch, kind).set_rng_state_all(of_devices)
        random.setstate(to_python(states["python"]))
        if states["numpy"] is not None:
            after_import("numpy.random", lambda module: module.set_state(states["numpy"]))
        if self._streams and states["streams"] is not None:
            self._streams.restore(states["streams"])


def _accelerators() -> Iterator[tuple[str, Any]]:
    """Yield torch's modules of the accelerators in use, which all have the same functions."""
    for kind in LIKE_CUDA:
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            yield kind, module


def same(states: dict[str, Any], others: dict[str, Any]) -> bool:
    """True if nothing was drawn between two captures."""
    names = ("torch", "accelerator", "python", "numpy")
    return all(alike(states[name], others[name]) for name in names)


def of_python(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pack the state's words into a tensor: as Python ints they take eight times the memory."""
    version, words, gauss = state
    return version, torch.frombuffer(array("q", words), dtype=torch.int64), gauss


def to_python(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the state that `of_python` has packed."""
    version, words, gauss = state
    return version, tuple(words.tolist()), gauss
