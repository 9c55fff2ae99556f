"""The first rank of a node reads for all of its ranks, and none waits for ever for another."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

from fasttrain.shim.data_parallel.answers import answers as answers_module
from fasttrain.shim.data_parallel.answers.answers import Answers
from fasttrain.shim.data_parallel.loading import transport
from fasttrain.shim.data_parallel.loading.lever import (
    BEGIN,
    READ_ON,
    SharedLoaders,
    fetches_by_index,
    shared_memory_of,
)
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from support.forked_ranks import on_ranks

pytestmark = pytest.mark.skipif(
    not transport.can_be_had(), reason="memory files of Linux are missing"
)


class Squares(Dataset[Any]):
    """Numbers, and a thing to do at one of them."""

    def __init__(self, at: int = -1, act: Any = None) -> None:
        self.at, self.act = at, act

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            return self.act()
        return torch.randn(3), index * index


images = torch.zeros(3).share_memory_()  # as the last batch of a loop that a script has at its top


class Named(Squares):
    """Has an attribute with a global's name."""

    def __getitem__(self, index: int) -> Any:
        return self.images[index]

    @property
    def images(self) -> list[int]:
        return [1] * 12


def installed(ranks: Ranks) -> SharedLoaders:
    answers = Answers(ranks)
    answers.install(ExitStack())
    lever = SharedLoaders(
        OutcomeRecorder("loading", "once per node", explicit=False), ranks, answers
    )
    lever.install(ExitStack())
    return lever


def loader(*args: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(Squares(*args), **{"batch_size": 2, "num_workers": 2, **options})


def read(batches: Any) -> list[Any]:
    return [[x.tolist(), y.tolist()] for x, y in batches]


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_ranks_get_the_batches_of_one_process(tmp_path: Path, nodes: int) -> None:
    def walk() -> Any:
        batches, again = loader(shuffle=True), loader(persistent_workers=True)
        found, before = [], len(multiprocessing.active_children())
        torch.manual_seed(1)
        for _ in range(2):
            iterator = iter(batches)
            children = len(multiprocessing.active_children()) - before
            found.append(read(iterator))
            del iterator
        next(iter(again))
        return [*found, read(again)], children

    def act(ranks: Ranks) -> Any:
        lever = installed(ranks)
        return [*walk(), lever.recorder.counts["shared batches"]]

    expected, _ = walk()
    for rank, end in enumerate(on_ranks(tmp_path, act, world_size=4, nodes=nodes)):
        found, children, count = end.good
        assert found == expected
        assert children == (2 if rank % (4 // nodes) == 0 else 0)
        assert count == 6 * 3 + 1


def error_of(batches: Any) -> list[Any]:
    began_s = time.monotonic()
    try:
        for _ in batches:
            pass
    except Exception as error:  # noqa: BLE001
        return [type(error).__name__, str(error).splitlines()[0], time.monotonic() - began_s < 60]
    return ["none"]


@pytest.mark.parametrize("how", ["killed", pytest.param("left", marks=pytest.mark.matrix)])
def test_all_ranks_hear_of_a_worker_that_died(tmp_path: Path, how: str) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else os._exit(3)

    def act(ranks: Ranks) -> Any:
        installed(ranks)
        first = error_of(loader(5, die, persistent_workers=True))
        return [first, len(read(loader()))]

    for end in on_ranks(tmp_path, act):
        (kind, text, soon), count = end.good
        assert (kind, soon, count) == ("RuntimeError", True, 6)
        assert "exited unexpectedly" in text  # one worker or both, by when a rank looks


def test_a_rank_that_reads_and_dies_ends_the_others(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        installed(ranks)
        batches = iter(loader())
        for _ in range(3):  # both workers have begun, and see when their parent is gone
            next(batches)
        if ranks.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return error_of(batches)

    gone, other = on_ranks(tmp_path, act)
    assert gone.code == -signal.SIGKILL
    assert other.good[0] == "RuntimeError"
    assert other.good[2]


class OnlyByTorch:
    """Can be sent by multiprocessing, and not pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not so")


def test_a_batch_that_cannot_be_given_is_an_error(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        ForkingPickler.register(OnlyByTorch, lambda _: (OnlyByTorch, ()))
        installed(ranks)
        return error_of(loader(4, OnlyByTorch, collate_fn=list))

    owner, other = (end.good for end in on_ranks(tmp_path, act))
    assert owner == ["none"]
    assert other[0] == "RuntimeError"
    assert other[1].endswith(": TypeError: not so")


def test_ranks_that_part_in_a_loop_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers_module, "STUCK_S", 0.4)
    monkeypatch.setattr(answers_module, "POLL_S", 0.1)

    def act(ranks: Ranks) -> Any:
        installed(ranks)
        for number, _ in enumerate(loader()):
            if number == 2 and ranks.rank == 0:
                break
        time.sleep(0.5)
        return None

    def stay(ranks: Ranks) -> Any:  # the iterator lives on behind the break
        installed(ranks)
        batches = iter(loader())
        for number, _ in enumerate(batches):
            if number == 2 and ranks.rank == 0:
                with ranks.waits():
                    time.sleep(15.0)
        return None

    _, other = on_ranks(tmp_path / "left", act)
    assert "exited unexpectedly" in other.stderr
    here, _ = on_ranks(tmp_path / "here", stay)
    assert here.code == 78
    assert f"rank 1 to {READ_ON} at" in capfd.readouterr().err


def test_ranks_that_read_different_loaders_are_told(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        installed(ranks)
        read(loader())
        if ranks.rank:
            return len(list(loader()))
        return len(list(loader()))

    ends = on_ranks(tmp_path, act)
    assert ends[1].code == 78
    assert f"to {BEGIN} at" in ends[1].stderr


def test_what_may_not_be_alike_is_read_by_each_rank(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        lever, found = installed(ranks), []
        thread = threading.Thread(target=lambda: found.append(read(loader())))
        thread.start()
        thread.join()
        read(loader(num_workers=0))
        value = multiprocessing.Value("i", 0)
        batches = iter(loader(0, lambda: (torch.zeros(3), value.value)))
        children = len(multiprocessing.active_children())
        read(batches)
        return [len(found[0]), children, lever.recorder.counts, lever.recorder.outcome().reason]

    for end in on_ranks(tmp_path, act):
        count, children, counts, reason = end.good
        assert (count, children, counts) == (6, 2, {})
        assert "sharedctypes.Synchronized" in reason


def test_what_workers_share_with_the_script_is_found() -> None:
    assert shared_memory_of(loader()) == ""
    queue = multiprocessing.Queue()
    assert shared_memory_of(loader(1, queue)) == "queues.Queue"
    assert "tensor" in shared_memory_of(loader(1, [{"a": torch.zeros(3).share_memory_()}]))
    assert shared_memory_of(loader(1, multiprocessing.Lock())) == ""
    assert shared_memory_of(DataLoader(Named(), num_workers=2)) == ""
    assert shared_memory_of(loader(1, multiprocessing.Event())) == "synchronize.Event"
    np = pytest.importorskip("numpy")
    array = np.frombuffer(multiprocessing.RawArray("i", 4), dtype=np.int32)
    assert shared_memory_of(loader(1, array[1:]))
    assert shared_memory_of(loader(1, np.zeros(4)[1:])) == ""
    meta = type("Meta", (type,), {"__module__": property(str)})  # such as Cython's
    assert shared_memory_of(loader(1, meta("Compiled", (), {}))) == ""
    queue.close()


def test_another_user_is_not_spoken_to(monkeypatch: pytest.MonkeyPatch) -> None:
    listener, name = transport.listening()
    with listener, monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(PermissionError):
            transport.connected(name, 1)
        listener.settimeout(0.5)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(f"\0{name}")
        with stranger, pytest.raises(TimeoutError):
            transport.accepted(listener)
        assert stranger.fileno() == -1


def test_sockets_are_closed_in_forked_processes() -> None:
    here, there = transport.pair()
    transport.own(here)
    with here, there:
        pid = os.fork()
        if not pid:
            os._exit(here.fileno() + 2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        there.send(b"x")
        transport.close(there)  # what was sent before comes before the end
        assert [transport.receive(here)[0] for _ in range(2)] == [b"x", b""]


def _plain(count: int) -> TensorDataset:
    values = torch.arange(3.0 * count).view(count, 3)
    return TensorDataset(values, torch.arange(count), values.to(torch.bfloat16) > 2)


INDEXED: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(_plain(10), batch_size=4),
    "shuffled": lambda: DataLoader(_plain(10), batch_size=3, shuffle=True, drop_last=True),
    "a subset": lambda: DataLoader(Subset(_plain(9), [8, 1, -1, 3]), batch_size=3),
    "a subset of one": lambda: DataLoader(
        Subset(random_split(_plain(9), [6, 3])[0], [2, 1, 0]), batch_size=2
    ),
    "from behind": lambda: DataLoader(_plain(5), batch_sampler=[[-1, 0], [-5]]),
}
BY_SAMPLE: dict[str, Callable[[], DataLoader[Any]]] = {
    "one by one": lambda: DataLoader(_plain(3), batch_size=None),
    "its own collate": lambda: DataLoader(_plain(3), collate_fn=lambda samples: samples),
    "a dataset of its own": lambda: DataLoader([1, 2, 3]),  # type: ignore[arg-type]
    "a graph": lambda: DataLoader(TensorDataset(torch.ones(3, requires_grad=True))),
    "columns": lambda: DataLoader(TensorDataset(torch.arange(6).view(2, 3).T)),
}


@pytest.mark.parametrize("name", [*INDEXED, *BY_SAMPLE])
def test_tensors_are_read_by_one_index_where_that_is_the_same(name: str) -> None:
    make = INDEXED.get(name) or BY_SAMPLE[name]
    torch.manual_seed(0)
    expected = list(make())
    torch.manual_seed(0)
    read = make()
    iterator: Any = iter(read)
    fetcher = iterator._dataset_fetcher
    fetch = fetches_by_index(read, fetcher.fetch)
    assert (fetch is not None) == (name in INDEXED)
    fetcher.fetch = fetch or fetcher.fetch
    found = list(iterator)
    assert [type(batch) for batch in found] == [type(batch) for batch in expected]
    for batch, other in zip(found, expected, strict=True):
        torch.testing.assert_close(batch, other, rtol=0.0, atol=0.0)


def test_an_index_that_is_not_there_raises_what_it_did() -> None:
    read: DataLoader[Any] = DataLoader(_plain(3), batch_sampler=[[0, 3]])
    iterator: Any = iter(read)
    fetcher = iterator._dataset_fetcher
    fetcher.fetch = fetches_by_index(read, fetcher.fetch)
    with pytest.raises(IndexError, match="index 3 is out of bounds"):
        next(iterator)
