"""Whether somebody else could have put into a folder what is read there, or could do so later.

Source: OpenSSH 9.6, misc.c, safe_path. It refuses any parent that a group may write; on clusters
most projects share such a folder, so that here a group is only warned about.
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

MOST_LINKS = 40  # Linux follows as many; Source: path_resolution(7)

Step = tuple[Path, os.stat_result]


def steps(path: Path, links: int = 0) -> Iterator[Step]:
    """Yield the folders and links that lead to an absolute path and itself, as far as they exist.

    Raises:
        OSError: Links lead in a circle, or something on the way is no folder.
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
    """Why something may be somebody else's, and the command that ends that, if there is one."""

    why: str
    mend: str = ""


def refused_way(path: Path, beside: Path | None = None) -> Danger | None:
    """Return why anybody could lead a path elsewhere; None where nobody can.

    Neither the owner of a parent counts nor its group: see `doubts`.

    Args:
        path: What is judged.
        beside: A folder that is no safer: what leads to it, too, is left to `doubts`.

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
            why = f"{everybodys(step)}, and so put something else in its place"
            return Danger(why, f"chmod o-w {quote(str(step))}")
    return None


def refused_folder(path: Path, found: os.stat_result) -> Danger | None:
    """Return why a folder is not the user's alone to write to; None where it is."""
    if found.st_uid != os.geteuid():
        return Danger(owned("it", found.st_uid))
    if found.st_mode & stat.S_IWOTH:
        return Danger(everybodys("it"), f"chmod go-w {quote(str(path))}")
    if _is_shared(found):
        return Danger(shared("it", found.st_gid), f"chmod g-w {quote(str(path))}")
    return None


def refused(path: Path) -> Danger | None:
    """Return why what lies in a folder may be somebody else's; None where it can't be.

    A folder that isn't there yet is judged by its parents.

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
    """Return who could put another folder in the place of one, where that isn't refused.

    Owners and groups that could do so to the working directory are left out: they could change the
    script as well.

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
    """Return whether a group may write that is more than one user.

    A group with the name of its user is that user's alone, which makes a umask of 002 usable.
    Source: login.defs(5), USERGROUPS_ENAB.
    """
    if not found.st_mode & stat.S_IWGRP:
        return False
    try:
        me = pwd.getpwuid(os.geteuid())
        return found.st_gid != me.pw_gid or grp.getgrgid(found.st_gid).gr_name != me.pw_name
    except KeyError:  # a container's user is often in no list
        return True


def user(uid: int) -> str:
    """Return a user's name, or its number where it has none here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
