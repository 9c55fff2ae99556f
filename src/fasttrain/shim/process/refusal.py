"""Stops a worker with an error of fasttrain's, told once and in its three lines."""

from __future__ import annotations

import sys
from typing import NoReturn

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.process.ending import LEAVING, leave_at_once


def refuse(error: FasttrainError) -> NoReturn:
    """Print the error and leave with its exit code."""
    LEAVING.may_go_on()  # or a script that goes on behind a refusal would be refused again
    print(error, file=sys.stderr, flush=True)  # noqa: T201 - a worker has no other way to say it
    end = SystemExit(int(error.exit_code))
    LEAVING.begin(end)
    raise end from error  # the card of the run tells it, too


def refuse_anywhere(error: FasttrainError) -> NoReturn:
    """Do so where an exception ends but a thread of the script's, and not the process."""
    try:
        refuse(error)
    except SystemExit as end:
        leave_at_once(end)
