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
from fasttrain.shim.data_parallel.random_streams import RandomStreams
from fasttrain.shim.process.import_hook import after_import


class RandomStates:
    """Those of torch, NumPy and Python, and the streams of a rank where there are several."""

    def __init__(self, streams: RandomStreams | None) -> None:
        self._streams = streams

    def capture(self) -> dict[str, Any]:
        """Give all states."""
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
        """Return whether there are streams of several ranks."""
        return self._streams is not None

    def of_order(self) -> AbstractContextManager[Any]:
        """Draw inside from what all ranks draw the order of batches from."""
        return self._streams.shared() if self._streams else nullcontext()

    def restore(self, states: dict[str, Any]) -> None:
        """Put them back; NumPy's as soon as it is imported."""
        torch.set_rng_state(states["torch"])
        for kind, of_devices in states["accelerator"].items():
            getattr(torch, kind).set_rng_state_all(of_devices)
        random.setstate(to_python(states["python"]))
        if states["numpy"] is not None:
            after_import("numpy.random", lambda module: module.set_state(states["numpy"]))
        if self._streams and states["streams"] is not None:
            self._streams.restore(states["streams"])


def _accelerators() -> Iterator[tuple[str, Any]]:
    """Give torch's modules of the accelerators that are in use; all have the same functions."""
    for kind in LIKE_CUDA:
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            yield kind, module


def same(states: dict[str, Any], others: dict[str, Any]) -> bool:
    """Return whether nothing was drawn between two captures."""
    names = ("torch", "accelerator", "python", "numpy")
    return all(alike(states[name], others[name]) for name in names)


def alike(one: Any, other: Any) -> bool:
    """Return whether two states, or containers of them, are the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool((one == other).all() if hasattr(one, "all") else one == other)


def of_python(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give it with its words in a tensor: 625 of Python's numbers take eight times the memory."""
    version, words, gauss = state
    return version, torch.frombuffer(array("q", words), dtype=torch.int64), gauss


def to_python(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what `of_python` was given."""
    version, words, gauss = state
    return version, tuple(words.tolist()), gauss
