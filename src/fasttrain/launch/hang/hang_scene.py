"""Takes down where every process of every rank stands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from fasttrain.launch.hang import stacks
from fasttrain.launch.hang.heartbeats import Pulse
from fasttrain.launch.hang.verdict import role_of, since_fork
from fasttrain.launch.process import procfs
from fasttrain.model.hang import Role, StuckProcess, StuckRank
from fasttrain.model.pulse import stacks_file

MOST_PROCESSES = 64  # of a rank: each takes a fraction of a second to ask


def examine(running: Iterable[Pulse], run_dir: Path) -> tuple[StuckRank, ...]:
    """Ask all processes of the ranks for their stacks, one after the other."""
    by_rank: defaultdict[int, list[Pulse]] = defaultdict(list)
    for pulse in running:
        by_rank[pulse.address.rank].append(pulse)
    return tuple(_rank(rank, pulses, run_dir) for rank, pulses in sorted(by_rank.items()))


def _rank(rank: int, pulses: list[Pulse], run_dir: Path) -> StuckRank:
    own = {pulse.address.pid: pulse.address.signal for pulse in pulses}
    parents = {pid: procfs.parent(pid) for pid in own}
    # The worker itself is what no other process of the rank has started.
    worker = next((pid for pid in own if parents[pid] not in own), next(iter(own)))
    answers = run_dir / stacks_file(rank)
    processes = []
    for pid in procfs.family(worker)[:MOST_PROCESSES]:
        # A forked process answers to the signal of the one that it was forked from.
        signum = own.get(pid, own[worker])
        if (found := _process(pid, signum, answers, own=pid == worker)) is not None:
            processes.append(found)
    return StuckRank(rank, max(pulse.steps for pulse in pulses), tuple(processes))


def _process(pid: int, signum: int, answers: Path, *, own: bool) -> StuckProcess | None:
    """Give one process; None for a program that has no Python stack, or only serves others."""
    threads, missing = stacks.by_signal(pid, signum, answers), ""
    if not threads:
        if not own and not procfs.is_of_multiprocessing(pid):
            return None
        threads, missing = stacks.by_py_spy(pid)
    role: Role = "rank" if own else role_of(threads[0] if threads else ())
    if role == "loader worker":
        threads = (since_fork(threads[0]), *threads[1:])
    return StuckProcess(pid, role, threads, missing)
