"""Sends the output of ranks that are not shown to their log files."""

from __future__ import annotations

import os
import sys

from fasttrain.files.writing import open_log
from fasttrain.model.plan import LaunchPlan
from fasttrain.shim.process.log_stream import log_stream


def redirect_hidden_rank(plan: LaunchPlan, rank: int) -> None:
    """Point stdout and stderr of any rank but a shown rank 0 at its own log.

    Rank 0 keeps the launcher's stream, which is relayed and logged there; the launcher follows
    the logs of other shown ranks. In an elastic run, whose nodes don't know beforehand which one
    gets rank 0, every rank has its own log.
    """
    processes = plan.processes.value
    if processes.backend == "direct":
        return  # whatever RANK the user's own launcher has set
    shown = plan.show_ranks is None or 0 in plan.show_ranks
    if rank == 0 and shown and not processes.rdzv_endpoint:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    path = os.path.join(plan.run_dir, f"rank-{rank}.log")  # noqa: PTH118
    try:
        log = open_log(path)
    except OSError as error:  # a full disk must not end a script before it has begun
        print(f"fasttrain: rank {rank} has no log, and is shown: {error}", file=sys.stderr)  # noqa: T201
        return
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = sys.__stdout__ = log_stream(1, sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = log_stream(2, sys.stderr)  # type: ignore[misc]
