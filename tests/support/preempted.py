"""Runs a loop whole, and again preempted and resumed, all in the test's own process."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import site
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fasttrain.model.attempts import Preempt
from fasttrain.shim.data_parallel.context import LeverState
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.hooks.steps import StepMeter
from fasttrain.shim.multiprocessing_hooks import follow_forked
from fasttrain.shim.process import refusal
from fasttrain.shim.process.callsite import own_prefixes
from fasttrain.shim.snapshots import lever as snapshot_lever
from fasttrain.shim.snapshots import preempt_signal, script_tensors

Resume = Literal["no", "if-there", "required"]
Loop = Callable[[Callable[[], None]], Any]
# A script's frames have none of a test's beneath them.
NOT_THE_SCRIPTS = (sysconfig.get_path("stdlib"), *site.getsitepackages(), __file__)


class Loops:
    """Attempts of loops in one run directory.

    Args:
        plan: Gives a plan for a run directory.
        run_dir: The run directory.
    """

    def __init__(self, plan: Callable[[Path], Any], run_dir: Path) -> None:
        run_dir.chmod(0o700)
        self._plan = plan(run_dir)

    def differ(self, loop: Loop, stop_at: int) -> list[str]:
        """Return what is different in a run that is preempted in its tick of a number."""
        whole = self.attempt(loop, 0)
        assert self.attempt(loop, stop_at) is None, "it was not preempted"
        return list(_different(self.attempt(loop, 0, resume="required"), whole, "it"))

    def attempt(self, loop: Loop, stop_at: int, resume: Resume = "no") -> Any:
        """Return what the loop gives; None where it is preempted."""
        preempt = replace(self._plan.preempt, value=Preempt("snapshot", resume=resume))
        ticks = iter(range(1, 1_000_000))

        def tick() -> None:
            if next(ticks) == stop_at:
                preempt_signal.PREEMPT_SIGNAL.flag = True

        gc.freeze()  # or each snapshot would look through all that pytest holds
        with _lever(replace(self._plan, preempt=preempt)):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            try:
                result = loop(tick)
                refusal.ended_well()
            except SystemExit as end:
                if end.code:
                    raise
                return None
            return result


@contextlib.contextmanager
def _lever(plan: Any) -> Iterator[None]:
    roots, meter, undo = RootCalls(), StepMeter(time.perf_counter()), contextlib.ExitStack()
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    beneath = own_prefixes() + NOT_THE_SCRIPTS
    frames = mock.patch.object(script_tensors, "own_prefixes", return_value=beneath)
    alike = mock.patch.object(snapshot_lever, "identity_of", return_value={})
    found = mock.patch.object(snapshot_lever, "identity_of", return_value={})
    heard = mock.patch.object(preempt_signal.PreemptSignal, "heard", True)
    with (
        undo,
        frames,
        alike,
        found,
        heard,
        mock.patch.object(preempt_signal.PREEMPT_SIGNAL, "flag", False),
    ):
        os.environ.pop("FASTTRAIN_RESTART_COUNT", None)
        recorder = OutcomeRecorder("preempt", "snapshot", explicit=True)
        lever = snapshot_lever.SnapshotLever(recorder, plan, 0, roots, meter, LeverState())
        roots.install(undo)
        meter.install(undo)
        lever.prepare(undo)
        try:
            lever.install(undo)
            follow_forked(lever.leave_out_child)
            yield
        finally:
            undo.close()
            gc.unfreeze()
            torch.set_rng_state(generators[0])
            random.setstate(generators[1])
            np.random.set_state(generators[2])


def _different(got: Any, wanted: Any, where: str) -> Iterator[str]:
    if isinstance(wanted, torch.Tensor):
        if got.shape != wanted.shape or not torch.equal(got, wanted):
            yield where
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key, value in wanted.items():
            yield from _different(got[key], value, f"{where}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted)
        for number, value in enumerate(wanted):
            yield from _different(got[number], value, f"{where}.{number}")
    elif got != wanted:
        yield where


def data(count: int = 60, seed: int = 1) -> TensorDataset:
    """Return a small data set that is always the same."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).float())


def network() -> nn.Sequential:
    """Return a small model, with weights drawn from torch's generator."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a batch."""
    return nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
