"""Redirects the output of ranks that are not shown to their log files."""

from __future__ import annotations

import os
import sys

from fasttrain.files.writing import open_log
from fasttrain.model.plan import LaunchPlan
from fasttrain.shim.process.log_stream import log_stream


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
