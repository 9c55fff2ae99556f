"""Runs one worker from start to end: its plan, the levers, the script, the report."""

from __future__ import annotations

import functools
import inspect
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fasttrain.model.attempts import RESTART_COUNT
from fasttrain.model.errors import FasttrainError
from fasttrain.model.plan import PLAN_FILE, LaunchPlan
from fasttrain.shim.hooks import own_device, patching
from fasttrain.shim.multiprocessing_hooks import follow_started, install_in_child
from fasttrain.shim.process import log_stream, refusal, turns
from fasttrain.shim.process.callsite import is_shim_code
from fasttrain.shim.process.entry import Entry, die_with_launcher, read_entry
from fasttrain.shim.process.entry import hide as hide_rank_variables
from fasttrain.shim.process.import_hook import after_torch
from fasttrain.shim.process.refusal import refuse
from fasttrain.shim.process.writes import throw_writes_away
from fasttrain.shim.script import recorder, run_target, watch_faults
from fasttrain.shim.snapshots.preempt_signal import PREEMPT_SIGNAL


def main(argv: list[str]) -> None:
    """Run ``PLAN script|module TARGET [ARGS...]`` in this process.

    The script's arguments come from the command line and not from the plan, which masks secrets.
    """
    started_s = time.perf_counter()
    try:
        entry = read_entry(argv, os.environ)
    except FasttrainError as error:
        refuse(error)
    plan, rank = entry.plan, entry.rank
    die_with_launcher()
    if plan.processes.value.backend == "direct":  # else the agent has done it for all ranks
        throw_writes_away(plan)
    if plan.preempt.value.mode == "snapshot":
        PREEMPT_SIGNAL.listen(plan.preempt.value.signals)
    if entry.restarts is not None:
        os.environ[RESTART_COUNT] = str(entry.restarts)
    log_stream.redirect_hidden_rank(plan, rank)
    watch_faults(plan.run_dir, rank)
    refusal.at_failure.append(recorder(plan.run_dir, rank))
    pid = os.getpid()
    _be_alone(entry)
    if plan.proof is not None:
        turns.begin(plan.proof, rank)
    if plan.levers.on():
        follow_started(Path(plan.run_dir, PLAN_FILE), rank, ExitStack())
    after_torch(lambda: _install(plan, rank, started_s, pid))
    patching.wrap(inspect, "getouterframes", _without_own_frames, ExitStack())
    run_target(entry.kind, entry.name, list(entry.args), refusal.ended_well, refusal.failed)


def _without_own_frames(original: Any) -> Any:
    """Have `inspect.stack` begin with the script, whose file the last entry names under Python."""

    @functools.wraps(original)
    def getouterframes(frame: Any, context: int = 1) -> list[inspect.FrameInfo]:
        frames = original(frame, context)
        return [one for one in frames if not is_shim_code(one.frame.f_code)]

    return getouterframes


def _be_alone(entry: Entry) -> None:
    """Hide the devices of other ranks, and the ranks too if the script is made data-parallel."""
    strategy, devices = entry.plan.levers.strategy.value, entry.plan.devices.value
    if strategy.visibility and entry.local_rank < len(devices):
        own_device.keep(strategy.visibility, devices[entry.local_rank], ExitStack())
        # For a script that sets up its ranks itself after all: it sees one device, number 0.
        os.environ["LOCAL_RANK"] = "0"
    if strategy.injected:
        hide_rank_variables()


def _install(plan: LaunchPlan, rank: int, started_s: float, pid: int) -> None:
    """Install the levers once torch is imported: nothing of the shim may import it earlier."""
    from fasttrain.shim.runtime import Runtime

    if os.getpid() == pid:
        Runtime(plan, rank, started_s).install()
    else:  # a child that was forked before the worker has imported torch
        install_in_child(plan, rank)
