"""Batches that are moved by rows: the same numbers, and the whole only where something needs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttrain.shim.data_parallel.split import lazy_rows, row_operators
from fasttrain.shim.data_parallel.split.lazy_rows import PATIENCE, LazyRows, Moves, linked
from fasttrain.shim.data_parallel.split.rows import Rows
from fasttrain.shim.hooks.dynamo import UserCompile
from support.fake_ranks import on_ranks

RANKS = 2


@pytest.fixture(autouse=True)
def a_device_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take copies in fp64 for copies on a device."""
    monkeypatch.setattr(row_operators, "LARGE", 4)
    monkeypatch.setattr(lazy_rows, "leaves_host", lambda tensor: tensor.dtype == torch.float64)


def to_device(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64)


def mover(rank: Any, met: list[int] | None = None) -> Callable[..., Tensor]:
    found = Moves(rank, UserCompile(), lambda: (met or []).append(1), Counter())
    return lambda tensor, move=to_device: found.move(tensor, move, "here")


def test_a_rank_moves_its_rows_and_a_split_call_takes_them() -> None:
    batch = torch.arange(10.0).view(5, 2)

    def act(rank: Any) -> Any:
        moved: list[tuple[int, ...]] = []

        def to(tensor: Tensor) -> Tensor:
            moved.append(tuple(tensor.shape))
            return to_device(tensor)

        there = mover(rank)(batch, to)
        assert (there.shape, there.dtype) == (batch.shape, torch.float64)
        assert type(there) is LazyRows
        own = Rows(rank, 5).take(there, 0)
        return moved, own.tolist(), there.part is None

    first, second = on_ranks(RANKS, act)
    assert first == ([(0, 2), (3, 2)], [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], False)
    assert second == ([(0, 2), (2, 2)], [[6.0, 7.0], [8.0, 9.0]], False)


@pytest.mark.parametrize("size", [4, 5])
def test_whatever_else_uses_it_gets_the_batch_as_it_was_when_it_was_moved(size: int) -> None:
    def act(rank: Any) -> Any:
        batch = torch.arange(2.0 * size).view(size, 2)
        there = mover(rank)(batch)
        batch.zero_()  # such as the next one, in the same memory
        return linked(there.flip(0))

    expected = torch.arange(2.0 * size, dtype=torch.float64).view(size, 2).flip(0)
    for found in on_ranks(RANKS, act):
        assert found.equal(expected)


class OnStreams(Tensor):
    """Rows on a device, whose memory knows the streams that use it."""

    device = torch.device("cuda", 0)

    def record_stream(self, stream: Any) -> None:
        vars(self).setdefault("streams", []).append(stream)


def test_a_stream_that_will_use_a_batch_is_recorded_on_the_rows(monkeypatch: Any) -> None:
    """As by a script that copies its batches on a stream of its own."""
    operator = torch.ops.aten.record_stream.default
    recorded: list[Any] = []

    def record(part: Tensor, stream: Any) -> None:
        recorded.append((tuple(part.shape), stream))

    def act(rank: Any) -> Any:
        there: Any = mover(rank)(torch.ones(4, 2))
        row_operators.RULES[operator](record, (there, "main"), {})
        gathered = there.part is None
        there.whole()
        left = row_operators.RULES[operator](record, (there, "main"), {})
        return gathered, left is NotImplemented

    assert on_ranks(RANKS, act) == [(False, True)] * RANKS
    assert recorded == [((2, 2), "main")] * RANKS


def test_rows_are_free_again_once_the_stream_that_gathers_them_is_done(monkeypatch: Any) -> None:
    """The memory is that of the stream on which the script copies its batches."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("present", device.index))

    def act(rank: Any) -> Any:
        there: Any = mover(rank)(torch.arange(8.0).view(4, 2))
        there._part = part = there.part.as_subclass(OnStreams)
        assert there.whole().tolist() == torch.arange(8.0).view(4, 2).tolist()
        return vars(part)["streams"]

    assert on_ranks(RANKS, act) == [[("present", 0)]] * RANKS


def test_a_place_whose_batches_are_mostly_needed_whole_is_given_up() -> None:
    batch = torch.ones(4, 2)

    def act(rank: Any) -> Any:
        met: list[int] = [0]
        move = mover(rank, met)
        kinds = []
        for _ in range(PATIENCE + 2):
            there = move(batch)
            kinds.append(type(there))
            linked(there)
        return kinds, len(met) - 1

    expected = [LazyRows] * PATIENCE + [Tensor] * 2
    assert on_ranks(RANKS, act) == [(expected, PATIENCE)] * RANKS


def test_a_place_whose_batches_are_whole_now_and_then_is_kept() -> None:
    batch = torch.ones(4, 2)

    def act(rank: Any) -> Any:
        move = mover(rank)
        kinds = set()
        for number in range(1, 40):
            there = move(batch)
            kinds.add(type(there))
            if not number & (number - 1):  # as calls are verified
                linked(there)
        return kinds

    assert on_ranks(RANKS, act) == [{LazyRows}] * RANKS


WHOLE: dict[str, Callable[[], Tensor]] = {
    "fewer rows than ranks": lambda: torch.ones(1, 8),
    "other strides": lambda: torch.ones(4, 6).t(),
    "trained": lambda: torch.ones(4, 2).requires_grad_(),
    "complex": lambda: torch.ones(4, 2, dtype=torch.complex64),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "no rows": lambda: torch.tensor(3.0),
}


@pytest.mark.parametrize("name", WHOLE)
def test_others_are_moved_whole(name: str) -> None:
    batch = WHOLE[name]()
    own = (lambda t: t.to(torch.complex128)) if batch.is_complex() else to_device

    def act(rank: Any) -> Any:
        return type(mover(rank)(batch, own))

    assert on_ranks(RANKS, act) == [Tensor] * RANKS


def test_what_stays_on_the_host_is_whole() -> None:
    batch = torch.ones(4, 2, dtype=torch.float64)
    act = lambda rank: type(mover(rank)(batch, lambda t: t.to(torch.float32)))  # noqa: E731
    assert on_ranks(RANKS, act) == [Tensor] * RANKS


def test_before_the_ranks_meet_and_beside_compiled_functions_it_is_whole() -> None:
    batch = torch.ones(4, 2)

    def act(rank: Any) -> Any:
        compiled = UserCompile()
        found = Moves(rank, compiled, lambda: None, Counter())
        kinds = [type(found.move(batch, to_device, "here"))]
        compiled.functions = True
        kinds.append(type(found.move(batch, to_device, "here")))
        compiled.functions, rank.joined = False, False
        kinds.append(type(found.move(batch, to_device, "here")))
        return kinds

    assert on_ranks(RANKS, act) == [[LazyRows, Tensor, Tensor]] * RANKS
