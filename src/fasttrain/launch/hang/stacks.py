"""Gets the Python stacks of processes that may be stuck, from faulthandler or from py-spy."""

from __future__ import annotations

import json
import linecache
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fasttrain.launch.hang.heartbeats import HeartbeatRecord
from fasttrain.launch.hang.verdict import role_of, since_fork
from fasttrain.launch.process import procfs
from fasttrain.model.hang import Frame, Role, StuckProcess, StuckRank, stacks_file
from fasttrain.model.places import PACKAGE, WORKER_FOLDER

# Reads names as faulthandler writes them: in ASCII, with everything else escaped.


# Source: CPython 3.11, Python/traceback.c, _Py_DumpASCII: the shortest form, in lower case. A
# backslash of the name itself is not escaped.
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_LAST = 0x10FFFF  # of Unicode


def name(text: str) -> str:
    """Return a name with its escapes decoded; characters that can't be printed stay escaped."""
    return _ESCAPE.sub(_letter, text)


def path(text: str) -> str:
    """Return a path, decoded unless a file exists whose name only looks escaped."""
    return text if os.path.exists(text) else name(text)  # noqa: PTH110 - False for any text


def _letter(match: re.Match[str]) -> str:
    escape = match[0]
    number = int(match[match.lastindex or 0], 16)
    if number > _LAST or escape != _shortest(number):
        return escape
    letter = chr(number)
    return letter if letter.isprintable() and not letter.isascii() else escape


def _shortest(number: int) -> str:
    if number <= 0xFF:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"


# Gets the Python stacks of processes that may be stuck, from faulthandler or from py-spy.


Stack = tuple[Frame, ...]

ANSWER_S = 5.0  # faulthandler writes at once, unless the process can't run at all
WRITE_S = 20.0
LOOK_S = 0.01
PY_SPY_S = 20.0

# Source: CPython 3.11 Python/traceback.c, dump_frame and write_thread_id.
_HEAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
NO_PY_SPY = "it has no signal handler of fasttrain's, and py-spy is not installed"
_LIBRARIES = ("/site-packages/", "/dist-packages/")
_STDLIB = sysconfig.get_path("stdlib")


def by_signal(pid: int, signum: int, answers: Path) -> tuple[Stack, ...]:
    """Return the stacks that a process writes to ``answers`` at a signal, the main thread's first.

    Empty where it has no handler or does not answer. Only one process may be asked at a time,
    because all processes of a rank write to the same file.
    """
    if not signum or not procfs.catches(pid, signum):
        return ()  # the signal would end it
    before = _size(answers)
    try:
        _await_answer(pid, signum, answers, before)
        with answers.open("rb") as file:
            file.seek(before)
            return parse(file.read().decode(errors="replace"))
    except OSError:  # it has ended meanwhile, or its file is gone
        return ()


def by_py_spy(pid: int) -> tuple[tuple[Stack, ...], str]:
    """Return the stacks that py-spy sees, the main thread's first, or why there are none."""
    program = shutil.which("py-spy")
    if program is None:
        return (), NO_PY_SPY
    command = [program, "dump", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_S)
        threads = json.loads(done.stdout) if done.returncode == 0 else []
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return (), f"py-spy failed: {error}"
    if not threads:
        return (), f"py-spy failed: {' '.join(done.stderr.split())[:200]}"
    threads.sort(key=lambda thread: thread["os_thread_id"] != pid)
    return tuple(_without_start(list(map(_spied, thread["frames"]))) for thread in threads), ""


def parse(text: str) -> tuple[Stack, ...]:
    """Return the stacks that faulthandler wrote, first that of the thread in which it ran.

    That is the main thread: the kernel delivers a process' signal there unless it is blocked.
    """
    current: list[Stack] = []
    others: list[Stack] = []
    for head, frames in _threads(text):
        (current if head == "Current thread" else others).append(frames)
    # Threads are listed from the newest to the oldest.
    return (*current, *reversed(others))


def _threads(text: str) -> Iterator[tuple[str, Stack]]:
    head = ""
    frames: list[Frame] = []
    for line in text.splitlines():
        if match := _HEAD.match(line):
            if head:
                yield head, _without_start(frames)
            head, frames = match[1], []
        elif match := _FRAME.fullmatch(line):
            frames.append(
                frame(
                    path(match[1]),
                    int(match[2]),
                    name(match[3]),
                )
            )
    if head:
        yield head, _without_start(frames)


def _without_start(frames: list[Frame]) -> Stack:
    """Return a stack without the frames by which fasttrain started the script."""
    end = len(frames)
    while end and frames[end - 1].file.startswith((WORKER_FOLDER, "<")):
        end -= 1
    return tuple(frames[:end])


def frame(file: str, line: int, function: str) -> Frame:
    """Return a frame with its source line, and whether it is the user's code."""
    source = linecache.getline(file, line).strip()
    return Frame(_near(file), line, function, source, user=_is_users(file))


def _is_users(file: str) -> bool:
    of_library = any(folder in file for folder in _LIBRARIES)
    return not of_library and not file.startswith(("<", f"{_STDLIB}/", f"{PACKAGE}/"))


def _near(file: str) -> str:
    """Return a path relative to its library or the working directory, where it is below one."""
    if file.startswith("<"):
        return file
    for folder in (*_LIBRARIES, f"{_STDLIB}/", f"{PACKAGE.parent}/"):
        _, found, inside = file.rpartition(folder)
        if found:
            return inside
    try:
        relative = os.path.relpath(file)
    except OSError:  # the working directory is gone
        return file
    return file if relative.startswith("..") else relative


def _spied(data: dict[str, Any]) -> Frame:
    return frame(data["filename"], data["line"], data["name"])


def _await_answer(pid: int, signum: int, answers: Path, before: int) -> None:
    """Wait until the handler has begun to write and has returned."""
    blocked = procfs.blocking(pid, signum)  # threads that always block it, as those of torch do
    os.kill(pid, signum)
    started = time.monotonic()
    begun = False
    while not begun or procfs.blocking(pid, signum) - blocked:
        time.sleep(LOOK_S)
        begun = begun or _size(answers) > before
        if time.monotonic() - started > (WRITE_S if begun else ANSWER_S):
            return


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# Collects the stacks of all processes of all ranks.


MOST_PROCESSES = 64  # of a rank: each takes a fraction of a second to ask


def examine(running: Iterable[HeartbeatRecord], run_dir: Path) -> tuple[StuckRank, ...]:
    """Ask all processes of the ranks for their stacks, one after the other."""
    by_rank: defaultdict[int, list[HeartbeatRecord]] = defaultdict(list)
    for heartbeat in running:
        by_rank[heartbeat.address.rank].append(heartbeat)
    return tuple(_rank(rank, heartbeats, run_dir) for rank, heartbeats in sorted(by_rank.items()))


def _rank(rank: int, heartbeats: list[HeartbeatRecord], run_dir: Path) -> StuckRank:
    own = {heartbeat.address.pid: heartbeat.address.signal for heartbeat in heartbeats}
    parents = {pid: procfs.parent(pid) for pid in own}
    # The worker itself is the process that no other process of the rank has started.
    worker = next((pid for pid in own if parents[pid] not in own), next(iter(own)))
    answers = run_dir / stacks_file(rank)
    processes = []
    for pid in procfs.family(worker)[:MOST_PROCESSES]:
        # A forked process answers to the signal of the one that it was forked from.
        signum = own.get(pid, own[worker])
        if (found := _process(pid, signum, answers, own=pid == worker)) is not None:
            processes.append(found)
    return StuckRank(rank, max(heartbeat.steps for heartbeat in heartbeats), tuple(processes))


def _process(pid: int, signum: int, answers: Path, *, own: bool) -> StuckProcess | None:
    """Return one process; None for a program that has no Python stack, or only serves others."""
    threads, missing = by_signal(pid, signum, answers), ""
    if not threads:
        if not own and not procfs.is_of_multiprocessing(pid):
            return None
        threads, missing = by_py_spy(pid)
    role: Role = "rank" if own else role_of(threads[0] if threads else ())
    if role == "loader worker":
        threads = (since_fork(threads[0]), *threads[1:])
    return StuckProcess(pid, role, threads, missing)
