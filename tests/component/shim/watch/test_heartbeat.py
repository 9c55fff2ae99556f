"""The record of a worker, as its launcher reads it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fasttrain.files import HIGH_DESCRIPTOR
from fasttrain.launch.hang.heartbeats import HeartbeatRecord as Seen
from fasttrain.launch.hang.heartbeats import HeartbeatRecords, RankMemory
from fasttrain.launch.hang.stacks import by_signal
from fasttrain.launch.process import procfs
from fasttrain.model.hang import HEARTBEATS_VARIABLE
from fasttrain.shim.watch.heartbeat import NOT_WATCHED, Heartbeat


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as undo:
        yield undo


@pytest.fixture
def heartbeat(tmp_path: Path, undo: ExitStack) -> Heartbeat:
    heartbeat = Heartbeat(tmp_path, 3, child=False)
    heartbeat.install(undo)
    return heartbeat


def all_seen(run_dir: Path) -> tuple[Seen, ...]:
    heartbeats = HeartbeatRecords(run_dir)
    heartbeats.find()
    found = heartbeats.read()
    heartbeats.close()
    return found


def seen(run_dir: Path) -> Seen:
    (found,) = all_seen(run_dir)
    return found


def test_what_the_launcher_reads(heartbeat: Heartbeat, tmp_path: Path) -> None:
    first = seen(tmp_path)
    assert (first.address.rank, first.address.pid) == (3, os.getpid())
    assert (first.steps, first.beats, first.p95_s, first.ended) == (0, 0, 0.0, False)
    heartbeat.step(8)
    heartbeat.beat()
    heartbeat.slow_step(0.25)
    heartbeat.end()
    last = seen(tmp_path)
    assert (last.steps, last.beats, last.p95_s, last.ended) == (8, 2, 0.25, True)


def test_it_answers_with_its_stacks(heartbeat: Heartbeat, tmp_path: Path) -> None:
    signum = seen(tmp_path).address.signal
    assert signum >= signal.SIGRTMIN
    answer = by_signal(os.getpid(), signum, tmp_path / "stacks-3.txt")
    assert "by_signal" in [frame.function for frame in answer[0]]
    assert (tmp_path / "stacks-3.txt").stat().st_mode & 0o777 == 0o600


def test_the_scripts_files_keep_the_low_numbers(heartbeat: Heartbeat, tmp_path: Path) -> None:
    # One that closes all descriptors opens its own files there, and stacks would go into them.
    assert heartbeat
    assert seen(tmp_path).address.descriptor >= HIGH_DESCRIPTOR
    stacks = tmp_path / "stacks-3.txt"
    links = {int(link.name): link for link in Path("/proc/self/fd").iterdir()}
    (number,) = (number for number, link in links.items() if os.path.realpath(link) == str(stacks))
    assert number >= HIGH_DESCRIPTOR


def test_a_signal_of_the_scripts_is_left_alone(tmp_path: Path, undo: ExitStack) -> None:
    highest = signal.SIGRTMAX
    signal.signal(highest, lambda *_: None)
    undo.callback(signal.signal, highest, signal.SIG_DFL)
    Heartbeat(tmp_path, 3, child=False).install(undo)
    assert seen(tmp_path).address.signal == highest - 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_batches_are_counted(heartbeat: Heartbeat, tmp_path: Path, workers: int) -> None:
    before = seen(tmp_path).beats
    assert len(list(DataLoader(range(12), batch_size=2, num_workers=workers))) == 6
    # The counter is also set to 0, when a pass begins.
    assert 6 <= seen(tmp_path).beats - before <= 8


def test_a_batch_that_fails_has_no_frame_of_ours(heartbeat: Heartbeat) -> None:
    class Fails(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            raise KeyError(index)

    with pytest.raises(KeyError) as caught:
        next(iter(DataLoader(Fails())))
    assert not [entry for entry in caught.traceback if "fasttrain/shim" in str(entry.path)]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("in_background", [False, True])
def test_collectives_are_counted(
    alone: None, heartbeat: Heartbeat, tmp_path: Path, in_background: bool
) -> None:
    before = seen(tmp_path).beats
    for _ in range(3):
        work = dist.all_reduce(torch.ones(1), async_op=in_background)
        if in_background:
            work.wait()
    assert seen(tmp_path).beats - before == 3


def test_a_collective_that_fails_has_no_frame_of_ours(
    alone: None, heartbeat: Heartbeat, tmp_path: Path
) -> None:
    before = seen(tmp_path).beats
    work = dist.all_reduce(torch.ones(1), async_op=True)
    with pytest.raises(TypeError) as caught:
        work.wait("not a time")
    assert seen(tmp_path).beats - before == 1
    assert not [entry for entry in caught.traceback if "fasttrain/shim" in str(entry.path)]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_shows_the_same_record(heartbeat: Heartbeat, tmp_path: Path) -> None:
    def child() -> None:
        heartbeat.step(1)
        heartbeat.end()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(20)
    found = seen(tmp_path)
    assert (found.steps, found.beats, found.ended) == (1, 1, False)


def test_a_child_takes_its_address_away_at_its_end(tmp_path: Path, undo: ExitStack) -> None:
    heartbeat = Heartbeat(tmp_path, 3, child=True)
    heartbeat.install(undo)
    heartbeat._pid += 1  # as in a fork of it
    heartbeat.end()
    assert len([*_addresses(tmp_path)]) == 1
    heartbeat._pid -= 1
    heartbeat.end()
    heartbeat.end()
    assert not [*tmp_path.glob("heartbeat-*")]


def test_it_leaves_nothing(tmp_path: Path) -> None:
    gc.collect()  # what other tests left is not to end in between
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    wait = vars(dist.Work)["wait"]
    with ExitStack() as undo:
        Heartbeat(tmp_path, 3, child=True).install(undo)
        signum = next(iter(_addresses(tmp_path))).signal
        assert procfs.catches(os.getpid(), signum)
    assert not procfs.catches(os.getpid(), signum)
    assert "_num_yielded" not in vars(_BaseDataLoaderIter)
    assert vars(dist.Work)["wait"] is wait
    # The mapping itself goes with the record.
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def _addresses(run_dir: Path) -> Iterator[object]:
    heartbeats = HeartbeatRecords(run_dir)
    heartbeats.find()
    for found in heartbeats.read():
        yield found.address
    heartbeats.close()


def test_a_lost_directory_is_told(
    tmp_path: Path, undo: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    heartbeat = Heartbeat(tmp_path / "gone", 3, child=False)
    heartbeat.install(undo)
    heartbeat.step(1)
    assert NOT_WATCHED in capsys.readouterr().err


@pytest.mark.parametrize("told", ["", "1", ":", "x:y", "{pid}:0", "{pid}:987654", "0:0"])
def test_memory_that_is_not_the_launchers_is_left_alone(
    tmp_path: Path, undo: ExitStack, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    monkeypatch.setenv("FASTTRAIN_HEARTBEATS", told.format(pid=os.getpid()))
    heartbeat = Heartbeat(tmp_path, 3, child=False)
    heartbeat.install(undo)
    heartbeat.step(2)
    assert seen(tmp_path).steps == 2


def test_ranks_of_a_node_share_the_launchers_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = RankMemory()
    monkeypatch.setenv(HEARTBEATS_VARIABLE, memory.environ({})[HEARTBEATS_VARIABLE])
    # The last rank is one more than there is room for, and the child is none of them.
    for rank, local_rank, child in (
        (8, "0", False),
        (9, "63", False),
        (10, "64", False),
        (9, "0", True),
    ):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with ExitStack() as undo:
            heartbeat = Heartbeat(tmp_path, rank, child=child)
            heartbeat.install(undo)
            heartbeat.step(rank * 10 + child)
            steps = {found.steps for found in all_seen(tmp_path)}
            assert rank * 10 + child in steps
    assert memory.steps() == {8: 80, 9: 90}
    memory.close()
