"""How much room there is for files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# One checkpoint of 100 million parameters with AdamW's state in fp32 is 1.2 GB.
FEW_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Room:
    """What is free of a file system for this user; None where it doesn't say.

    Attributes:
        free_bytes: Bytes.
        free_files: New files, folders and links.
    """

    free_bytes: int | None
    free_files: int | None


def room_at(folder: Path) -> Room:
    """Give what is free for a folder that exists; a quota may allow less.

    File systems without limits of these kinds, such as btrfs for files, count none at all.
    Source: statvfs(3); Linux, fs/btrfs/super.c, btrfs_statfs, which leaves f_files at 0

    Raises:
        OSError: The file system can't be asked.
    """
    found = os.statvfs(folder)
    return Room(
        free_bytes=found.f_bavail * found.f_frsize if found.f_blocks else None,
        free_files=found.f_favail if found.f_files else None,
    )
