"""Decides what is watched during a run, and what follows a preemption or a failure."""

from __future__ import annotations

import re

from fasttrain.model.attempts import (
    Guards,
    HangWatch,
    Preempt,
    Restarts,
    ResumeMode,
    left_to_the_script,
    restart_count,
)
from fasttrain.model.decision import Decision, Setting, Source, SourceKind
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.levers import Levers
from fasttrain.model.machine import Machine
from fasttrain.model.plan import Invocation, Processes
from fasttrain.model.settings import Settings
from fasttrain.planning.describe import BUILT_IN, NO_PYTHON, asked

_SECONDS = re.compile(r"[1-9][0-9]{0,6}")


def decide_guards(settings: Settings, machine: Machine) -> Guards:
    """Return what is watched during the run: progress and gradients.

    Raises:
        FasttrainError: ``hang-timeout`` for an invalid time, or on a system without ``/proc``.
    """
    nan = settings.on_nan
    return Guards(hang=_hang(settings, machine), nan=Decision(nan.value, asked(nan), nan.source))


def no_guards() -> Guards:
    """Return guards that are off, for a command that is not Python."""
    return Guards(
        hang=Decision(HangWatch(on=False), NO_PYTHON, BUILT_IN),
        nan=Decision("off", NO_PYTHON, BUILT_IN),
    )


def _hang(settings: Settings, machine: Machine) -> Decision[HangWatch]:
    setting, action = settings.hang_timeout, settings.on_hang.value
    if setting.value == "off":
        return Decision(HangWatch(on=False), asked(setting), setting.source)
    if setting.value != "auto" and not _SECONDS.fullmatch(setting.value):
        raise _no_time(setting)
    if machine.system != "Linux":
        if setting.source.explicit and setting.value != "auto":
            raise _no_proc(setting, machine)
        where = Source(SourceKind.MACHINE, "system")
        return Decision(HangWatch(on=False), "it needs Linux, whose /proc it reads", where)
    if setting.value == "auto":
        reason = "after 20 slow steps, at least 1 min, or 5 min where something computes"
        return Decision(HangWatch(on=True, action=action), reason, setting.source)
    watch = HangWatch(on=True, timeout_s=int(setting.value), action=action)
    return Decision(watch, asked(setting), setting.source)


def _no_time(setting: Setting[str]) -> FasttrainError:
    usage = setting.source.kind is SourceKind.FLAG
    return FasttrainError(
        f"{setting.source}: a hang timeout can't be {setting.value!r}",
        why="it takes auto, off, or whole seconds from 1",
        fix="write it like --hang-timeout 600",
        slug="hang-timeout",
        exit_code=ExitCode.USAGE if usage else ExitCode.CONTRADICTION,
    )


def _no_proc(setting: Setting[str], machine: Machine) -> FasttrainError:
    return FasttrainError(
        f"hangs can't be watched for on {machine.system} ({setting.source})",
        why="that reads Linux's /proc",
        fix="use --hang-timeout off",
        slug="hang-timeout",
    )


# Preemption: the run must end early, because another job needs its place.


def decide_preempt(
    settings: Settings, processes: Processes, levers: Levers, invocation: Invocation
) -> Decision[Preempt]:
    """Return whether the run takes snapshots, and whether it resumes from one.

    Raises:
        FasttrainError: ``preempt-options`` for options of snapshots if none are taken;
            ``preempt-ranks`` for ranks that fasttrain does not make data-parallel.
    """
    setting = settings.preempt
    if setting.value == "signal":
        _refuse_without_snapshots(settings)
        return left_to_the_script() if not setting.source.explicit else Decision(
            Preempt(), asked(setting), setting.source
        )  # fmt: skip
    if settings.resume.value and settings.run_dir.value:
        raise _two_directories()
    strategy = levers.strategy.value
    if processes.world_size > 1 and strategy.mode != "ddp":
        raise FasttrainError(
            "--preempt snapshot can't resume these ranks",
            why=f"there are {processes.world_size} of them, and {levers.strategy.reason}",
            fix="use --strategy ddp, one process, or --preempt signal and the script's own"
            " checkpoints",
            slug="preempt-ranks",
        )
    # With an agent, SIGTERM does not ask for a snapshot: torchrun's agent sends it to the other
    # workers when one has failed. Without an agent it means preemption.
    alone = processes.backend == "direct"
    decided = Preempt(
        "snapshot",
        signals=(invocation.warning, "SIGTERM") if alone else (invocation.warning,),
        every_min=settings.snapshot_every.value,
        resume=_resume(settings, invocation),
    )
    return Decision(decided, asked(setting), setting.source)


def _two_directories() -> FasttrainError:
    return FasttrainError(
        "--resume and --run-dir exclude each other",
        why="a run is resumed in the directory in which it began",
        fix="leave --run-dir out",
        slug="preempt-options",
    )


def _resume(settings: Settings, invocation: Invocation) -> ResumeMode:
    if settings.resume.value:
        return "required"
    environ = invocation.environ
    of_slurm = environ.get("SLURM_RESTART_COUNT", "")
    requeued = of_slurm.isdecimal() and int(of_slurm)
    again = invocation.restart_count or restart_count(environ) or requeued
    return "if-there" if again else "no"


def _refuse_without_snapshots(settings: Settings) -> None:
    for name in ("snapshot_every", "resume"):
        setting = getattr(settings, name)
        if setting.value is not None:
            raise FasttrainError(
                f"{setting.source} has no effect without --preempt snapshot",
                why="the run takes no snapshots",
                fix="add --preempt snapshot, or leave it out",
                slug="preempt-options",
            )


# Restarts of a run that fails.


FAILURES = {"any": "any failure", "auto": "recoverable failures"}


def decide_restarts(settings: Settings, processes: Processes) -> Decision[Restarts]:
    """Return how often a run is restarted, after which failures, and after how many seconds."""
    most, on = settings.max_restarts, settings.restart_on
    if processes.backend == "slurm":
        reason = "a rank that SLURM started can't be restarted without the others"
        return Decision(Restarts(0, on.value), reason, most.source)
    if not most.value:
        return Decision(Restarts(0, on.value), asked(most), most.source)
    restarts = Restarts(most.value, on.value)
    what = f"after {FAILURES[on.value]}"
    # The pause doubles, with the same limit as that of Kubernetes for failing containers.
    # Source: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle, CrashLoopBackOff
    reason = (
        f"{what}, {restarts.first_s:g} s later, and twice as long as before where it made no step,"
        f" up to {restarts.cap_s:g} s"
    )
    return Decision(restarts, reason, most.source)
