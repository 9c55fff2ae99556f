"""What /proc shows of processes that are not our children; of ended ones, nothing.

Source: https://man7.org/linux/man-pages/man5/proc.5.html (man-pages 6.9), for the files and fields.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fasttrain.processes.table import Table, descendants, table

# All descendants of this process, including those that lost their parents.


PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Family:
    """The descendants of this process that were not there before.

    Attributes:
        before: Those that were.
    """

    def __init__(self) -> None:
        self.before = {*descendants([os.getpid()], table()).values()}

    def find(self, *spared: int) -> Table:
        """Return those that are alive.

        A shell may have become this process by ``exec``; its children are not part of the run.

        Args:
            spared: Processes that are left out, with their descendants.
        """
        processes = table()
        for process in self.before:
            if processes.get(process.pid) == process:
                del processes[process.pid]
        for pid in spared:
            processes.pop(pid, None)
        return descendants([os.getpid()], processes)


@contextmanager
def adopting() -> Iterator[None]:
    """Become the parent of descendants whose own parent ends, in init's place (Linux only).

    So nothing that a script starts can escape from its launcher, whatever it changes of its
    environment, session or name.
    """
    if sys.platform != "linux":
        yield
        return
    import ctypes

    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# What /proc shows of processes that are not our children; of ended ones, nothing.


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# System calls that wait; connect, accept, send and receive are named "network".
# Source: Linux 6.9, arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h
_CALLS: dict[str, dict[int, str]] = {
    "x86_64": {0: "read", 61: "wait", 247: "wait_id"}
    | dict.fromkeys((42, 43, 44, 45, 46, 47, 288), "network"),
    "aarch64": {63: "read", 260: "wait", 95: "wait_id"}
    | dict.fromkeys((202, 203, 206, 207, 211, 212, 242), "network"),
}


class Call(NamedTuple):
    """A system call that a thread is in.

    Attributes:
        name: ``read``, ``wait``, ``network``, or empty for others and where it isn't known.
        argument: Its first argument: the descriptor of a read, the child of a wait, or -1 for any.
    """

    name: str = ""
    argument: int = -1


def family(pid: int) -> list[int]:
    """Return a process and its descendants, parents before their children."""
    found, index = [pid], 0
    while index < len(found):
        for children in Path(f"/proc/{found[index]}/task").glob("*/children"):
            found += map(int, _read(children).split())
        index += 1
    return found


def parent(pid: int) -> int:
    """Return the parent of a process; 0 once it has ended."""
    fields = _fields(pid)
    return int(fields[1]) if fields else 0


def cpu_s(pid: int) -> float:
    """Return the processor time of a process and of the children that it has waited for, in s."""
    fields = _fields(pid)
    return sum(map(int, fields[11:15])) / _TICKS_PER_S if fields else 0.0


def is_of_multiprocessing(pid: int) -> bool:
    """True if multiprocessing has started a process, other than its own resource tracker."""
    command = _read(Path(f"/proc/{pid}/cmdline"))
    return "multiprocessing." in command and "resource_tracker" not in command


def is_stopped(pid: int) -> bool:
    """True if a process is stopped, by a signal or by a debugger."""
    return _fields(pid)[:1] in (["T"], ["t"])


def waits_for_disk(pid: int, *, any_thread: bool = False) -> bool:
    """True if the main thread is in uninterruptible sleep (state D), as for disks and NFS.

    Args:
        pid: The process.
        any_thread: Whether another thread of it counts, too.
    """
    stats = Path(f"/proc/{pid}/task").glob("*/stat") if any_thread else [_stat(pid)]
    return any(_split(path)[:1] == ["D"] for path in stats)


def runs(pid: int) -> bool:
    """True if the main thread computes, or would if a processor were free."""
    return _fields(pid)[:1] == ["R"]


def call(pid: int) -> Call:
    """Return the system call that the main thread is in; an empty one where we may not see it."""
    number, *arguments = _read(Path(f"/proc/{pid}/syscall")).split() or [""]
    if not number.isdecimal() or not arguments:  # it runs
        return Call()
    name = _CALLS.get(platform.machine(), {}).get(int(number), "")
    if name == "wait_id":  # its first argument is no child
        return Call("wait")
    argument = int(arguments[0], 16)
    return Call(name, argument if argument < 1 << 31 else -1)


def transferred_bytes(pid: int) -> int:
    """Return the bytes that the main thread, or else all threads, have read and written."""
    return _bytes(_read(Path(f"/proc/{pid}/task/{pid}/io"))) or all_bytes(pid)


def all_bytes(pid: int) -> int:
    """Return the bytes that all threads of a process have read and written."""
    return _bytes(_read(Path(f"/proc/{pid}/io")))


def _bytes(text: str) -> int:
    """Return the bytes of finished calls (rchar, wchar) and those that disks have got so far."""
    values = dict(line.split(": ") for line in text.splitlines())
    return sum(int(values.get(name, 0)) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))


def catches(pid: int, signum: int) -> bool:
    """True if a process has a handler for a signal, which would end it otherwise."""
    return _in_mask(Path(f"/proc/{pid}/status"), "SigCgt:", signum)


def blocking(pid: int, signum: int) -> set[str]:
    """Return the threads of a process that block a signal, as one does while it handles it."""
    threads = Path(f"/proc/{pid}/task").glob("*/status")
    return {path.parent.name for path in threads if _in_mask(path, "SigBlk:", signum)}


def _in_mask(status: Path, name: str, signum: int) -> bool:
    for line in _read(status).splitlines():
        if line.startswith(name):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def _fields(pid: int) -> list[str]:
    """Return the fields of ``stat`` after the name, which may hold spaces and parentheses."""
    return _split(_stat(pid))


def _stat(pid: int) -> Path:
    return Path(f"/proc/{pid}/stat")


def _split(stat: Path) -> list[str]:
    return _read(stat).rpartition(") ")[2].split()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (OSError, ProcessLookupError):  # it has ended meanwhile, or we may not see it
        return ""
