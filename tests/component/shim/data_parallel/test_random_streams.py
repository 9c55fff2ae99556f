"""Shared random numbers, and those of each rank's own."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fasttrain.shim.data_parallel.random_streams import TRIES, RandomStreams

CPU = torch.device("cpu")
Device: Any = namedtuple("Device", "type index")  # torch.device knows no npu by itself


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def streams(rank: int, store: dict[str, bytes] | None = None) -> RandomStreams:
    kept = {} if store is None else store

    def put(key: str, value: str) -> None:
        kept[key] = value.encode()

    ranks: Any = SimpleNamespace(rank=rank, store=SimpleNamespace(set=put, get=kept.__getitem__))
    return RandomStreams(ranks)


def draws() -> tuple[float, float, float]:
    """Draw a number of each generator."""
    return torch.rand(()).item(), random.random(), float(np.random.random())


def test_ranks_agree_on_what_rank_0_has_and_consume_nothing() -> None:
    store: dict[str, bytes] = {}
    seed_all(1)
    expected = draws()
    seed_all(1)
    streams(0, store).agree()
    assert draws() == expected
    seed_all(2)  # as another rank was seeded by the system
    streams(1, store).agree()
    assert draws() == expected


def test_accelerators_begin_with_the_same_seed_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's generators have a seed by chance in each process; the script may draw noise there."""
    given: list[int] = []
    for module in (torch.cuda, torch.xpu):
        monkeypatch.setattr(module, "manual_seed_all", given.append)
    store: dict[str, bytes] = {}
    for rank in (0, 1):
        torch.default_generator.manual_seed(rank + 5)
        streams(rank, store).agree()
    assert given == [5] * 4


def test_samples_are_drawn_apart_and_leave_the_shared_stream_alone() -> None:
    seed_all(0)
    expected = [draws(), draws()]
    found = {}
    for rank in (0, 1):
        seed_all(0)
        mine = streams(rank)
        shared = [draws()]
        with mine.for_samples():
            own = [draws(), draws(), draws()]
        shared.append(draws())
        with mine.for_samples():
            own.append(draws())
        assert shared == expected
        found[rank] = own
    everything = [number for own in found.values() for each in own for number in each]
    assert len(set(everything)) == len(everything)  # no two ranks, and no two batches, draw alike


def test_a_rank_draws_the_same_in_every_run() -> None:
    runs = []
    for _ in range(2):
        seed_all(3)
        mine = streams(1)
        with mine.for_forward(CPU):
            first = torch.rand(4)
        with mine.for_forward(CPU):
            runs.append((first, torch.rand(4)))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(*runs[0])


def test_dropout_differs_between_ranks_however_late_it_begins() -> None:
    """A model whose dropout is only switched on after more calls than a generator is tried for."""
    masks = []
    for rank in (0, 1):
        seed_all(0)
        mine = streams(rank)
        for _ in range(TRIES + 2):
            with mine.for_forward(CPU):
                pass
        with mine.for_forward(CPU):
            masks.append(torch.rand(8))
    assert not torch.equal(*masks)


@pytest.fixture
def following() -> Iterator[RandomStreams]:
    """Streams of a rank that follow what the script does with torch's generator."""
    torch.manual_seed(3)
    with ExitStack() as undo:
        mine = streams(1)
        mine.install(undo)
        yield mine


def mask(mine: RandomStreams) -> list[float]:
    """Draw as a model does, and then as the loop around it."""
    with mine.for_forward(CPU):
        own = torch.rand(()).item()
    return [own, torch.rand(()).item()]


def test_a_script_that_seeds_again_draws_the_same_again(following: RandomStreams) -> None:
    first = [mask(following), mask(following)]
    torch.manual_seed(seed=3)
    assert following.drew
    assert [mask(following), mask(following)] == first
    torch.random.manual_seed(4)
    assert mask(following)[0] != first[0][0]


@pytest.mark.parametrize("used", [True, False], ids=["after-some-calls", "before-the-first"])
def test_a_script_that_restores_a_state_goes_on_as_from_there(
    following: RandomStreams, used: bool
) -> None:
    """As one does that resumes from its own checkpoint, in the same process."""
    if used:
        mask(following)
    kept = torch.get_rng_state()
    after = [mask(following), mask(following)]
    torch.set_rng_state(kept.clone())
    assert [mask(following), mask(following)] == after


def test_what_is_drawn_under_fork_rng_is_forgotten(following: RandomStreams) -> None:
    start = torch.get_rng_state()
    without = [mask(following), mask(following)]
    torch.set_rng_state(start)
    found = [mask(following)]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(7)
        mask(following)
    assert [*found, mask(following)] == without


def test_a_model_that_sets_the_state_itself_leaves_the_loops_alone(
    following: RandomStreams,
) -> None:
    before = mask(following)
    with following.for_forward(CPU):  # as torch's checkpoint does
        kept = torch.get_rng_state()
        one = torch.rand(())
        torch.set_rng_state(kept)
        assert torch.equal(torch.rand(()), one)
        torch.manual_seed(5)
    following_loop = torch.rand(()).item()
    torch.manual_seed(3)
    assert mask(following) == before
    assert torch.rand(()).item() == following_loop


def test_a_later_process_goes_back_to_a_state_that_was_read(following: RandomStreams) -> None:
    mask(following)
    kept = torch.get_rng_state()
    after = mask(following)
    snapshot = following.state()
    following.restore(streams(1).state())
    following.restore(snapshot)
    torch.set_rng_state(kept)
    assert mask(following) == after


def test_only_torchs_generator_is_swapped_around_a_forward() -> None:
    seed_all(0)
    expected = draws()[1:]
    seed_all(0)
    with streams(1).for_forward(CPU):
        found = draws()[1:]
    assert found == expected


def test_a_generator_that_no_batch_draws_from_is_left_alone_in_the_end() -> None:
    mine = streams(1)
    for _ in range(TRIES):
        with mine.for_samples():
            pass
    before = random.getstate()
    with mine.for_samples():
        assert random.getstate() == before
    with mine.for_samples():
        random.random()  # too late to be told apart, which is the price
    assert random.getstate() != before


def test_ranks_that_diverge_draw_apart_and_can_still_share() -> None:
    drawn, shared = [], []
    for rank in (0, 1):
        seed_all(0)
        mine = streams(rank)
        mine.diverge()
        drawn.append(draws())
        with mine.shared():
            shared.append(torch.rand(3))
    assert all(one != other for one, other in zip(*drawn, strict=True))
    assert torch.equal(*shared)


def test_an_error_in_a_forward_brings_the_shared_stream_back() -> None:
    seed_all(0)
    expected = draws()
    seed_all(0)
    with pytest.raises(ZeroDivisionError), streams(1).for_forward(CPU):
        int(torch.rand(5).sum()) / 0
    assert draws() == expected


@pytest.mark.parametrize("kind", ["cuda", "npu", "xpu"])
def test_models_on_a_device_draw_from_the_ranks_own_stream_there(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of a device with a generator of its own, here two of the CPU's."""
    drawn = []
    for rank in (0, 1):
        generators = [torch.Generator().manual_seed(7) for _ in range(2)]
        module = SimpleNamespace(default_generators=generators)
        monkeypatch.setattr(torch, kind, module, raising=False)
        with streams(rank).for_forward(Device(kind, 1)):
            inside = torch.rand((), generator=generators[1]).item()
        drawn.append((inside, torch.rand((), generator=generators[1]).item()))
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] == drawn[1][1]


def test_a_later_process_goes_on_with_both_streams() -> None:
    """Those that are shared, and the rank's own, also where the script has its own itself."""
    seed_all(3)
    first = streams(1)
    for _ in range(3):
        with first.for_samples(), first.for_forward(CPU):
            torch.rand(2), random.random(), np.random.rand()
    first.diverge()
    kept, now = first.state(), (torch.get_rng_state(), random.getstate(), np.random.get_state())

    def draw(of: RandomStreams) -> list[Any]:
        drawn = [torch.rand(()).item()]
        with of.for_samples():
            drawn += [torch.rand(()).item(), random.random(), np.random.rand()]
        with of.shared():
            drawn.append(torch.rand(()).item())
        return [*drawn, random.random()]

    wanted = draw(first)
    seed_all(8)
    second = streams(1)
    second.restore(kept)
    torch.set_rng_state(now[0])
    random.setstate(now[1])
    np.random.set_state(now[2])
    assert draw(second) == wanted
