"""The programs in inductor's cache: written whole, and made again where a killed run left a part.

Compiler and linker write a program where it is looked for. If they are killed, a program cut short,
often of 0 bytes, stays there for all later runs, which can't load it and would run eagerly.

Source: torch/_inductor/cpp_builder.py and codecache.py, torch 2.13. Whether a program is there is
always asked by ``os.path.exists(builder.get_target_file_path())``, and made by ``build()`` if not.
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
MENDED = "programs that a killed run had left cut short in the cache were compiled again"


def keep_whole(note: Callable[[str], None], undo: ExitStack) -> None:
    """Have each program of the cache written under another name first, and parts removed.

    Args:
        note: Takes what is to be told if there were any.
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
            return original(builder)  # elsewhere, as on a build farm
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
        with suppress(OSError):  # most of all: it isn't there
            program = Path(target)
            if _cut_short(program) and not _is_open(program):
                program.unlink()
                note(MENDED)
        return target

    return get_target_file_path


def _is_open(path: Path) -> bool:
    """Return whether anybody may have a file open: it isn't cut short, but written at the moment.

    Plain Python processes use the same cache and write in place. Linux grants a lease for writing
    only on a file that is open nowhere else.
    """
    with path.open("rb") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # to be ignored; SIGIO would kill
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except (OSError, AttributeError):  # it is open, or there are no leases
            return True
    return False


def _cut_short(path: Path) -> bool:
    """Return whether a file that a compiler wrote is empty, or a program without its end.

    The table of sections is the last thing in a program, and its header says where that ends.
    """
    size = path.stat().st_size
    if size == 0 or path.suffix not in PROGRAMS:
        return size == 0
    with path.open("rb") as file:
        header = file.read(ELF_HEADER_BYTES)
    if not header.startswith(ELF):
        return not header.strip(b"\0")  # a hole; other systems have other formats
    if len(header) < ELF_HEADER_BYTES:
        return True
    order = "<" if header[5] == 1 else ">"
    (offset,) = struct.unpack_from(f"{order}Q", header, 0x28)
    entry_bytes, entries = struct.unpack_from(f"{order}HH", header, 0x3A)
    return bool(offset == 0 or size < offset + entry_bytes * entries)
