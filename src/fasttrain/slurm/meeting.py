"""Tasks of one job tell each other their beginnings and ends through files in the run directory.

The run directory lies on a file system that the nodes share, or there would be no receipt. It
needs no port, and what is told outlives the tasks.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

from fasttrain.files.writing import write_private
from fasttrain.model.codec import CodecError, dumps
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.hang import Hang
from fasttrain.model.job import TASKS_FOLDER, Allocation, TaskEnd, TaskStart
from fasttrain.model.reading import load

# Tasks of one job tell each other, in the run directory, that nothing goes on at their nodes.


class HangMeeting:
    """The files of one attempt of a job, one for each task at which nothing goes on.

    Args:
        folder: Where the tasks of this attempt meet.
        place: This task's place.
    """

    see_each_other = True

    def __init__(self, folder: Path, place: Allocation) -> None:
        self._folder = folder
        self._own = folder / _name(place.task)
        self._names = [_name(task) for task in range(place.tasks)]

    def say(self, found: Hang | None) -> None:
        """Write what was found, or take it back."""
        if found:
            write_private(self._own, dumps(found))
        else:
            self._own.unlink(missing_ok=True)

    def said(self) -> tuple[Hang, ...]:
        """Return what all tasks have found; empty while one of them goes on."""
        # Listed, not asked one by one: NFS remembers for a minute that a file is not there.
        there = {path.name for path in self._folder.iterdir()}
        if not there.issuperset(self._names):
            return ()
        try:
            return tuple(load(Hang, self._folder / name) for name in self._names)
        except (OSError, CodecError):
            return ()  # taken back just now


def _name(task: int) -> str:
    return f"hang-{task}.json"


MEET_S = 300.0  # srun starts all tasks at once; a slow file system is what takes time
LOOK_S = 0.2
# Below the range from which Linux takes ports for outgoing connections.
# Source: Linux, Documentation/networking/ip-sysctl.rst, ip_local_port_range: 32768 to 60999.
FIRST_PORT, PORTS = 20000, 12000


class Meeting:
    """The files of one attempt of a job.

    Args:
        run_dir: The run directory.
        place: This task's place.

    Attributes:
        hangs: Where the tasks agree that the run hangs.
    """

    def __init__(self, run_dir: Path, place: Allocation) -> None:
        self._place = place
        self._folder = run_dir / TASKS_FOLDER / str(place.restarts)
        self.hangs = HangMeeting(self._folder, place)

    def begin(self, start: TaskStart, *, wait_s: float = MEET_S) -> TaskStart:
        """Tell this task's beginning, wait for those of all others, and give that of the first.

        Raises:
            FasttrainError: ``nodes-missing`` where some tell nothing in time, ``nodes-differ``
                where they can't be one run.
        """
        self._write(f"start-{self._place.task}.json", dumps(start))
        starts = self._starts(time.monotonic() + wait_s)
        _compare(starts)
        return starts[0]

    def _starts(self, deadline_s: float) -> list[TaskStart]:
        names = [f"start-{task}.json" for task in range(self._place.tasks)]
        while True:
            # Listed, not asked one by one: NFS remembers for a minute that a file is not there.
            there = {path.name for path in self._folder.iterdir()}
            if there.issuperset(names):
                return [load(TaskStart, self._folder / name) for name in names]
            if time.monotonic() > deadline_s:
                missing = [n for n, name in enumerate(names) if name not in there]
                raise _missing(missing, self._place)
            time.sleep(LOOK_S)

    def end(self, end: TaskEnd) -> list[TaskEnd]:
        """Tell this task's end, and give those of all that have ended so far."""
        self._write(f"end-{end.task}.json", dumps(end))
        ends = []
        for path in self._folder.glob("end-*.json"):
            try:
                ends.append(load(TaskEnd, path))
            except (OSError, CodecError):
                continue  # on its way; the task that writes it will see ours
        return ends

    def _write(self, name: str, text: str) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self._folder / name, text)


def first_to_fail(ends: list[TaskEnd]) -> TaskEnd | None:
    """Return the end of the task that failed first; None where none did."""
    return min((end for end in ends if end.exit_code), key=lambda end: end.ended_ns, default=None)


def run_code(ends: list[TaskEnd]) -> int:
    """Return the exit code of the run: that of the task that failed first, or 0."""
    first = first_to_fail(ends)
    return first.exit_code if first else 0


def choose_port(job_id: str) -> int:
    """Return a free port of this node; two jobs on one node begin to look at different ones.

    Raises:
        FasttrainError: None is free.
    """
    number = int("".join(filter(str.isdecimal, job_id)) or 0)
    for step in range(PORTS):
        port = FIRST_PORT + (number * 7 + step) % PORTS
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise FasttrainError(
        "no port is free on the first node",
        why=f"all of {FIRST_PORT} to {FIRST_PORT + PORTS - 1} are taken",
        fix="name another with --master-port",
        slug="port-in-use",
        exit_code=ExitCode.CANNOT_START,
    )


def _compare(starts: list[TaskStart]) -> None:
    first = starts[0]
    for other in starts[1:]:
        for topic, value in first.facts.items():
            theirs = other.facts.get(topic, "unknown")
            if theirs != value:
                raise FasttrainError(
                    f"the nodes differ in their {topic}: {first.host} has {value},"
                    f" {other.host} {theirs}",
                    why="one plan could not be right for both, and ranks would wait for each other"
                    " or compute differently",
                    fix="ask for equal nodes with --constraint or --exclude, and one environment"
                    " on all of them",
                    slug="nodes-differ",
                )


def _missing(tasks: list[int], place: Allocation) -> FasttrainError:
    per_node = max(1, place.tasks // len(place.hosts))
    hosts = dict.fromkeys(place.hosts[task // per_node] for task in tasks)
    return FasttrainError(
        f"{', '.join(hosts)} told nothing in {MEET_S:.0f} s",
        why="each task writes a file into the run directory, and theirs can't be seen here",
        fix="put the run directory on a file system that all nodes share, with --run-dir",
        slug="nodes-missing",
        exit_code=ExitCode.CANNOT_START,
    )
