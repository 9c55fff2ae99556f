"""One worker from start to end: reads its plan, hooks torch, runs the script, reports."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fasttrain.shim import parent, rank_variables, streams
from fasttrain.shim.ending import ended_well
from fasttrain.shim.failure import recorder, watch_faults
from fasttrain.shim.import_hook import after_torch
from fasttrain.shim.script import run_target
from fasttrain.spec.codec import loads
from fasttrain.spec.plan import LaunchPlan


def main(argv: list[str]) -> None:
    """Run ``PLAN script|module TARGET [ARGS...]`` in this process.

    The arguments of the script are taken from the command line, where they arrive whole, and not
    from the plan, in which secrets are masked.
    """
    started_s = time.perf_counter()
    plan_path, kind, name, *args = argv
    plan = loads(LaunchPlan, Path(plan_path).read_bytes())
    # A run without an agent has one rank, whatever RANK the user's own launcher has set.
    rank = 0 if plan.processes.value.backend == "direct" else int(os.environ["RANK"])
    parent.die_with_launcher()
    _count_restarts()
    streams.redirect_hidden_rank(plan, rank)
    watch_faults(plan.run_dir, rank)
    failed = recorder(plan.run_dir, rank)
    pid = os.getpid()
    _be_alone(plan)
    after_torch(lambda: _install(plan, rank, started_s, pid))
    run_target(kind, name, args, ended_well, failed)


def _count_restarts() -> None:
    """Tell the script of restarts by torchrun as well as of those by SLURM."""
    if restarts := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        before = int(os.environ.get("FASTTRAIN_RESTART_COUNT", "0"))
        os.environ["FASTTRAIN_RESTART_COUNT"] = str(before + restarts)


def _be_alone(plan: LaunchPlan) -> None:
    """Have a script that knows nothing of ranks see no other rank, and its own device alone."""
    strategy, devices = plan.levers.strategy.value, plan.devices.value
    if not strategy.injected:
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    if strategy.visibility and local_rank < len(devices):
        os.environ[strategy.visibility] = devices[local_rank]
        os.environ["LOCAL_RANK"] = "0"  # what a script that asks for its ranks after all is told
    rank_variables.hide()


def _install(plan: LaunchPlan, rank: int, started_s: float, pid: int) -> None:
    """Build the levers now that torch is in; nothing of the shim that needs torch loads before."""
    from fasttrain.shim.runtime import Runtime

    Runtime(plan, rank, started_s, pid).install()
