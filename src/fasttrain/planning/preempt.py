"""Decides what becomes of a run that has to make room for another one."""

from __future__ import annotations

from fasttrain.model.attempts import restart_count
from fasttrain.model.decision import Decision
from fasttrain.model.errors import FasttrainError
from fasttrain.model.guards import Preempt, ResumeMode, left_to_the_script
from fasttrain.model.plan import Invocation, Levers, Processes
from fasttrain.model.settings import Settings
from fasttrain.planning.sources import asked


def decide_preempt(
    settings: Settings, processes: Processes, levers: Levers, invocation: Invocation
) -> Decision[Preempt]:
    """Give whether the run takes snapshots, and whether it goes on from one.

    Raises:
        FasttrainError: ``preempt-options`` where options for snapshots stand without them,
            ``preempt-ranks`` where the ranks are not the shim's to bring back.
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
            "--preempt snapshot can't bring these ranks back",
            why=f"there are {processes.world_size} of them, and {levers.strategy.reason}",
            fix="use --strategy ddp, one process, or --preempt signal and checkpoints of the"
            " script's own",
            slug="preempt-ranks",
        )
    # torchrun's agent ends the other workers by SIGTERM when one has failed; without an agent it
    # comes from whoever needs the place, to the launcher's whole process group as well.
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
        why="a run goes on in the directory in which it began",
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
                f"{setting.source} stands for nothing without --preempt snapshot",
                why="the run takes no snapshots",
                fix="add --preempt snapshot, or leave it out",
                slug="preempt-options",
            )
