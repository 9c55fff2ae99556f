"""DataLoaders without workers are read by some, and the script gets the same batches."""

from __future__ import annotations

import os
import random
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from fasttrain.model.outcome import State
from fasttrain.shim.levers import loader_workers

NAME = loader_workers.NAME
ROWS = 24


class Numbers(Dataset[Any]):
    """Says which worker has read each row; -1 for none."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        return index, -1 if info is None else info.id


class Endless(IterableDataset[Any]):
    """Makes its rows itself."""

    def __iter__(self) -> Any:
        yield from range(ROWS)


class Holding(Numbers):
    """Holds something of the process that makes it."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def rows(self, rows: list[Any]) -> list[Any]:
        return rows


class Computed(DataLoader[Any]):
    """Has no attribute for its number of workers."""

    num_workers: Any = property(lambda _: 0, lambda _, __: None)


class Harder:
    """Chooses a row by how the one before was trained."""

    def __iter__(self) -> Any:
        yield from range(ROWS)

    def __len__(self) -> int:
        return ROWS


class Rows(Dataset[Any]):
    """Seeks in a file that all readers have open, as HDF5 and archives do."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(range(ROWS)) * 4096)
        self.file = path.open("rb", buffering=0)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        found = set()
        for turn in range(200):
            self.file.seek(turn * ROWS + index)
            os.sched_yield()
            found.add(self.file.read(1)[0])
        return index if found == {index} else -1


def read(loader: Any) -> list[Any]:
    torch.manual_seed(3)
    batches = []
    for batch in loader:
        batches.append(batch)
        torch.rand(1)  # as dropout does between two batches
    return batches


def loaders() -> dict[str, Any]:
    drawn = WeightedRandomSampler([1.0] * ROWS, ROWS)
    own = torch.Generator().manual_seed(5)
    return {
        "in order": lambda: DataLoader(Numbers(), 5),
        "shuffled": lambda: DataLoader(Numbers(), 5, shuffle=True, drop_last=True),
        "drawn": lambda: DataLoader(Numbers(), 4, sampler=drawn),
        "of its generator": lambda: DataLoader(
            Numbers(), 4, shuffle=True, generator=own.manual_seed(5)
        ),
        "its own collate": lambda: DataLoader(
            Numbers(), 4, collate_fn=lambda rows: [[at, worker] for at, worker in rows]
        ),
        "its own batches": lambda: DataLoader(Numbers(), batch_sampler=[[3, 1, 2], [5], [0, 23]]),
    }


@pytest.mark.parametrize("kind", loaders())
def test_workers_read_the_same_batches(rig: Any, kind: str) -> None:
    make = loaders()[kind]
    rows = [torch.as_tensor(batch if isinstance(batch[0], list) else torch.stack(batch, 1))
            for batch in read(make())]  # fmt: skip
    after = torch.rand(1)
    with rig(loader_workers=2) as runtime:
        loader = make()
        lent = [torch.as_tensor(batch if isinstance(batch[0], list) else torch.stack(batch, 1))
                for batch in read(loader)]  # fmt: skip
        assert torch.equal(torch.rand(1), after), "the script's random numbers go on as without"
        outcome = runtime.outcomes()[NAME]
    assert [batch[:, 0].tolist() for batch in lent] == [batch[:, 0].tolist() for batch in rows]
    assert {worker for batch in lent for worker in batch[:, 1].tolist()} == {0, 1}
    assert outcome.state is State.APPLIED
    assert (loader.num_workers, loader.prefetch_factor, loader.worker_init_fn) == (0, None, None)


@pytest.mark.parametrize("make", [
    lambda: DataLoader(Numbers(), 5, num_workers=1),
    lambda: DataLoader(Endless(), 5),
    lambda: DataLoader(Numbers(), batch_size=None),
    lambda: DataLoader(TensorDataset(torch.empty(ROWS, device="meta")), 5),
    lambda: DataLoader(Numbers(), 5, multiprocessing_context="fork", num_workers=1),
    lambda: Computed(Numbers(), 5),
    lambda: DataLoader(Numbers(), 5, sampler=Harder()),
    lambda: DataLoader(Holding(random.Random(1)), 5),
    lambda: DataLoader(Holding({"of": [torch.Generator()]}), 5),
    lambda: DataLoader(Holding(iter(str, "x")), 5, collate_fn=Holding(ThreadPoolExecutor(1)).rows),
    lambda: DataLoader(Holding(row for row in range(ROWS)), 5),
], ids=["own workers", "iterable", "not collated", "on a device", "own context", "own settings",
        "own sampler", "draws", "draws deep inside", "threads of its own", "reads on"])  # fmt: skip
def test_what_has_to_be_read_as_it_is_is_left_alone_and_told(rig: Any, make: Any) -> None:
    with rig(loader_workers=3) as runtime:
        loader = make()
        iterator = iter(loader)
        assert iterator._num_workers == loader.num_workers
        outcome = runtime.outcomes()[NAME]
        del iterator
    assert outcome.state is State.SKIPPED
    assert "test_loader_workers.py:" in outcome.reason


def test_where_processes_are_not_forked_nothing_is_lent(rig: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.multiprocessing, "get_start_method", lambda: "spawn")
    with rig(loader_workers=2) as runtime:
        (batch, *_) = read(DataLoader(Numbers(), 6))
        assert "forked" in runtime.outcomes()[NAME].reason
    assert batch[1].tolist() == [-1] * 6


def test_workers_have_files_of_their_own(rig: Any, tmp_path: Path) -> None:
    data = Rows(tmp_path / "rows")
    with data.file, rig(loader_workers=2):
        data.file.seek(7)
        found: list[Tensor] = read(DataLoader(data, 4))
        assert data.file.tell() == 7, "the script's own file is where it was"
    assert torch.cat(found).tolist() == list(range(ROWS))


def test_a_function_for_workers_is_not_called_where_the_script_has_none(rig: Any) -> None:
    def fail(_: int) -> None:
        raise AssertionError

    with rig(loader_workers=2):
        assert len(read(DataLoader(Numbers(), 5, worker_init_fn=fail))) == 5


def test_a_row_that_fails_fails_in_the_script(rig: Any) -> None:
    class Fails(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 7:
                raise KeyError(index)
            return super().__getitem__(index)

    with rig(loader_workers=2):
        batches = iter(DataLoader(Fails(), 4))
        assert next(batches)[0].tolist() == [0, 1, 2, 3]
        with pytest.raises(KeyError) as caught:
            next(batches)
        assert caught.value.args == (7,), "it is the exception of the script itself"
        assert next(batches)[0].tolist() == [8, 9, 10, 11]
        del batches, caught  # ends the workers


def ordered() -> Any:
    """Yield what a script sees that draws while it has several iterators."""
    torch.manual_seed(3)
    own = torch.Generator().manual_seed(5)
    first, second = (DataLoader(list(range(13)), 2, shuffle=True) for _ in range(2))
    for batches in zip(first, second, strict=True):
        yield [*torch.cat(batches).tolist(), torch.rand(1).item()]
    begun = iter(first)
    yield torch.rand(1).item()
    yield next(begun).tolist()
    drawing = DataLoader(list(range(13)), 2, shuffle=True, generator=own)
    for _ in range(2):
        for at, batch in enumerate(drawing):  # ends while workers have read on
            yield batch.tolist()
            if at == 3:
                break
    several = torch.utils.data.RandomSampler(range(3), num_samples=9, generator=own)
    for batch in DataLoader(list(range(3)), 3, sampler=several):
        yield [*batch.tolist(), torch.rand(1, generator=own).item()]


def test_samplers_draw_when_they_would_without_workers(rig: Any) -> None:
    plain = list(ordered())
    with rig(loader_workers=1) as runtime:
        assert list(ordered()) == plain
        notes = runtime.outcomes()[NAME].notes
    (note,) = notes
    assert "the generator of that" in note, "a copy of the sampler couldn't know the last batches"


@pytest.mark.filterwarnings("ignore::UserWarning")  # nested tensors aren't finished
def test_a_batch_that_a_worker_cannot_read_or_send_is_read_here(rig: Any) -> None:
    weights = torch.ones(2, requires_grad=True)
    here = os.getpid()

    class OnlyHere(Numbers):
        def __getitem__(self, index: int) -> Any:
            if os.getpid() != here:
                raise SystemExit(3)
            return index

    for loader in (
        DataLoader(Numbers(), 5, collate_fn=lambda rows: [[lambda: 1] for _ in rows]),
        DataLoader(Numbers(), 5, collate_fn=lambda rows: [weights * row[0] for row in rows]),
        DataLoader(
            Numbers(),
            5,
            collate_fn=lambda rows: torch.nested.nested_tensor(list(map(torch.tensor, rows))),
        ),
        DataLoader(
            Numbers(),
            5,
            collate_fn=lambda _: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        ),
        DataLoader(OnlyHere(), 5),
    ):
        with rig(loader_workers=1) as runtime:
            assert len([batch[0] for batch in loader]) == 5
            (note,) = runtime.outcomes()[NAME].notes
        assert "a worker couldn't" in note


def test_a_script_that_keeps_batches_does_not_run_out_of_descriptors(rig: Any) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2 * lowest, 100), before[1]))
    try:
        with rig(loader_workers=1):
            kept = list(DataLoader(TensorDataset(torch.arange(300.0)), 1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert [batch.item() for (batch,) in kept] == list(range(300))


def test_batches_come_in_order_also_where_the_script_would_not_mind(rig: Any) -> None:
    class Slow(Numbers):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.2 if index < 2 else 0)
            return index

    with rig(loader_workers=2):
        assert torch.cat(read(DataLoader(Slow(), 2, in_order=False))).tolist() == [*range(ROWS)]


@pytest.mark.parametrize("draw", [
    random.random, lambda: torch.rand(1).item(), lambda: np.random.rand(),
], ids=["random", "torch", "numpy"])  # fmt: skip
def test_a_dataset_that_draws_from_a_global_generator_is_read_here(rig: Any, draw: Any) -> None:
    class Draws(Numbers):
        def __getitem__(self, index: int) -> Any:
            return draw()

    def drawn() -> Any:
        random.seed(1)
        np.random.seed(1)
        return torch.cat(read(DataLoader(Draws(), 4)))

    plain = drawn()
    with rig(loader_workers=1) as runtime:
        assert torch.equal(drawn(), plain)
        (note,) = runtime.outcomes()[NAME].notes
    assert "global random generator" in note
