"""The table that the ranks of one node share."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttrain.shim.data_parallel import node_memory
from fasttrain.shim.data_parallel.node_memory import Board
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.process import entry
from support.forked_ranks import on_ranks

WIDTH = 4


class Store:
    """A key-value store of several threads, as torch.distributed has one of several processes."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, timeout=90.0), key
            return self.values[key]

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total


def on_threads(world_size: int, act: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(act, rank) for rank in range(world_size)]
        return [future.result(timeout=20.0) for future in futures]


def boards(world_size: int) -> list[Board | None]:
    store = Store()
    return on_threads(world_size, lambda rank: Board.of_node(store, rank, world_size, WIDTH))


@pytest.fixture(autouse=True)
def one_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Have three ranks on this node, and new files where they can be counted."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    made = node_memory.tempfile.mkstemp

    def make_here(**options: Any) -> Any:
        return made(**{**options, "dir": tmp_path})

    monkeypatch.setattr(node_memory.tempfile, "mkstemp", make_here)
    return tmp_path


def test_sums_are_those_of_all_ranks_each_time() -> None:
    tables = boards(3)

    def act(rank: int) -> list[list[float]]:
        table = tables[rank]
        assert table is not None
        sums = []
        for number in range(50):
            if rank == number % 3:
                time.sleep(0.001)  # another one is behind each time
            sums.append(table.sum_numbers([float(rank), 10.0**rank, float(number)]))
        return sums

    for sums in on_threads(3, act):
        assert sums == [[3.0, 111.0, 3.0 * number] for number in range(50)]


def test_tensors_are_added_up_and_gathered_in_between() -> None:
    tables = boards(3)

    def act(rank: int) -> tuple[list[float], list[int], list[float]]:
        table = tables[rank]
        assert table is not None
        total = table.sum(torch.tensor([[1.5, float(rank)]]))
        whole = torch.empty(3 * 11, 2, dtype=torch.int16)
        table.all_gather(torch.full((11, 2), rank, dtype=torch.int16), whole)  # in several rows
        return total.flatten().tolist(), whole[:, 1].tolist(), table.sum_numbers([1.0])

    for found in on_threads(3, act):
        assert found == ([4.5, 3.0], [0] * 11 + [1] * 11 + [2] * 11, [3.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_means_are_those_of_all_ranks(dtype: torch.dtype) -> None:
    tables = boards(3)
    given = [torch.linspace(rank, 9 - rank, 22).view(11, 2).to(dtype) for rank in range(3)]
    largest = torch.full((2,), 3e38, dtype=dtype)  # whose sum would be infinite

    def act(rank: int) -> tuple[Tensor, Tensor]:
        table: Any = tables[rank]
        first, second = given[rank].clone(), largest.clone()
        table.average([first, second])  # the first one in several rows
        return first, second

    expected = sum([each / 3 for each in given[1:]], given[0] / 3)
    found = on_threads(3, act)
    for first, second in found:
        torch.testing.assert_close(first, expected, rtol=0, atol=0)
        torch.testing.assert_close(second, largest)


def test_means_of_other_sizes_are_an_error_on_each_rank() -> None:
    tables = boards(3)

    def act(rank: int) -> str:
        table: Any = tables[rank]
        with pytest.raises(RuntimeError) as error:
            table.average([torch.ones(3 + (rank == 2))])
        return str(error.value)

    assert len(set(on_threads(3, act))) == 1


def test_tensors_come_along_with_numbers() -> None:
    tables = boards(3)

    def act(rank: int) -> list[tuple[list[float], list[int]]]:
        table = tables[rank]
        assert table is not None
        found = []
        for number in range(50):
            if rank == number % 3:
                time.sleep(0.001)
            part = torch.full((2, 3), 10 * number + rank, dtype=torch.int16)
            sums = table.sum_numbers([float(rank), 1.0], part)
            found.append((sums, table.parts_of_last_sum(2, part)[:, 2].tolist()))
            table.sum_numbers([float(number)])
        return found

    for found in on_threads(3, act):
        for number, each in enumerate(found):
            rows = [10 * number + rank for rank in (0, 0, 1, 1, 2, 2)]
            assert each == ([3.0, 3.0], rows)


@pytest.mark.parametrize("alike", [True, False])
def test_what_came_with_a_meeting_of_ranks_that_do_the_same_is_gathered(alike: bool) -> None:
    tables, store = boards(3), Store()

    def act(rank: int) -> Any:
        of_rank: Any = Ranks(rank, 3, store, "gloo")
        of_rank._board = table = tables[rank]
        part = torch.full((2, 2), float(rank))
        met = of_rank.meet(7 if alike else 7 + rank, lambda: f"rank {rank}", part=part)
        before = table._number
        first = of_rank.all_gather(part)
        waits = table._number - before
        second = of_rank.all_gather(part)
        assert torch.equal(first, second)
        assert first.data_ptr() != second.data_ptr()
        assert of_rank.meet(7, str, part=part)
        of_rank.end_call()
        part += 10  # in the same memory
        return met, waits, first[:, 0].tolist(), of_rank.all_gather(part)[:, 1].tolist()

    rows = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    for found in on_threads(3, act):
        assert found == (alike, 0 if alike else 1, rows, [10 + row for row in rows])


def test_a_rank_that_sends_nothing_along_does_something_else() -> None:
    tables, store = boards(3), Store()

    def act(rank: int) -> Any:
        of_rank: Any = Ranks(rank, 3, store, "gloo")
        of_rank._board = tables[rank]
        part = torch.full((2, 2), float(rank))
        met = of_rank.meet(7, lambda: f"rank {rank}", part=part if rank else None)
        return met, of_rank.all_gather(part)[:, 0].tolist()

    assert on_threads(3, act) == [(False, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0])] * 3


def test_nothing_is_left_in_the_file_system(one_node: Path) -> None:
    assert all(table is not None for table in boards(3))
    assert list(one_node.iterdir()) == []


def test_one_rank_that_cannot_open_it_leaves_all_without(
    monkeypatch: pytest.MonkeyPatch, one_node: Path
) -> None:
    mapped, calls = node_memory._mapped, []

    def fails_once(path: str, size: int) -> mmap.mmap | None:
        calls.append(path)
        return None if len(calls) == 2 else mapped(path, size)

    monkeypatch.setattr(node_memory, "_mapped", fails_once)
    assert boards(3) == [None, None, None]
    assert list(one_node.iterdir()) == []


def test_a_full_disk_leaves_all_without(monkeypatch: pytest.MonkeyPatch, one_node: Path) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(node_memory.os, "write", full)
    assert boards(3) == [None, None, None]
    assert list(one_node.iterdir()) == []


def test_ranks_of_several_nodes_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert boards(3) == [None, None, None]
    assert entry.get("LOCAL_WORLD_SIZE") == "2"


def test_a_broadcast_reaches_expanded_tensors_and_integers_of_16_bits(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        ranks.join()
        row = torch.arange(3.0) + ranks.rank
        several = [
            row.expand(2, 3),
            torch.full((2, 2), 7 + ranks.rank, dtype=torch.int16).t(),
            torch.tensor(9 + ranks.rank, dtype=torch.uint16),
        ]
        ranks.broadcast(several)
        return [tensor.tolist() for tensor in several]

    for end in on_ranks(tmp_path, act):
        assert end.good == [[[0.0, 1.0, 2.0]] * 2, [[7, 7]] * 2, 9]


def test_ranks_that_first_meet_under_inference_mode_meet_outside_of_it() -> None:
    def act(rank: int) -> list[float]:
        with torch.inference_mode():
            board = Board(memory, rank, 2, WIDTH)
            board.sum(torch.ones(2))
        found: list[float] = board.sum(torch.tensor([1.0, rank])).tolist()
        return found

    memory = mmap.mmap(-1, 2 * 2 * 8 * (1 + WIDTH))
    assert on_threads(2, act) == [[2.0, 1.0]] * 2
