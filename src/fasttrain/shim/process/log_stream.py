"""Output streams into fasttrain's own logs; a full disk there must not end the script."""

from __future__ import annotations

import errno
import io
import os
import sys
from io import TextIOWrapper
from typing import Any

from fasttrain.files import open_log
from fasttrain.model.plan import LaunchPlan

_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Log(io.FileIO):
    """A log file that drops what the disk has no room for."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return memoryview(data).nbytes


def log_stream(descriptor: int, like: Any) -> TextIOWrapper[Any]:
    """Return a text stream into a log, with the settings of Python's own stream ``like``.

    On a plain file ``print`` would raise when the disk is full. With a terminal or a pipe, where
    the script's output went before, it would not.
    """
    raw = _Log(descriptor, "w", closefd=False)
    raw.name = like.name
    unbuffered = isinstance(like.buffer, io.RawIOBase)  # python -u
    stream: TextIOWrapper[Any] = TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )
    stream.mode = like.mode  # type: ignore[misc]
    return stream


# Redirects the output of ranks that are not shown to their log files.


def redirect_hidden_rank(plan: LaunchPlan, rank: int) -> None:
    """Redirect stdout and stderr of every rank but a shown rank 0 to the rank's own log.

    Rank 0 writes to the launcher, which prints and logs it. The launcher prints other shown ranks
    from their logs. In an elastic run every rank has a log, because no node knows beforehand
    whether it gets rank 0.
    """
    processes = plan.processes.value
    if processes.backend == "direct":
        return  # one rank; a RANK in the environment is of the user's own launcher
    shown = plan.show_ranks is None or 0 in plan.show_ranks
    if rank == 0 and shown and not processes.rdzv_endpoint:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    path = os.path.join(plan.run_dir, f"rank-{rank}.log")  # noqa: PTH118
    try:
        log = open_log(path)
    except OSError as error:  # a full disk must not end a script before it has begun
        print(f"fasttrain: rank {rank} has no log, so it is shown: {error}", file=sys.stderr)  # noqa: T201
        return
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = sys.__stdout__ = log_stream(1, sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = log_stream(2, sys.stderr)  # type: ignore[misc]
