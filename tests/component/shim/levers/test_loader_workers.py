"""DataLoaders without workers are read by some, and the script gets the same batches."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.synchronize
import os
import random
import resource
import signal
import sys
import threading
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
)

from fasttrain.model.outcome import State
from fasttrain.shim.levers.loader_workers import lever as loader_workers

NAME = loader_workers.NAME
ROWS = 24


class Numbers(Dataset[Any]):
    """Has rows that are their numbers, and notes in a file which process has read each."""

    log: Path | None = None

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{os.getpid()}\n")
        return index


class Noting(Numbers):
    """Notes it in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "readers"
        self.log.write_text("")

    def readers(self) -> set[int]:
        """Return the processes that have read, other than this one, since the last time."""
        assert self.log is not None
        found = set(map(int, self.log.read_text().split()))
        self.log.write_text("")
        return found - {os.getpid()}


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
        "in order": lambda data: DataLoader(data, 5),
        "shuffled": lambda data: DataLoader(data, 5, shuffle=True, drop_last=True),
        "drawn": lambda data: DataLoader(data, 4, sampler=drawn),
        "of its generator": lambda data: DataLoader(
            data, 4, shuffle=True, generator=own.manual_seed(5)
        ),
        "its own collate": lambda data: DataLoader(
            data, 4, collate_fn=lambda rows: [[at, str(at)] for at in rows]
        ),
        "its own batches": lambda data: DataLoader(
            data, batch_sampler=[[3, 1, 2], [5], [0, 23], [2, 2], [7], [8, 9]]
        ),
    }


@pytest.mark.parametrize("kind", loaders())
def test_workers_read_the_same_batches(rig: Any, tmp_path: Path, kind: str) -> None:
    make = loaders()[kind]
    rows = [list(batch) for batch in read(make(Numbers()))]
    after = torch.rand(1)
    data = Noting(tmp_path)
    with rig(loader_workers=2) as runtime:
        loader = make(data)
        lent = [list(batch) for batch in read(loader)]
        assert torch.equal(torch.rand(1), after), "the script's random numbers go on as without"
        outcome = runtime.outcomes()[NAME]
    assert lent == rows
    assert len(data.readers()) == 2
    assert (outcome.state, outcome.notes) == (State.APPLIED, ())
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
        assert read(loader)
        assert not multiprocessing.active_children()
        outcome = runtime.outcomes()[NAME]
    assert outcome.state is State.SKIPPED
    assert "test_loader_workers.py:" in outcome.reason


def test_where_processes_are_not_forked_nothing_is_lent(
    rig: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "spawn")
    data = Noting(tmp_path)
    with rig(loader_workers=2) as runtime:
        read(DataLoader(data, 6))
        assert "forked" in runtime.outcomes()[NAME].reason
    assert not data.readers()


def test_workers_have_files_of_their_own(rig: Any, tmp_path: Path) -> None:
    data = Rows(tmp_path / "rows")
    with data.file, rig(loader_workers=2):
        found: list[Tensor] = read(DataLoader(data, 4))
        last = 199 * ROWS + 7  # of the second batch, which this process has read
        assert data.file.tell() == last + 1, "the script's own file is where it was"
    assert torch.cat(found).tolist() == list(range(ROWS))


def test_a_function_for_workers_is_not_called_where_the_script_has_none(rig: Any) -> None:
    def fail(_: int) -> None:
        raise AssertionError

    with rig(loader_workers=2):
        assert len(read(DataLoader(Numbers(), 5, worker_init_fn=fail))) == 5


def test_a_row_that_fails_fails_in_the_script(rig: Any) -> None:
    class Fails(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index in fails:
                raise KeyError(index)
            return index

    for fails in ({1}, {5}, {13}, {2, 6, 7, 15}):
        with rig(loader_workers=2):
            batches = iter(DataLoader(Fails(), 4))
            for at in range(0, ROWS, 4):
                if failing := fails & {*range(at, at + 4)}:
                    with pytest.raises(KeyError) as caught:
                        next(batches)
                    assert caught.value.args == (min(failing),), "it is the script's own"
                else:
                    assert next(batches).tolist() == [*range(at, at + 4)]
            assert next(batches, None) is None


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
        DataLoader(Numbers(), 5, collate_fn=lambda rows: [weights * row for row in rows]),
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
            note = runtime.outcomes()[NAME].reason
        assert "a worker couldn't: SystemExit: 3" in note or "can't be sent" in note


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
        outcome = runtime.outcomes()[NAME]
    assert outcome.state is State.SKIPPED
    assert "global random generator" in outcome.reason


STREAM = np.random.default_rng(1)
COUNTS = {"reads": 0}


def drawn_without_end() -> Any:
    """Draw from what no dataset holds, and no search finds."""
    return vars(sys.modules[__name__])["STREAM"].normal()


def counted(index: int) -> int:
    COUNTS["reads"] += 1
    return index


def first(rows: Any) -> Any:
    return rows[0]


class Cached(Numbers):
    """Keeps what it has read."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def __getitem__(self, index: int) -> Any:
        return self.rows.setdefault(index, index)


class Calls(Numbers):
    """Makes rows by a function."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __getitem__(self, index: int) -> Any:
        return self.make[index] if isinstance(self.make, list) else self.make(index)


@pytest.mark.parametrize(("make", "count", "why"), [
    (lambda: DataLoader(Calls(lambda _: drawn_without_end()), 4), 2, "reads other rows"),
    (lambda: DataLoader(Calls(counted), 4), 2, "changes what its dataset holds"),
    (lambda: DataLoader(Cached(), 4), 1, "changes what its dataset holds"),
    (lambda: DataLoader(Calls(lambda _: os.getpid()), 4), 2, "reads other rows"),
    (lambda: DataLoader(TensorDataset(torch.zeros(ROWS, 3)), 1, collate_fn=lambda rows: rows[0]),
     2, "parts of what its dataset holds"),
    (lambda: DataLoader(Calls(np.zeros((9 * ROWS, 3)).__getitem__), 1, collate_fn=first), 2,
     "parts of"),
    (lambda: DataLoader(Calls([{0: [0.0, 0.0]}] * ROWS), 1, collate_fn=first), 2, "parts of"),
    (lambda: DataLoader(Holding(multiprocessing.Value("i", 3)), 4), 2, "can't share"),
], ids=["a hidden stream", "counts", "caches", "process", "views", "arrays", "records",
        "shared values"])  # fmt: skip
def test_what_depends_on_what_was_read_before_is_read_here(
    rig: Any, make: Any, count: int, why: str
) -> None:
    def epochs() -> Any:
        STREAM.bit_generator.state = np.random.default_rng(1).bit_generator.state
        COUNTS["reads"] = 0
        loader = make()
        return [torch.stack([torch.as_tensor(b[0]) for b in read(loader)]) for _ in range(count)]

    plain = epochs()
    reads = COUNTS["reads"]
    with rig(loader_workers=2) as runtime:
        assert torch.equal(torch.stack(epochs()), torch.stack(plain))
        outcome = runtime.outcomes()[NAME]
    assert COUNTS["reads"] == reads
    assert outcome.state is State.SKIPPED
    assert why in outcome.reason
    assert not multiprocessing.active_children()


def test_workers_that_failed_are_not_tried_in_the_next_epoch(rig: Any, tmp_path: Path) -> None:
    class Draws(Noting):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index) + random.random()

    data = Draws(tmp_path)
    with rig(loader_workers=1) as runtime:
        loader = DataLoader(data, 4)
        read(loader)
        assert data.readers()
        read(loader)
        assert not data.readers()
        assert "in another epoch" in runtime.outcomes()[NAME].reason


def test_a_loop_that_takes_one_batch_at_a_time_starts_no_worker(rig: Any, tmp_path: Path) -> None:
    data = Noting(tmp_path)
    with rig(loader_workers=1) as runtime:
        loader = DataLoader(data, 4)
        assert [next(iter(loader)).tolist() for _ in range(3)] == [[0, 1, 2, 3]] * 3
        assert not data.readers()
        assert runtime.outcomes()[NAME].state is State.SKIPPED


def test_batches_have_the_strides_that_they_have_without_workers(rig: Any) -> None:
    rows = [torch.zeros(2, 3, 4, 5).permute(0, 3, 1, 2) for _ in range(ROWS)]
    plain = [batch.stride() for batch in DataLoader(rows, 4)]
    wide = Calls(lambda index: torch.arange(100.0).view(50, 2)[:, 0][: index + 1])
    one = [batch.stride() for (batch,) in DataLoader(wide, 1, collate_fn=lambda rows: rows)]
    with rig(loader_workers=1) as runtime:
        assert [batch.stride() for batch in DataLoader(rows, 4)] == plain
        lent = DataLoader(wide, 1, collate_fn=lambda rows: rows)
        assert [batch.stride() for (batch,) in lent] == one
        assert runtime.outcomes()[NAME].notes == ()


def test_the_start_method_is_left_for_the_script_to_set(rig: Any) -> None:
    contexts: Any = multiprocessing.context
    before = contexts._default_context._actual_context
    contexts._default_context._actual_context = None
    try:
        with rig(loader_workers=1) as runtime:
            read(DataLoader(Numbers(), 4))
            assert runtime.outcomes()[NAME].state is State.APPLIED
        assert contexts._default_context._actual_context is None
    finally:
        contexts._default_context._actual_context = before


@pytest.mark.parametrize("end", ["killed", "waits for ever"])
def test_a_worker_that_is_lost_is_done_without(rig: Any, monkeypatch: Any, end: str) -> None:
    here = os.getpid()

    def make(index: int) -> int:
        if os.getpid() != here and index == 13:
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return index

    monkeypatch.setattr(loader_workers, "LONGEST_S", 1.0)
    with rig(loader_workers=1) as runtime:
        assert torch.cat(read(DataLoader(Calls(make), 2))).tolist() == [*range(ROWS)]
        (note,) = runtime.outcomes()[NAME].notes
    assert "reads it itself" in note
    assert not multiprocessing.active_children()


def test_signals_are_left_to_the_script(rig: Any, tmp_path: Path) -> None:
    here, seen = os.getpid(), tmp_path / "seen"

    def note(*_: Any) -> None:
        with seen.open("a") as file:
            file.write(f"{os.getpid()}\n")

    def make(index: int) -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGUSR1)
        return index

    before = signal.signal(signal.SIGUSR1, note)
    try:
        with rig(loader_workers=1) as runtime:
            assert torch.cat(read(DataLoader(Calls(make), 4))).tolist() == [*range(ROWS)]
            assert runtime.outcomes()[NAME].notes == ()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not seen.exists()


class Delegating:
    """A batch that can be pickled, but not read again."""

    def __init__(self, rows: list[int]) -> None:
        self.data = {"x": torch.tensor(rows)}

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


def test_a_batch_that_cannot_be_made_again_is_read_here(rig: Any) -> None:
    with rig(loader_workers=1) as runtime:
        batches = [batch.x.tolist() for batch in DataLoader(Numbers(), 8, collate_fn=Delegating)]
        assert "RecursionError" in runtime.outcomes()[NAME].reason
    assert batches == [[*range(at, at + 8)] for at in (0, 8, 16)]


def test_what_is_too_much_for_a_worker_is_read_here(rig: Any, monkeypatch: Any) -> None:
    room = os.statvfs("/dev/shm")
    small = os.statvfs_result((*room[:4], 3, *room[5:]))  # blocks that are free
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    data = TensorDataset(torch.arange(30_000.0))
    with rig(loader_workers=1) as runtime:
        assert len(read(DataLoader(data, 5000))) == 6
        assert "no room" in runtime.outcomes()[NAME].reason


@pytest.mark.parametrize("late", [4, 8])  # which the first choice of a worker has, or another
def test_a_signal_that_interrupts_a_batch_loses_that_batch_alone(rig: Any, late: int) -> None:
    class LateError(Exception):
        pass

    def is_late(*_: Any) -> None:
        raise LateError

    def make(index: int) -> int:
        time.sleep(3 if index == late else 0)
        return index

    before = signal.signal(signal.SIGALRM, is_late)
    found: list[Any] = []
    try:
        with rig(loader_workers=1):
            batches = iter(DataLoader(Calls(make), 2))
            signal.setitimer(signal.ITIMER_REAL, 0.8)
            for _ in range(ROWS // 2):
                try:
                    found.append(next(batches).tolist())
                except LateError:
                    found.append("late")
            assert next(batches, None) is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    plain: list[Any] = [[at, at + 1] for at in range(0, ROWS, 2)]
    plain[late // 2] = "late"
    assert found == plain


class Late(Numbers):
    """Changes with its later rows, and has others then."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __getitem__(self, index: int) -> Any:
        new = index >= 13 and index not in self.seen
        if new:
            self.seen.add(index)
        return index + 100 * new


def test_a_dataset_that_changes_with_a_later_batch_is_read_here_from_it_on(rig: Any) -> None:
    data = Late()
    plain = [torch.cat(read(DataLoader(data, 4))).tolist() for _ in range(2)]
    data = Late()
    with rig(loader_workers=1) as runtime:
        loader = DataLoader(data, 4)
        assert [torch.cat(read(loader)).tolist() for _ in range(2)] == plain
        assert any("changes what its dataset" in note for note in runtime.outcomes()[NAME].notes)
    assert len(data.seen) == ROWS - 13


class Odd(type):
    """The way of Cython's classes: their module is a descriptor."""


Odd.__module__ = property(lambda _: None)  # type: ignore[assignment, method-assign]


def test_a_dataset_may_hold_functions_that_are_compiled_by_cython(rig: Any) -> None:
    compiled = Odd("compiled", (), {"__slots__": ()})()
    with rig(loader_workers=1) as runtime:
        assert len(read(DataLoader(Holding([compiled]), 4))) == ROWS // 4
        assert runtime.outcomes()[NAME].state is State.APPLIED


def test_workers_that_end_while_they_ask_for_the_end_hold_up_nothing(
    rig: Any, monkeypatch: Any
) -> None:
    """torch's worker asks an event before each batch, and has its lock meanwhile."""

    def is_set(event: Any) -> bool:
        with event._cond:
            time.sleep(0.02)  # the time in which the lock is held, and a worker may end
            return False

    monkeypatch.setattr(multiprocessing.synchronize.Event, "is_set", is_set)
    with rig(loader_workers=2):
        stuck = threading.Thread(target=broken_off, daemon=True)
        stuck.start()
        stuck.join(20)
        assert not stuck.is_alive()


def broken_off() -> None:
    for _ in range(5):
        for index, _ in enumerate(DataLoader(Numbers(), 1)):
            if index == 5:
                break


def test_workers_end_with_a_loop_that_is_broken_off(rig: Any) -> None:
    gc.disable()
    try:
        with rig(loader_workers=1) as runtime:
            broken_off()
            assert runtime.outcomes()[NAME].state is State.APPLIED
            assert not multiprocessing.active_children()
    finally:
        gc.enable()


def test_workers_are_left_to_multiprocessing_at_the_end_of_the_interpreter(rig: Any) -> None:
    with rig(loader_workers=1):
        batches: Any = iter(DataLoader(Numbers(), 1))
        for _ in range(4):
            next(batches)
        # Modules are emptied then, and to end a process would fail.
        batches.__del__(ends=lambda: True)
        assert multiprocessing.active_children()
        batches.__del__()
        assert not multiprocessing.active_children()


def test_the_reason_of_a_dataset_that_is_gone_is_not_of_the_next_one(
    rig: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    # As if the next dataset were where the one that is gone was, which memory does as it likes.
    def place(what: Any) -> int:
        return 0 if isinstance(what, Numbers) else id(what)

    monkeypatch.setattr(loader_workers, "id", place, raising=False)
    with rig(loader_workers=1):
        data: Any = Calls(lambda _: os.getpid())
        read(DataLoader(data, 4))
        del data
        gc.collect()
        another = Noting(tmp_path)
        read(DataLoader(another, 4))
        assert another.readers()


def test_conjugates_are_read_here(rig: Any) -> None:
    data = [torch.full((2,), 1j * index) for index in range(ROWS)]

    def epoch() -> Tensor:
        return torch.stack(read(DataLoader(data, 4, collate_fn=lambda r: torch.stack(r).conj())))

    plain = epoch().resolve_conj()
    with rig(loader_workers=1):
        assert torch.equal(epoch().resolve_conj(), plain)


def test_workers_that_compare_for_longer_than_they_read_are_given_up(rig: Any) -> None:
    class Many(Numbers):
        def __init__(self) -> None:
            self.rows = [{"x": index} for index in range(4_000)]

    with rig(loader_workers=1) as runtime:
        assert len(read(DataLoader(Many(), 1))) == ROWS
        (note,) = runtime.outcomes()[NAME].notes
    assert "longer than reading" in note
