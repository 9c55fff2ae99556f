"""Whether another user could have written what a folder holds, or could replace the folder.

Source: OpenSSH 9.6, misc.c, safe_path. It refuses any parent that a group may write to. On clusters
most projects share such a folder, so here a group is only a warning.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import NamedTuple

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
        beside: A folder that is trusted anyway: parents that both share are left to `doubts`.

    Raises:
        OSError: As `steps`.
    """
    way = list(steps(path))
    if path.exists():
        del way[-1]  # the folder itself, which is judged when it is open
    beside_it = {step for step, _ in steps(beside)} if beside else set()
    for step, found in way:
        everybody = step not in beside_it and _is_everybodys(found)
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

    Raises:
        OSError: As `steps`.
    """
    trusted = {step for step, _ in steps(cwd)}
    found = {
        step: seen
        for step, seen in steps(path.parent)
        if step not in trusted or _is_everybodys(seen)
    }
    return [why for step, seen in found.items() if (why := _doubt(step, seen))]


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
