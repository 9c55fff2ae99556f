"""The states of random number generators of torch, Python and NumPy, in plain types."""

from __future__ import annotations

import copy
import random
import sys
from array import array
from collections.abc import Callable
from typing import Any

import torch

State = tuple[str, Any]  # the kind of a generator, and its state
GENERATORS = ("torch", "python", "numpy", "numpy, old")


def of_python(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pack the state's words into a tensor: as Python ints they take eight times the memory."""
    version, words, gauss = state
    return version, torch.frombuffer(array("q", words), dtype=torch.int64), gauss


def to_python(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the state that `of_python` has packed."""
    version, words, gauss = state
    return version, tuple(words.tolist()), gauss


def generator_state(value: Any) -> State | None:
    """Return a generator's kind and state; None for anything else, and for the system's own."""
    if isinstance(value, torch.Generator):
        return "torch", value.get_state()
    if isinstance(value, random.Random):
        if isinstance(value, random.SystemRandom):
            return None
        return "python", of_python(value.getstate())
    numpy = sys.modules.get("numpy.random")
    if numpy and isinstance(value, numpy.Generator):
        return "numpy", copy.deepcopy(value.bit_generator.state)
    if numpy and isinstance(value, numpy.RandomState):
        return "numpy, old", value.get_state()
    return None


def set_generator(generator: Any, state: State) -> None:
    """Restore the result of `generator_state`."""
    _PUT[state[0]](generator, state[1])


_PUT: dict[str, Callable[[Any, Any], Any]] = {
    "torch": lambda generator, state: generator.set_state(state),
    "python": lambda generator, state: generator.setstate(to_python(state)),
    "numpy": lambda generator, state: setattr(generator.bit_generator, "state", state),
    "numpy, old": lambda generator, state: generator.set_state(state),
}
