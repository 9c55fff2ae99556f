"""The folders that runs write to."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from fasttrain.hardware.host import Host
from fasttrain.hardware.tool import within
from fasttrain.model.examination import Disk, Purpose
from fasttrain.model.places import COMPILED_FOLDER, cache_folder

# A network file system whose server is gone blocks every call for as long as it is gone.
DISK_TIMEOUT_S = 2.0


def find_disks(
    host: Host, run_root: Path, *, timeout_s: float = DISK_TIMEOUT_S
) -> tuple[Disk, ...]:
    """Return the disks of run directories, compiled kernels and temporary files.

    A folder that can't be asked in `timeout_s` counts as full and closed, which it is to a run.
    """
    folders: dict[Purpose, Path] = {
        "runs": run_root,
        "cache": compiled_folder(host.environ),
        "temporary": temporary_folder(host.environ),
    }
    mounts = mount_types(host)
    return tuple(
        _disk(purpose, folder.absolute(), mounts, timeout_s) for purpose, folder in folders.items()
    )


def compiled_folder(environ: Mapping[str, str]) -> Path:
    """Return where compiled kernels go: the user's own choice, or fasttrain's."""
    own = environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    return Path(own) if own else cache_folder(environ) / COMPILED_FOLDER


def temporary_folder(environ: Mapping[str, str]) -> Path:
    """Return where programs put temporary files, by the first variable that names a folder.

    Source: Python 3.11, tempfile.gettempdir.
    """
    named = (environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP"))
    return Path(next((path for path in named if path), "/tmp"))  # noqa: S108 - only looked at


def _disk(purpose: Purpose, folder: Path, mounts: dict[str, str], timeout_s: float) -> Disk:
    try:
        return within(timeout_s, lambda: _look(purpose, folder, mounts))
    except OSError:  # TimeoutError is one
        return Disk(
            purpose=purpose,
            path=str(folder),
            free_bytes=0,
            writable=False,
            executable=False,
            filesystem=filesystem_of(folder, mounts),
        )


def _look(purpose: Purpose, folder: Path, mounts: dict[str, str]) -> Disk:
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    stat = os.statvfs(existing)
    return Disk(
        purpose=purpose,
        path=str(existing),
        free_bytes=stat.f_bavail * stat.f_frsize,
        writable=os.access(existing, os.W_OK | os.X_OK),
        executable=not stat.f_flag & getattr(os, "ST_NOEXEC", 0),  # macOS doesn't tell
        filesystem=filesystem_of(existing.resolve(), mounts),
    )


def mount_types(host: Host) -> dict[str, str]:
    """Return the type of what is mounted at each path; of several mounts the last one shows."""
    lines = (line.split() for line in host.read("proc/self/mounts").splitlines())
    return {_unescaped(words[1]): words[2] for words in lines if len(words) > 2}


def _unescaped(path: str) -> str:
    # The kernel writes blanks and backslashes as octal numbers: "\040".
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def filesystem_of(folder: Path, mounts: dict[str, str]) -> str:
    """Return the type of the file system that a folder lies on; empty where unknown."""
    paths = (str(path) for path in (folder, *folder.parents))
    return next((mounts[path] for path in paths if path in mounts), "")
