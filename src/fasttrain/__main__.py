"""``python -m fasttrain`` and the ``fasttrain`` command."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn


def main() -> None:
    """Run the command line of this process and leave with its exit code."""
    try:
        from fasttrain.cli.app import main as run
        from fasttrain.model.errors import ExitCode
    except KeyboardInterrupt:  # ctrl-C while half a second of imports runs: nothing has begun
        _interrupted()
    code = run(sys.argv[1:])
    if code is ExitCode.INTERRUPTED:
        _interrupted()
    sys.exit(code)


def _interrupted() -> NoReturn:
    """End with 130, and in the foreground of a terminal by SIGINT, as Python does.

    A shell goes on with a loop or a script whose command has ended by itself, whatever its exit
    code: it takes ctrl-C to be handled. The exit code that a shell shows is 130 in both cases.
    Source: bash(1), SIGNALS; CPython 3.11, Modules/main.c, exit_sigint.
    """
    if any(map(_is_in_foreground, (0, 1, 2))):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(128 + signal.SIGINT)


def _is_in_foreground(descriptor: int) -> bool:
    """True if a descriptor is a terminal whose ctrl-C reaches this process."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False


if __name__ == "__main__":
    main()
