"""What a script's source tells before anything of it has run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evidence:
    """One place in the user's code that shows something.

    Attributes:
        what: What is used there: ``init_process_group``, ``Accelerator``, ``--local_rank``.
        where: ``file:line``, the file as the user can open it from the working directory.
    """

    what: str
    where: str


@dataclass(frozen=True, slots=True)
class ScriptFacts:
    """All that was read from a script and the user's modules that it imports.

    Attributes:
        handles_ranks: The strongest sign that it works as one of several processes by itself; None
            when it knows nothing of ranks.
        unread: The user's modules that were not looked at, each with the reason.
    """

    handles_ranks: Evidence | None = None
    unread: tuple[str, ...] = ()
