"""What Linux tells about processes that are not ours to wait for; gone ones give nothing.

Source: https://man7.org/linux/man-pages/man5/proc.5.html (man-pages 6.9), for the files and fields.
"""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """Give a process and all that descend from it, parents before their children."""
    found, index = [pid], 0
    while index < len(found):
        for children in Path(f"/proc/{found[index]}/task").glob("*/children"):
            found += map(int, _read(children).split())
        index += 1
    return found


def parent(pid: int) -> int:
    """Give the parent of a process; 0 when it is gone."""
    fields = _fields(pid)
    return int(fields[1]) if fields else 0


def cpu_s(pid: int) -> float:
    """Give the processor time of a process and of the children that it has waited for, in s."""
    fields = _fields(pid)
    return sum(map(int, fields[11:15])) / _TICKS_PER_S if fields else 0.0


def is_of_multiprocessing(pid: int) -> bool:
    """Whether multiprocessing has started a process by its command line, and not to serve it."""
    command = _read(Path(f"/proc/{pid}/cmdline"))
    return "multiprocessing." in command and "resource_tracker" not in command


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or by a debugger."""
    return _fields(pid)[:1] in (["T"], ["t"])


def transferred_bytes(pid: int) -> int:
    """Give what the main thread has read and written, or all threads where that is not told."""
    text = _read(Path(f"/proc/{pid}/task/{pid}/io")) or _read(Path(f"/proc/{pid}/io"))
    values = dict(line.split(": ") for line in text.splitlines())
    return int(values.get("rchar", 0)) + int(values.get("wchar", 0))


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    return _in_mask(Path(f"/proc/{pid}/status"), "SigCgt:", signum)


def blocking(pid: int, signum: int) -> set[str]:
    """Give the threads of a process that block a signal, as one does while it handles it."""
    threads = Path(f"/proc/{pid}/task").glob("*/status")
    return {path.parent.name for path in threads if _in_mask(path, "SigBlk:", signum)}


def _in_mask(status: Path, name: str, signum: int) -> bool:
    for line in _read(status).splitlines():
        if line.startswith(name):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def _fields(pid: int) -> list[str]:
    """Give the fields of ``stat`` from the state on, behind the name, which may hold anything."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(") ")[2].split()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (OSError, ProcessLookupError):  # it has ended meanwhile, or is not ours to see
        return ""
