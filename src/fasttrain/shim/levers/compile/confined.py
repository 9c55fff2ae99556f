"""Keeps a forked copy of the process from changing what it shares with others.

Descriptors are replaced elsewhere. What remains is memory that is mapped by several processes, and
files that the model opens by their names, in Python or in C, as SQLite does with its journal.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

CACHE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
TEMPORARY = "copies"  # folder in that one
# Source: include/uapi/linux/landlock.h, and Documentation/userspace-api/landlock.rst of Linux 6.18.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on all architectures but Alpha
_VERSION, _PATH_BENEATH = 1, 1
_WRITE, _TRUNCATE = 1 << 1, 1 << 14
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_REFER = 1 << 13  # to move a file to another folder
_BIND_AND_CONNECT = 0b11
_SET_NO_NEW_PRIVILEGES = 38  # of prctl, without which only root may restrict itself


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def confine() -> None:
    """Have this process write nothing that others have, for good."""
    _only_read_shared_memory()
    folder = os.environ.get(CACHE_FOLDER) or tempfile.gettempdir()
    with suppress(OSError):
        temporary = Path(folder, TEMPORARY)
        temporary.mkdir(parents=True, exist_ok=True)
        # The script may work beneath the usual one, as in the scratch folder of a cluster's job.
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        _write_beneath(folder, *_headers())


def _headers() -> list[str]:
    """Return where inductor keeps precompiled headers, if it has chosen that in the parent."""
    codecache = sys.modules.get("torch._inductor.codecache")
    chosen = getattr(codecache, "_HEADER_DIR", None)
    if chosen is None:
        return []
    Path(chosen).mkdir(parents=True, exist_ok=True)
    return [chosen]


def _only_read_shared_memory() -> None:
    """End this process by a signal if it writes to memory that it shares."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _ = line.split(maxsplit=2)
        if permissions[1] == "w" and permissions[3] == "s":
            first, end = (int(address, 16) for address in addresses.split("-"))
            libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.PROT_READ)


def landlock_version() -> int:
    """Return the version of Landlock's interface.

    Raises:
        OSError: The kernel hasn't Landlock (before Linux 5.13), or forbids it.
    """
    return _call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)


def why_unconfined() -> str:
    """Return why a process can't be confined to writing beneath some folders; empty if it can."""
    try:
        landlock_version()
    except OSError as error:
        return f"this system has no Landlock ({error.strerror})"
    return ""


def _write_beneath(*folders: str) -> None:
    """Have this process write files in some folders alone, and reach no other one by TCP.

    Raises:
        OSError: The kernel hasn't Landlock (before Linux 5.13), or forbids it.
    """
    version = landlock_version()
    files = _WRITE | _REMOVE_AND_MAKE
    files |= (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    rules = _Ruleset(files, _BIND_AND_CONNECT if version >= 4 else 0)
    size = ctypes.sizeof(rules) if version >= 4 else ctypes.sizeof(ctypes.c_uint64)
    ruleset = _call(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), 0)
    for folder in (*folders, os.devnull):
        allowed = files if Path(folder).is_dir() else files & (_WRITE | _TRUNCATE)
        opened = os.open(folder, os.O_PATH)
        beneath = _Beneath(allowed, opened)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(beneath), 0)
        os.close(opened)
    ctypes.CDLL(None).prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _call(number: int, *args: object) -> int:
    """Make a system call that libc has no function for."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(number), *args))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
