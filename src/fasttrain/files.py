"""The files of a run: written atomically, private, in folders that no other user can change."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import IO, NamedTuple, TypeVar

from fasttrain.model.codec import loads

# Read files without blocking for ever on what may lie in the place of one, such as a pipe.
#
# Not a part of `codec`: planning, which is pure, imports that one and must not import os.


T = TypeVar("T")
MOST_BYTES = 256 << 20  # of a file to load: the plan of the largest run has some 10 MiB


def load(kind: type[T], path: Path) -> T:
    """Return a dataclass built from a JSON file.

    Raises:
        OSError: If the file can't be read, is not a regular file, or larger than any of ours.
        CodecError: If it is not JSON, or does not fit the dataclass.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return loads(kind, file.read())


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file, and nothing else: opening a pipe that has no writer would block.

    Raises:
        OSError: If the file can't be opened, or is not a regular file.
    """
    file = open(path, "rb", opener=without_waiting)  # noqa: SIM115 - Path.open takes no opener
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def without_waiting(path: str, flags: int) -> int:
    """Open a file as `open` does, without waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


# Write files that only their owner can read, and never leave half a file.


# Bound at import: in a worker, os.replace and os.unlink may be patched to keep other ranks than 0
# from writing the script's files.
_replace, _unlink = os.replace, os.unlink
RESERVED_BYTES = 64 << 10  # an exception with its calls takes some 8 KiB
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def write_private(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write a file atomically: whole or not at all, even if this process is killed.

    Args:
        path: The file.
        content: Its content; lone surrogates become question marks.
        durable: Whether it must survive a power failure too, which takes an fsync.

    Raises:
        OSError: If it can't be written; nothing of it is left.
    """
    draft = _draft(path)
    descriptor = os.open(draft, _FLAGS, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode(errors="replace"))
            file.truncate()  # only after the write: until then the reserved space must stay ours
            file.flush()
            if durable:
                os.fsync(descriptor)
        _replace(draft, path)
    except OSError:
        _unlink(draft)  # it takes space on a disk that may be full
        raise


def reserve(path: Path, size_bytes: int = RESERVED_BYTES) -> None:
    """Reserve disk space so that `write_private` can write this file on a full disk.

    No-op on a system without posix_fallocate, such as macOS.

    Raises:
        OSError: If there is no space even now.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    draft = _draft(path)
    descriptor = os.open(draft, _FLAGS, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError:
        _unlink(draft)
        raise
    finally:
        os.close(descriptor)


def give_back(path: Path) -> None:
    """Free the space that was reserved for a file, if any."""
    with suppress(OSError):  # removed already, perhaps with the run directory
        _unlink(_draft(path))


def _draft(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def remove_whole(folder: Path) -> None:
    """Remove a folder of this user, if it is there, with all that is in it.

    Raises:
        OSError: If it can't be removed, or is not a folder.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        # An overlay leaves a folder of mode 0, and a script may leave read-only ones.
        for around, names, _ in os.walk(folder):
            for name in names:
                _open_up(Path(around, name))
        shutil.rmtree(folder)


def _open_up(folder: Path) -> None:
    """Let the owner use a folder; a link to one is left alone."""
    mode = folder.lstat().st_mode
    if stat.S_ISDIR(mode) and mode & stat.S_IRWXU != stat.S_IRWXU:
        folder.chmod(stat.S_IRWXU)


class Lines:
    """A file to which lines are appended, each by one write, which the kernel puts at the end.

    Only the last line can be incomplete, after a SIGKILL between two pages of a write, or on a full
    disk; the next line then starts on a line of its own.
    Source: Linux 6.1, mm/filemap.c, generic_perform_write, fatal_signal_pending
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cut: bool | None = None

    def add(self, line: str) -> None:
        """Append a line, given without its newline.

        Raises:
            OSError: If it can't be written, or only in part.
        """
        if self._cut is None:
            self._cut = _ends_amid_line(self._path)
        descriptor = open_log(self._path)
        try:
            left = (b"\n" if self._cut else b"") + line.encode() + b"\n"
            while left:
                left = left[os.write(descriptor, left) :]
                self._cut = bool(left)
        finally:
            os.close(descriptor)


def _ends_amid_line(path: Path) -> bool:
    """Return True if a file ends with an incomplete line, as a full disk or SIGKILL leaves it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        size = os.fstat(descriptor).st_size
        return bool(size) and os.pread(descriptor, 1, size - 1) != b"\n"
    finally:
        os.close(descriptor)


def open_log(path: Path | str) -> int:
    """Return a descriptor that appends to a private file.

    Raises:
        OSError: If it can't be opened.
    """
    return os.open(path, _FLAGS | os.O_APPEND, 0o600)


HIGH_DESCRIPTOR = 200  # below the 256 that macOS allows by default; a script's begin at 3


def out_of_the_way(descriptor: int) -> int:
    """Move a descriptor to a high number, and return that; the script's files keep the low ones.

    A script that closes all descriptors, as daemons do, opens its own files under the low numbers:
    what a worker wrote there would be written into them.
    """
    import fcntl

    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR)
    except OSError:  # the limit of open files is lower; the low number works as well
        return descriptor
    os.close(descriptor)
    return high


# Less free space than this is reported. One checkpoint of 100 million parameters with AdamW's state
# in fp32 is 1.2 GB.
FEW_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Room:
    """Free space of a file system for this user; None if the file system doesn't report it.

    Attributes:
        free_bytes: Bytes.
        free_files: Inodes: new files, folders and links.
    """

    free_bytes: int | None
    free_files: int | None


def room_at(folder: Path) -> Room:
    """Return the free space at an existing folder; a quota may allow less.

    File systems without a limit report a total of 0, as btrfs does for inodes.
    Source: statvfs(3); Linux, fs/btrfs/super.c, btrfs_statfs, which leaves f_files at 0

    Raises:
        OSError: If the file system can't be queried.
    """
    found = os.statvfs(folder)
    return Room(
        free_bytes=found.f_bavail * found.f_frsize if found.f_blocks else None,
        free_files=found.f_favail if found.f_files else None,
    )


# Whether another user could have written what a folder holds, or could replace the folder.
#
# Source: OpenSSH 9.6, misc.c, safe_path. It refuses any parent that a group may write to. On
# clusters most projects share such a folder, so here a group is only a warning.


MOST_LINKS = 40  # as many as Linux follows; Source: path_resolution(7)

Step = tuple[Path, os.stat_result]


def steps(path: Path, links: int = 0) -> Iterator[Step]:
    """Yield the existing folders and links on the way to an absolute path, the path included.

    Raises:
        OSError: If links form a loop, or a part of the path is not a folder.
    """
    if links > MOST_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    for step in (*reversed(path.parents), path):
        try:
            found = step.lstat()
        except FileNotFoundError:
            return
        yield step, found
        if stat.S_ISLNK(found.st_mode):
            yield from steps(step.parent / step.readlink(), links + 1)


class Danger(NamedTuple):
    """Why another user may control a path, and the command that ends it, if there is one."""

    why: str
    mend: str = ""


def refused_way(path: Path, beside: Path | None = None) -> Danger | None:
    """Return why any user could make a path lead elsewhere; None if that is impossible.

    The owners and groups of its parents don't count here: see `doubts`.

    Args:
        path: The path to check.
        beside: A folder that is trusted anyway: parents that both share are left to `doubts`, and
            what is below it where it `is_open`.

    Raises:
        OSError: As `steps`.
    """
    way = list(steps(path))
    if path.exists():
        del way[-1]  # the folder itself, which is judged when it is open
    beside_it = {step for step, _ in steps(beside)} if beside else set()
    below = beside if beside and is_open(beside) else None
    for step, found in way:
        trusted = step in beside_it or (below and step.is_relative_to(below))
        everybody = not trusted and _is_everybodys(found)
        if stat.S_ISLNK(found.st_mode):
            if found.st_uid not in (0, os.geteuid()):
                return Danger(owned(f"the link {step}", found.st_uid))
        elif everybody:
            why = f"{everybodys(step)}, and so replace what is in it"
            return Danger(why, f"chmod o-w {quote(str(step))}")
    return None


def refused_folder(path: Path, found: os.stat_result) -> Danger | None:
    """Return why others may write to a folder; None if only the user may."""
    if found.st_uid != os.geteuid():
        return Danger(owned("it", found.st_uid))
    if found.st_mode & stat.S_IWOTH:
        return Danger(everybodys("it"), f"chmod go-w {quote(str(path))}")
    if _is_shared(found):
        return Danger(shared("it", found.st_gid), f"chmod g-w {quote(str(path))}")
    return None


def is_open(folder: Path) -> bool:
    """Return True if everybody could replace what is in a folder, whatever the modes of that are.

    Raises:
        OSError: If it can't be examined.
    """
    return _is_everybodys(folder.stat())


def refused(path: Path) -> Danger | None:
    """Return why the files of a folder may be another user's; None if they can't be.

    A folder that doesn't exist yet is judged by its parents.

    Raises:
        OSError: As `steps`.
    """
    if danger := refused_way(path):
        return danger
    try:
        return refused_folder(path, path.stat())
    except FileNotFoundError:
        return None


def doubts(path: Path, cwd: Path) -> list[str]:
    """Return a warning for each owner or group that could replace a folder and isn't refused.

    Those who could replace the working directory are left out: they could change the script anyway.
    Of the folders that everybody may write to, the outermost one is named.

    Raises:
        OSError: As `steps`.
    """
    trusted = {step for step, _ in steps(cwd)}
    found = {
        step: seen
        for step, seen in steps(path.parent)
        if step not in trusted or _is_everybodys(seen)
    }
    outermost = next((step for step, seen in found.items() if _is_everybodys(seen)), None)
    return [
        why
        for step, seen in found.items()
        if (why := _doubt(step, seen)) and (step == outermost or not _is_everybodys(seen))
    ]


def _doubt(step: Path, found: os.stat_result) -> str:
    if stat.S_ISLNK(found.st_mode):
        return ""
    if _is_everybodys(found):
        return everybodys(step)
    if found.st_uid not in (0, os.geteuid()):
        return owned(step, found.st_uid)
    if _is_shared(found) and not found.st_mode & stat.S_ISVTX:
        return shared(step, found.st_gid)
    return ""


def everybodys(what: Path | str) -> str:
    """Return that everybody may write to something."""
    return f"everybody may write to {what}"


def shared(what: Path | str, gid: int) -> str:
    """Return which group may write to something."""
    return f"the group {_group(gid)} may write to {what}"


def owned(what: Path | str, uid: int) -> str:
    """Return whom something belongs to."""
    return f"{what} belongs to {user(uid)}"


def _is_everybodys(found: os.stat_result) -> bool:
    return bool(found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX)


def _is_shared(found: os.stat_result) -> bool:
    """Return True if a group of more than one user may write.

    A group with the same name as its user is private to that user, which makes a umask of 002
    usable. Source: login.defs(5), USERGROUPS_ENAB.
    """
    if not found.st_mode & stat.S_IWGRP:
        return False
    try:
        me = pwd.getpwuid(os.geteuid())
        return found.st_gid != me.pw_gid or grp.getgrgid(found.st_gid).gr_name != me.pw_name
    except KeyError:  # in a container the user often has no entry in /etc/passwd
        return True


def user(uid: int) -> str:
    """Return a user's name, or ``user UID`` if it has none on this machine."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
