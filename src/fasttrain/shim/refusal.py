"""Stops a worker with an error of fasttrain's, told once and in its three lines."""

from __future__ import annotations

import sys
from typing import NoReturn

from fasttrain.spec.errors import FasttrainError


def refuse(error: FasttrainError) -> NoReturn:
    """Print the error and leave with its exit code."""
    print(error, file=sys.stderr, flush=True)  # noqa: T201 - a worker has no other way to say it
    raise SystemExit(int(error.exit_code)) from error  # the card of the run tells it, too
