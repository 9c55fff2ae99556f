"""The mounts of this process: lists them, and makes others, by the kernel's own calls.

Source: Linux 6.18, include/uapi/linux/mount.h and include/uapi/asm-generic/unistd.h, whose numbers
    hold on every architecture that torch is built for; proc_pid_mountinfo(5); mount_setattr(2)
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC = 1, 4, 1, 1
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_MOUNT_ATTR_RDONLY, _MS_PRIVATE = 1, 1 << 18
_MOUNT_ATTRS = {"nosuid": 2, "nodev": 4, "noexec": 8}
# Kinds of file systems that hold no files of a user.
_PSEUDO = frozenset((
    "autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts",
    "devtmpfs", "efivarfs", "fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore",
    "rpc_pipefs", "securityfs", "selinuxfs", "sysfs", "tracefs",
))  # fmt: skip

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo.

    Attributes:
        path: Where it is mounted.
        kind: The kind of its file system, such as ``ext4``.
        options: Those of the mount and of its file system together.
    """

    path: Path
    kind: str
    options: frozenset[str]

    @property
    def read_only(self) -> bool:
        """True if nothing can be written there."""
        return "ro" in self.options

    @property
    def holds_files(self) -> bool:
        """True if a user may have files there, and write them."""
        return not self.read_only and self.kind not in _PSEUDO and is_folder(self.path)

    @property
    def attributes(self) -> int:
        """What it forbids, as an argument of `overlay`."""
        return sum(_MOUNT_ATTRS.get(it, 0) for it in self.options)


def is_folder(path: Path) -> bool:
    """True if a path leads to a folder that this user can reach."""
    try:
        return path.is_dir()
    except OSError:
        return False


def mounts() -> dict[int, Mount]:
    """Return all mounts by their ID, also those that others hide."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_bytes().split(b"\n")[:-1]:
        before, _, after = line.partition(b" - ")
        number, _, _, _, point, own, *_ = before.split(b" ")
        kind, *_, whole = after.split(b" ")
        name = re.sub(rb"\\([0-7]{3})", lambda it: bytes([int(it[1], 8)]), point)
        options = frozenset(os.fsdecode(own).split(",") + os.fsdecode(whole).split(","))
        found[int(number)] = Mount(Path(os.fsdecode(name)), os.fsdecode(kind), options)
    return found


def mount_id(path: Path) -> int:
    """Return the ID of the mount on which a path lies, or -1 if it can't be reached."""
    with suppress(OSError), _opened(path, os.O_NOFOLLOW) as descriptor:
        text = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        return int(text.partition("mnt_id:")[2].split()[0])
    return -1


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def checked(name: str, result: int) -> int:
    """Return the result of a function of libc.

    Raises:
        OSError: If it failed; ``name`` stands in the place of a file name.
    """
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def _call(name: str, number: int, *arguments: object) -> int:
    words = (ctypes.c_long(it) if isinstance(it, int) else it for it in arguments)
    return checked(name, _LIBC.syscall(ctypes.c_long(number), *words))


def can_change() -> bool:
    """True if the kernel has mount_setattr, which is there since Linux 5.12."""
    try:
        _call("mount_setattr", _MOUNT_SETATTR, -1, b"", 0, None, 0)
    except OSError as error:  # of the arguments, which are none
        return error.errno != errno.ENOSYS
    return True


def make_private() -> None:
    """Keep changes of this namespace's mounts from others, and those of others from it."""
    _change_all(0, _MS_PRIVATE)


def make_read_only() -> None:
    """Make all mounts read-only."""
    _change_all(_MOUNT_ATTR_RDONLY, 0)


def _change_all(attributes: int, propagation: int) -> None:
    change = (ctypes.c_uint64 * 4)(attributes, 0, propagation, 0)  # struct mount_attr
    size = ctypes.sizeof(change)
    _call("mount_setattr", _MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, change, size)


def cloned(path: Path, *, recursive: bool) -> int:
    """Return a descriptor of a second mount of a folder or file, which is attached nowhere yet.

    Args:
        path: The folder or file.
        recursive: Whether it comes with what is mounted beneath.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    return _call(f"open_tree {path}", _OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags)


def attach(mount: int, path: Path) -> None:
    """Put a mount over a folder or file."""
    arguments = (mount, b"", _AT_FDCWD, os.fsencode(path), _MOVE_MOUNT_F_EMPTY_PATH)
    _call(f"move_mount {path}", _MOVE_MOUNT, *arguments)


def overlay(lower: Path, layer: Path, attributes: int, options: dict[str, str]) -> int:
    """Return a descriptor of an overlay's mount, which is attached nowhere yet.

    Args:
        lower: The folder that it shows.
        layer: A folder that holds the folders ``upper`` and ``work``.
        attributes: Those of the mount.
        options: Those of the overlay; flags have an empty value.
    """
    with ExitStack() as stack:
        context = _call("fsopen overlay", _FSOPEN, b"overlay", _FSOPEN_CLOEXEC)
        stack.callback(os.close, context)
        # By descriptors: a comma, colon or backslash in a path would have to be escaped, and before
        # Linux 6.5 a comma can't be.
        layers = {"lowerdir": lower, "upperdir": layer / "upper", "workdir": layer / "work"}
        for name, path in layers.items():
            descriptor = stack.enter_context(_opened(path, os.O_DIRECTORY | os.O_NOFOLLOW))
            _configure(context, _FSCONFIG_SET_STRING, name, f"/proc/self/fd/{descriptor}")
        for name, value in options.items():
            _configure(context, _FSCONFIG_SET_STRING if value else _FSCONFIG_SET_FLAG, name, value)
        _configure(context, _FSCONFIG_CMD_CREATE)
        return _call("fsmount overlay", _FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes)


def _configure(context: int, command: int, name: str = "", value: str = "") -> None:
    words = (name.encode() or None, value.encode() or None)
    try:
        _call(f"overlay {name}".strip(), _FSCONFIG, context, command, *words, 0)
    except OSError as error:
        with suppress(OSError):  # the kernel says more since Linux 6.5
            error.strerror = f"{error.strerror}, {os.read(context, 1024).decode().strip()}"
        raise
