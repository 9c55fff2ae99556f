"""The rendezvous of a job's tasks: files in the run directory for their starts, ends and hangs.

The run directory has to be on a shared file system anyway, for the receipt. Files need no port, and
they outlive the tasks.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

from fasttrain.files import load, write_private
from fasttrain.model.codec import CodecError, dumps
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.hang import Hang
from fasttrain.model.job import TASKS_FOLDER, Allocation, TaskEnd, TaskStart


class HangMeeting:
    """The files by which the tasks of one attempt agree on a hang: one per task without progress.

    Args:
        folder: Folder of this attempt's files.
        place: This task's place.
    """

    see_each_other = True

    def __init__(self, folder: Path, place: Allocation) -> None:
        self._folder = folder
        self._own = folder / _name(place.task)
        self._names = [_name(task) for task in range(place.tasks)]

    def say(self, found: Hang | None) -> None:
        """Write this task's finding; with None, remove it again."""
        if found:
            write_private(self._own, dumps(found))
        else:
            self._own.unlink(missing_ok=True)

    def said(self) -> tuple[Hang, ...]:
        """Return the findings of all tasks; empty while one of them makes progress."""
        # List the folder: NFS caches for up to a minute that a file doesn't exist.
        there = {path.name for path in self._folder.iterdir()}
        if not there.issuperset(self._names):
            return ()
        try:
            return tuple(load(Hang, self._folder / name) for name in self._names)
        except (OSError, CodecError):
            return ()  # removed just now


def _name(task: int) -> str:
    return f"hang-{task}.json"


MEET_S = 300.0  # srun starts all tasks at once, but a slow file system takes time
LOOK_S = 0.2
# Below Linux's range of ephemeral ports, which outgoing connections use.
# Source: Linux, Documentation/networking/ip-sysctl.rst, ip_local_port_range: 32768 to 60999.
FIRST_PORT, PORTS = 20000, 12000


class Meeting:
    """The files by which the tasks of one attempt of a job meet.

    Args:
        run_dir: The run directory.
        place: This task's place.

    Attributes:
        hangs: The files by which they agree that the run hangs.
    """

    def __init__(self, run_dir: Path, place: Allocation) -> None:
        self._place = place
        self._folder = run_dir / TASKS_FOLDER / str(place.restarts)
        self.hangs = HangMeeting(self._folder, place)

    def begin(self, start: TaskStart, *, wait_s: float = MEET_S) -> TaskStart:
        """Write this task's start, wait for those of all others, and return that of the first task.

        Raises:
            FasttrainError: ``nodes-missing`` if some don't write theirs in time, ``nodes-differ``
                if their nodes can't make one run together.
        """
        self._write(f"start-{self._place.task}.json", dumps(start))
        starts = self._starts(time.monotonic() + wait_s)
        _compare(starts)
        return starts[0]

    def _starts(self, deadline_s: float) -> list[TaskStart]:
        names = [f"start-{task}.json" for task in range(self._place.tasks)]
        while True:
            # List the folder: NFS caches for up to a minute that a file doesn't exist.
            there = {path.name for path in self._folder.iterdir()}
            if there.issuperset(names):
                return [load(TaskStart, self._folder / name) for name in names]
            if time.monotonic() > deadline_s:
                missing = [n for n, name in enumerate(names) if name not in there]
                raise _missing(missing, self._place)
            time.sleep(LOOK_S)

    def end(self, end: TaskEnd) -> list[TaskEnd]:
        """Write this task's end; return those of all tasks that have ended so far."""
        self._write(f"end-{end.task}.json", dumps(end))
        ends = []
        for path in self._folder.glob("end-*.json"):
            try:
                ends.append(load(TaskEnd, path))
            except (OSError, CodecError):
                continue  # being written; that task will see ours
        return ends

    def _write(self, name: str, text: str) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self._folder / name, text)


def first_to_fail(ends: list[TaskEnd]) -> TaskEnd | None:
    """Return the end of the task that failed first; None if none failed."""
    return min((end for end in ends if end.exit_code), key=lambda end: end.ended_ns, default=None)


def run_code(ends: list[TaskEnd]) -> int:
    """Return the exit code of the run: that of the task that failed first, or 0."""
    first = first_to_fail(ends)
    return first.exit_code if first else 0


def choose_port(job_id: str) -> int:
    """Return a free port of this node; the search of each job starts at a different port.

    Raises:
        FasttrainError: ``port-in-use`` if none is free.
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
        why=f"all of {FIRST_PORT} to {FIRST_PORT + PORTS - 1} are in use",
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
        f"{', '.join(hosts)} sent no sign of life in {MEET_S:.0f} s",
        why="each task writes a file into the run directory, and theirs isn't visible here",
        fix="put the run directory on a file system that all nodes share, with --run-dir",
        slug="nodes-missing",
        exit_code=ExitCode.CANNOT_START,
    )
