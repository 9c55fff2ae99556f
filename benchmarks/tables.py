"""The heading and the table that every benchmark prints."""

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


def processor() -> str:
    """Return the processor's name, on Linux from /proc/cpuinfo."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def granted_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def print_heading() -> None:
    """Print machine, versions and command; torch is not imported."""
    print(f"machine: {processor()}, {granted_cores()} cores, {platform.platform()}")
    print(f"python:  {platform.python_version()}, torch {version('torch')}")
    print(f"command: {shlex.join(['python', *sys.argv])}\n", flush=True)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of equal length; the first row is the head, the first column is text."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([row[0].ljust(len(first)), *rest]))
        if number == 0:
            print("  ".join("-" * width for width in widths))
