"""The messages of a resumed run, and the errors that end it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.process.refusal import refuse


def log(text: str) -> None:
    """Print a line to stderr: stdout belongs to the script."""
    print(f"fasttrain: {text}", file=sys.stderr, flush=True)  # noqa: T201


def refuse_diverged(why: str) -> NoReturn:
    """End the run since the script took another path than before."""
    refuse(
        FasttrainError(
            "the run can't go on from its snapshot",
            why=f"the script took another path than the run that took the snapshot: {why}",
            fix="let the loop's decisions depend on seeds, losses and counts, not on the time or"
            " the machine; without --resume the run starts from the beginning",
            slug="snapshot-diverged",
        )
    )


def refuse_mismatch(why: str) -> NoReturn:
    """End the run since the snapshot is another run's."""
    refuse(
        FasttrainError(
            "the snapshot belongs to another run",
            why=why,
            fix="start the run as before, or without --resume to start from the beginning",
            slug="snapshot-mismatch",
        )
    )


@contextmanager
def refusing_what_fails(doing: str) -> Iterator[None]:
    """End the run if the block fails: the script would go on with half of its state.

    Args:
        doing: What the failure means, such as ``the snapshot can't be restored``.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever failed, half a snapshot is useless
        refuse(
            FasttrainError(
                f"--preempt snapshot fails: {doing}",
                why=f"{type(error).__name__}: {error}",
                fix="use the versions of fasttrain and torch that took the snapshot; without"
                " --resume the run starts from the beginning, and with --preempt signal it takes"
                " no snapshots",
                slug="snapshot-failed",
            )
        )
