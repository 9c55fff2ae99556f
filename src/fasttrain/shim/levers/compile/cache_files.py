"""Protects the programs in inductor's cache from runs that are killed while they compile.

Compiler and linker write a program under its final name. If they are killed, a truncated program,
often of 0 bytes, stays there for all later runs, which can't load it and would run eagerly. So each
program is written under another name first, and truncated ones are removed.

Source: torch/_inductor/cpp_builder.py and codecache.py, torch 2.13. inductor always checks
``os.path.exists(builder.get_target_file_path())``, and calls ``build()`` if that is False.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import os
import signal
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from fasttrain.shim.hooks import patching

ELF = b"\x7fELF"
ELF_HEADER_BYTES = 64  # of the 64-bit format
PROGRAMS = (".so", ".o")
MENDED = "programs that a killed run had left truncated in the cache were compiled again"


def keep_whole(note: Callable[[str], None], undo: ExitStack) -> None:
    """Have inductor write each program under another name first, and remove truncated ones.

    Args:
        note: Called with a sentence for the receipt if there were truncated ones.
        undo: Takes the inverse.
    """
    with suppress(ImportError):  # before torch 2.4
        builder: Any = importlib.import_module("torch._inductor.cpp_builder").CppBuilder
        parts_removed = functools.partial(_parts_removed, note)
        patching.wrap(builder, "build", _written_whole, undo)
        patching.wrap(builder, "get_target_file_path", parts_removed, undo)


def _written_whole(original: Any) -> Any:
    @functools.wraps(original)
    def build(builder: Any) -> Any:
        target, output = str(builder._target_file), getattr(builder, "_output", "")
        if not (Path(target).is_absolute() and output.endswith(f" {target}")):
            return original(builder)  # built elsewhere, as on a build farm
        part = Path(f"{target}.{os.getpid()}.part")
        builder._output = f"{output.removesuffix(target)}{part}"
        try:
            built = original(builder)
            part.replace(target)
        finally:
            builder._output = output
            part.unlink(missing_ok=True)
        return built

    return build


def _parts_removed(note: Callable[[str], None], original: Any) -> Any:
    @functools.wraps(original)
    def get_target_file_path(builder: Any) -> Any:
        target = original(builder)
        with suppress(OSError):  # usually because it isn't there
            program = Path(target)
            if _cut_short(program) and not _is_open(program):
                program.unlink()
                note(MENDED)
        return target

    return get_target_file_path


def _is_open(path: Path) -> bool:
    """True if a process may have the file open: it is being written, and not truncated.

    Runs without fasttrain use the same cache, and write in place. Linux grants a write lease only
    on a file that is open nowhere else.
    """
    with path.open("rb") as file:
        try:
            # When another process opens the file meanwhile, the kernel sends a signal: SIGURG,
            # which is ignored, and not the default SIGIO, which would kill this process.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except (OSError, AttributeError):  # it is open, or the system has no leases
            return True
    return False


def _cut_short(path: Path) -> bool:
    """True if a file that a compiler wrote is empty, or an ELF program that lacks its end.

    The section table comes last in a program, and the ELF header holds its offset and size.
    """
    size = path.stat().st_size
    if size == 0 or path.suffix not in PROGRAMS:
        return size == 0
    with path.open("rb") as file:
        header = file.read(ELF_HEADER_BYTES)
    if not header.startswith(ELF):
        return not header.strip(b"\0")  # only zeros; else another system's format
    if len(header) < ELF_HEADER_BYTES:
        return True
    order = "<" if header[5] == 1 else ">"
    (offset,) = struct.unpack_from(f"{order}Q", header, 0x28)
    entry_bytes, entries = struct.unpack_from(f"{order}HH", header, 0x3A)
    return bool(offset == 0 or size < offset + entry_bytes * entries)
