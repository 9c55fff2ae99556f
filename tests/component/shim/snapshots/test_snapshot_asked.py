"""The signal that preempts a run, in its process and in those that it forks."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fasttrain.model.outcome import PREEMPTED, State
from fasttrain.shim.data_parallel.context import LeverState
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.hooks.steps import StepMeter
from fasttrain.shim.snapshots.lever import SnapshotLever
from fasttrain.shim.snapshots.preempt_signal import PreemptSignal
from support.rig import plan

# Says what a forked child dies of; its parent takes the signals.
FORKS = """
import os, signal, sys, time
from fasttrain.shim.snapshots.preempt_signal import PREEMPT_SIGNAL
PREEMPT_SIGNAL.listen(sys.argv[1].split(","))
if "own" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
child = os.fork()
if not child:
    print("ready", flush=True)
    time.sleep(0.5)
    os._exit(0)
sys.stdin.readline()
os.kill(child, int(sys.argv[2]))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), PREEMPT_SIGNAL.flag, PREEMPT_SIGNAL.heard)
"""


def end_of_child(names: str, signum: signal.Signals, *how: str) -> str:
    argv = [sys.executable, "-c", FORKS, names, str(int(signum)), *how]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.stdin.write("\n")
        parent.stdin.flush()
        return parent.stdout.readline().strip()


@pytest.mark.parametrize(
    ("names", "signum", "how", "end"),
    [
        ("SIGUSR2,SIGTERM", signal.SIGTERM, (), "-15"),
        ("SIGUSR2,SIGTERM", signal.SIGTERM, ("own",), "3"),
        ("SIGUSR2,SIGTERM", signal.SIGUSR2, (), "0"),
        ("SIGUSR2", signal.SIGTERM, (), "-15"),
    ],
)
def test_what_the_script_forks_can_be_ended(
    names: str, signum: signal.Signals, how: tuple[str, ...], end: str
) -> None:
    assert end_of_child(names, signum, *how) == f"{end} False True"


@pytest.mark.parametrize(
    ("heard", "preempted", "state"),
    [(True, 0, State.APPLIED), (False, 0, State.CEDED), (False, 1, State.APPLIED)],
)
def test_a_script_that_takes_the_signal_late_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: bool, preempted: int, state: State
) -> None:
    recorder = OutcomeRecorder("preempt", "snapshot", explicit=True)
    lever = SnapshotLever(recorder, plan(tmp_path), 0, RootCalls(), StepMeter(0.0), LeverState())
    recorder.settle(State.ARMED, "")
    recorder.apply("training loop", "")
    recorder.counts[PREEMPTED] = preempted
    monkeypatch.setattr(PreemptSignal, "heard", heard)
    lever.finish()
    assert recorder.outcome().state is state
