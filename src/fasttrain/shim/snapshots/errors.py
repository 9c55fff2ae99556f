"""What is said on the way back to a snapshot, and where a run does not come there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.process.refusal import refuse


def tell(text: str) -> None:
    """Say something beside the script's own output."""
    print(f"fasttrain: {text}", file=sys.stderr, flush=True)  # noqa: T201


def refuse_diverged(why: str) -> NoReturn:
    """Say that the script went another way than before."""
    refuse(
        FasttrainError(
            "the run can't go on from its snapshot",
            why=f"the script went another way than the run before: {why}",
            fix="make what steers the loop follow from seeds, losses and counts, not from the time"
            " or the machine; without --resume the run begins anew",
            slug="snapshot-diverged",
        )
    )


def refuse_other(why: str) -> NoReturn:
    """Say that the run is another than the one of the snapshot."""
    refuse(
        FasttrainError(
            "the snapshot is that of another run",
            why=why,
            fix="start it as it was started before, or without --resume to begin anew",
            slug="snapshot-mismatch",
        )
    )


@contextmanager
def refusing_what_fails(doing: str) -> Iterator[None]:
    """Refuse the run where what is done inside fails: the script would go on without it.

    Args:
        doing: What it is, such as ``the snapshot can't be put back``.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, half of a snapshot is none
        refuse(
            FasttrainError(
                f"--preempt snapshot fails: {doing}",
                why=f"{type(error).__name__}: {error}",
                fix="use the versions of fasttrain and torch that took the snapshot; without"
                " --resume the run begins anew, and with --preempt signal it takes none",
                slug="snapshot-failed",
            )
        )
