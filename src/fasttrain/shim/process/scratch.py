"""Redirects what a process writes into a scratch folder, by a mount namespace of its own.

Every mount becomes read-only, and overlay file systems cover the folders in which a script usually
writes. The kernel keeps what is changed there in the scratch folder, whatever wrote it: Python, a C
library or a child process. No other process sees it, and it ends with the last of these.

A script that runs so can see these differences:

- A file that it opens for writing is copied first, whole. A descriptor that was opened for reading
  before that goes on showing the original.
- ``fsync`` returns at once, as nothing of this is to last.
- Sockets and named pipes that other programs have made in a covered folder, such as those of CUDA
  MPS or of an ssh agent, can't be reached, unless the caller keeps their folder.
- Without root's rights, ``os.rename`` of a folder that was there before raises EXDEV, as between
  two file systems; ``shutil.move`` copies it then. Files of other users in a covered folder can't
  be changed, though their mode may permit it. Programs that are setuid root don't get its rights.

Source: Linux 6.18, Documentation/filesystems/overlayfs.rst, "Non-standard behavior";
    user_namespaces(7); mount_namespaces(7), "Restrictions on mount namespaces"
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fasttrain.shim.process import mounts
from fasttrain.shim.process.mounts import Mount, checked

# Source: Linux 6.18, include/uapi/linux/sched.h, capability.h and prctl.h
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_CAPABILITY_VERSION_3 = 0x20080522
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24

_ROOT = Path("/")
_SPECIAL = (Path("/dev"), Path("/proc"), Path("/sys"))  # these stay as they are
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
_MOST_PARTS = 256  # of one folder that can't be covered as a whole
_SWITCHES = {  # and their values when they are off
    "kernel.unprivileged_userns_clone": "0",
    "user.max_user_namespaces": "0",
    "kernel.apparmor_restrict_unprivileged_userns": "1",
}

_LIBC = ctypes.CDLL(None, use_errno=True)


class CannotIsolate(Exception):  # noqa: N818 - a state of the machine, not an error of the caller's
    """The process can't be isolated; the text says why.

    It may have a mount namespace of its own by then, so its caller ends it.
    """


def isolate(scratch: Path, keep: Sequence[Path], folders: Sequence[Path]) -> tuple[str, ...]:
    """Redirect what this process and its children write from now on into a scratch folder.

    What they write into ``folders`` goes there, also where other file systems are mounted beneath.
    What they write into ``keep``, /dev, /proc and /sys takes place as before. All other writes fail
    with EROFS. Descriptors that are open already aren't affected.

    Not covered are folders that don't exist, that are in ``keep``, or on a read-only file system,
    or on one that can't be the lower layer of an overlay. The root folder isn't covered as a
    whole, but each folder in it is. Neither is, without root's rights, a folder beneath which
    another file system is mounted.

    Args:
        scratch: An empty folder of this user's with mode 0700, on a file system that can be the
            upper layer of an overlay: a local one or tmpfs, not NFS, Lustre or an overlay.
        keep: Folders, which must exist.
        folders: Folders to cover; one in another one is covered with it.

    Returns:
        The folders that are covered, outer ones first.

    Raises:
        CannotIsolate: If the kernel refuses it, if this process has several threads, if the scratch
            folder is unfit, or if the working directory, though it is in ``folders``, can't be
            covered.
    """
    if sys.platform != "linux":
        raise CannotIsolate("only Linux has mount namespaces")
    try:
        kept = [it.resolve(strict=True) for it in keep]
        wanted = [it.resolve() for it in folders if mounts.is_folder(it)]
        return _isolate(_checked_scratch(scratch), kept, wanted)
    except OSError as error:
        raise CannotIsolate(_reason(error)) from error


def _isolate(scratch: Path, kept: list[Path], folders: list[Path]) -> tuple[str, ...]:
    cwd = Path.cwd()
    _check_process()
    rights = _Rights.read()
    has_rights = _enter_mount_namespace()
    # What was mounted in a namespace of more rights can't be taken apart in one of fewer.
    locked = _is_locked if has_rights else lambda _: True
    ground = _Ground.survey(folders, [*kept, scratch], locked)
    # Before it is in a user namespace, where a file can get no group but the process's own.
    layers = _make_layers(scratch, ground)
    with _explained():
        if not has_rights:
            _enter_user_namespace()
        mounts.make_private()
    with ExitStack() as stack:
        overlays = _overlays(ground, cwd, layers, _usable_options(scratch), stack)
        _lay_out(ground, overlays, kept, stack)
    os.chdir(cwd)  # the same path, which leads into an overlay now
    rights.restore()  # a new user namespace comes with all of them
    return tuple(map(str, overlays))


# What is to be covered.


def _within(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


@dataclass(frozen=True, slots=True)
class _Ground:
    """The folders to cover, and what is mounted there.

    Attributes:
        folders: Those that the caller names.
        kept: Those that are not to be covered.
        table: All mounts by their ID.
        beneath: The mounts in ``folders`` that no other one hides.
        locked: True if the kernel shows a folder only together with the mounts beneath.
    """

    folders: list[Path]
    kept: list[Path]
    table: dict[int, Mount]
    beneath: list[Mount]
    locked: Callable[[Path], bool]

    @classmethod
    def survey(
        cls, folders: list[Path], kept: list[Path], locked: Callable[[Path], bool]
    ) -> _Ground:
        """Return what is there now."""
        table = mounts.mounts()
        inside = {number: it for number, it in table.items() if _within(it.path, folders)}
        seen = [it for number, it in inside.items() if mounts.mount_id(it.path) == number]
        return cls(folders, kept, table, seen, locked)

    def covers(self) -> list[Path]:
        """Return the folders that an overlay each is to cover."""
        asked = {it for it in self.folders if not self.spares(it)}
        outer = [it for it in asked if not _within(it, asked - {it})]
        wanted = [it for it in outer if not self.mount_of(it).read_only]
        wanted += [it.path for it in self.beneath if it.holds_files]
        return sorted({part for it in wanted for part in self._parts(it)})

    def mount_of(self, folder: Path) -> Mount:
        """Return the mount on which a folder lies."""
        found = self.table.get(mounts.mount_id(folder))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        return found

    def spares(self, folder: Path) -> bool:
        """True if a folder stays as it is."""
        in_memory = folder != _SHARED_MEMORY and folder.is_relative_to(_SHARED_MEMORY)
        return _within(folder, self.kept if in_memory else (*_SPECIAL, *self.kept))

    def _parts(self, folder: Path) -> list[Path]:
        """Return a folder, or those in it if it can't be covered as a whole."""
        points = {it.path for it in self.beneath if folder in it.path.parents}
        if self.spares(folder):
            return []
        if folder != _ROOT and not (points and self.locked(folder)):
            return [folder]
        inner: list[Path] = []
        with suppress(PermissionError), os.scandir(folder) as entries:
            inner = [Path(it) for it in entries if it.is_dir(follow_symlinks=False)]
        parts = [part for it in inner if it not in points for part in self._parts(it)]
        if len(parts) > _MOST_PARTS:
            raise CannotIsolate(f"file systems are mounted beneath {folder}, among many folders")
        return parts


# The scratch folder.


def _checked_scratch(scratch: Path) -> Path:
    """Return the scratch folder without links on its way."""
    found = scratch.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise CannotIsolate(f"{scratch} is not a folder")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise CannotIsolate(f"{scratch} is open to other users")
    if any(scratch.iterdir()):
        raise CannotIsolate(f"{scratch} is not empty")
    return scratch.resolve()


class _Layer(NamedTuple):
    """What an overlay is made of, beside the folder that it covers.

    Attributes:
        path: The folder of its own layers.
        attributes: Those of its mount, as of the mount that it covers.
    """

    path: Path
    attributes: int


def _make_layers(scratch: Path, ground: _Ground) -> dict[Path, _Layer]:
    """Make the layers of each folder's overlay in the scratch folder, and those of the trial."""
    layers = {
        folder: _Layer(scratch / str(at), ground.mount_of(folder).attributes)
        for at, folder in enumerate(ground.covers())
    }
    for path in (scratch / "trial", *(it.path for it in layers.values())):
        for made in (path, path / "upper", path / "work"):
            made.mkdir(0o700)
    for folder, layer in layers.items():
        _imitate(folder, layer.path / "upper")
    return layers


def _imitate(folder: Path, upper: Path) -> None:
    """Set the owner and mode of an upper layer, which the overlay shows as the folder's."""
    found = folder.stat()
    for owner in ((found.st_uid, -1), (-1, found.st_gid)):
        with suppress(OSError):
            os.chown(upper, *owner)
    mode = stat.S_IMODE(found.st_mode)
    if not os.access(folder, os.W_OK, effective_ids=True):
        upper.chmod(mode & ~0o222)  # this user may own it, unlike the folder
        return
    upper.chmod(mode)
    for name in ("system.posix_acl_access", "system.posix_acl_default"):
        with suppress(OSError):
            os.setxattr(upper, name, os.getxattr(folder, name))


def _usable_options(scratch: Path) -> dict[str, str]:
    """Return the options of all overlays, after a trial of the scratch folder's file system."""
    trial, lower = scratch / "trial", scratch / "trial" / "lower"
    # volatile: else the end of the last process waits until all that the file system holds in
    # memory is on the disk. None of this is to last.
    options = {"volatile": "", "index": "off", "metacopy": "off", "xino": "auto"}
    options |= _attribute_options(trial)
    lower.mkdir()
    try:
        os.close(mounts.overlay(lower, trial, 0, options))
    except OSError as error:
        mount = mounts.mounts().get(mounts.mount_id(scratch))
        on = f" on {mount.kind}" if mount else ""
        why = f"{scratch}{on} can't be the upper layer of an overlay file system"
        raise CannotIsolate(f"{why} ({_reason(error)})") from error
    return options


def _attribute_options(folder: Path) -> dict[str, str]:
    """Return the options that choose the extended attributes in which an overlay keeps records."""
    # Those of the second kind can't record that a folder was renamed.
    # Source: Linux 6.18, fs/overlayfs/params.c, ovl_fs_params_verify
    for name, options in (
        ("trusted.fasttrain", {"redirect_dir": "on"}),
        ("user.fasttrain", {"userxattr": ""}),
    ):
        with suppress(OSError):
            os.setxattr(folder, name, b"")
            return options
    raise CannotIsolate(f"the file system of {folder.parent} keeps no extended attributes")


# The namespaces.


def _check_process() -> None:
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise CannotIsolate("this process has several threads already")
    if not mounts.can_change():
        raise CannotIsolate("the kernel has no mount_setattr, which is there since Linux 5.12")


def _enter_mount_namespace() -> bool:
    """Enter a mount namespace; False if this process has no right to."""
    try:
        checked("unshare", _LIBC.unshare(_CLONE_NEWNS))
    except PermissionError:
        return False
    return True


def _enter_user_namespace() -> None:
    """Enter a user namespace, with the same user and group, and a mount namespace in it."""
    user, group = os.geteuid(), os.getegid()
    checked("unshare", _LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNS))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


@contextmanager
def _explained() -> Iterator[None]:
    """Name the switch by which the kernel refuses namespaces, if it is one of those known."""
    try:
        yield
    except OSError as error:
        for name, off in _SWITCHES.items():
            with suppress(OSError):
                if Path("/proc/sys", *name.split(".")).read_text().strip() == off:
                    why = f"user namespaces are switched off ({name} is {off})"
                    raise CannotIsolate(why) from error
        why = f"the kernel refuses a mount namespace, as in most containers ({_reason(error)})"
        raise CannotIsolate(why) from error


class _Rights(NamedTuple):
    """The capabilities of a process.

    Attributes:
        sets: Those that are effective, permitted and inheritable, as capget(2) has them.
        bounding: Those that a program may get which is started.
    """

    sets: ctypes.Array[ctypes.c_uint32]
    bounding: frozenset[int]

    @classmethod
    def read(cls) -> _Rights:
        """Return those of this process."""
        header, sets = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
        checked("capget", _LIBC.capget(header, sets))
        numbers = range(64)  # the kernel refuses those that it doesn't have
        bounding = (it for it in numbers if _LIBC.prctl(_PR_CAPBSET_READ, it, 0, 0, 0) == 1)
        return cls(sets, frozenset(bounding))

    def restore(self) -> None:
        """Take all others from this process."""
        for it in _Rights.read().bounding - self.bounding:
            checked("prctl", _LIBC.prctl(_PR_CAPBSET_DROP, it, 0, 0, 0))
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        checked("capset", _LIBC.capset(header, self.sets))


def _is_locked(folder: Path) -> bool:
    """True if the kernel doesn't show a folder without the mounts beneath."""
    try:
        os.close(mounts.cloned(folder, recursive=False))
    except OSError:
        return True
    return False


# The mounts.


def _overlays(
    ground: _Ground,
    cwd: Path,
    layers: dict[Path, _Layer],
    options: dict[str, str],
    stack: ExitStack,
) -> dict[Path, int]:
    """Return the mount of each overlay, attached nowhere yet; the kernel may refuse some."""
    made: dict[Path, int] = {}
    refused: dict[Path, str] = {}
    for folder, layer in layers.items():
        try:
            made[folder] = mounts.overlay(folder, layer.path, layer.attributes, options)
            stack.callback(os.close, made[folder])
        except OSError as error:
            refused[folder] = _reason(error)
    around = [it for it in (cwd, *cwd.parents) if it in layers]
    if _needs_cover(cwd, ground) and not (around and around[0] in made):
        why = refused[around[0]] if around else "a file system is mounted beneath it"
        raise CannotIsolate(f"the working directory {cwd} can't be covered: {why}")
    return made


def _needs_cover(cwd: Path, ground: _Ground) -> bool:
    """True if a script may expect to write into its working directory."""
    if cwd == _ROOT or ground.spares(cwd) or not _within(cwd, ground.folders):
        return False
    return os.access(cwd, os.W_OK, effective_ids=True)


def _lay_out(
    ground: _Ground, overlays: dict[Path, int], kept: list[Path], stack: ExitStack
) -> None:
    """Make all mounts read-only, and lay the others over them."""

    def clones(folders: Iterable[Path], *, recursive: bool) -> dict[Path, int]:
        found = {it: mounts.cloned(it, recursive=recursive) for it in folders}
        for mount in found.values():
            stack.callback(os.close, mount)
        return found

    special = clones(filter(Path.exists, _SPECIAL), recursive=True)
    writable = clones(sorted(set(kept)), recursive=True)
    mounts.make_read_only()
    # An overlay doesn't show what is mounted beneath its folder.
    hidden = [
        it.path
        for it in ground.beneath
        if it.path not in overlays and _within(it.path, overlays) and not ground.spares(it.path)
    ]
    readable = clones(hidden, recursive=False)
    for layer in (special, dict(sorted({**overlays, **readable}.items())), writable):
        for path, mount in layer.items():
            mounts.attach(mount, path)


def _reason(error: OSError) -> str:
    """Return what an error says, in one line."""
    what = f"{error.filename}: " if error.filename else ""
    return " ".join(f"{what}{error.strerror or error}".split())
