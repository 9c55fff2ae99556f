"""The states of all generators: put back as they were, and compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from fasttrain.shim.snapshots.files import packed, unpacked
from fasttrain.shim.snapshots.object_states import RandomStates, same


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), random.gauss(0, 1), np.random.rand()]


def test_all_draw_again_what_they_drew() -> None:
    states = RandomStates(None)
    random.gauss(0, 1)  # which keeps the second of a pair for later
    kept = unpacked(packed(states.capture()))
    first = draw()
    assert draw() != first
    states.restore(kept)
    assert draw() == first


@pytest.mark.parametrize("draws", [lambda: torch.rand(1), random.random, np.random.rand])
def test_a_draw_shows(draws: Callable[[], object]) -> None:
    states = RandomStates(None)
    before = states.capture()
    assert same(before, states.capture())
    draws()
    assert not same(before, states.capture())
