"""A Python other than fasttrain's own, as it described itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interpreter:
    """What is known of another Python; nothing of it was imported here.

    Attributes:
        path: Absolute path, links not followed: by them a virtual environment is found.
        error: Why it couldn't be asked; empty where it was.
        version: Its version, such as ``3.12.1``.
        prefix: Its environment's folder.
        torch: Folder of its torch; empty without one.
        search: Where it looks for modules.
    """

    path: str
    error: str = ""
    version: str = ""
    prefix: str = ""
    torch: str = ""
    search: tuple[str, ...] = ()
