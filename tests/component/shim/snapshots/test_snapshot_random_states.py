"""The states of all generators: put back as they were, and compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fasttrain.shim.data_parallel.context import LeverState
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.snapshots.files import packed, unpacked
from fasttrain.shim.snapshots.object_states import RandomStates, same
from fasttrain.shim.snapshots.writer import LoopState


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


def test_accelerators_begin_again_with_the_seed_that_they_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's generators have a seed by chance in each process; a replay draws from them again."""
    given: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", given.append)

    def loop() -> LoopState:
        return LoopState(0, RootCalls(), LeverState())

    before = loop()
    torch.default_generator.manual_seed(5)
    before.begin()
    with ExitStack() as undo:
        before.registry.install(undo)
        own = before._own()
    found: Any = SimpleNamespace(read=lambda _: own, path=Path("snapshot"))
    torch.default_generator.manual_seed(6)
    with ExitStack() as undo:
        loop().begin_again(found, undo)
    assert given == [5, 5]
