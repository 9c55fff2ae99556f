"""Check a job itself for what would fail on its nodes or at its end, and make all checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fasttrain
from fasttrain.model.examination import Finding
from fasttrain.planning.slurm.environment import in_force, left_out
from fasttrain.planning.slurm.values import signal_and_lead
from fasttrain.slurm.check.cluster import (
    judge_account,
    judge_nodes,
    judge_partition,
    judge_resources,
    judge_time,
    judge_unread,
)
from fasttrain.slurm.check.facts import TIMEOUT_S, Seen, ToolResult
from fasttrain.slurm.ending import SHUTDOWN_S
from fasttrain.slurm.refusals import refused

# File systems that belong to one machine. Others may be shared, and most are.
LOCAL = frozenset(
    {"tmpfs", "ramfs", "overlay", "aufs", "squashfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs",
     "f2fs", "jfs", "reiserfs", "bcachefs"}
)  # fmt: skip
# "FILE: line 3: syntax error ...", as bash prints it.
_BASH_LINE = re.compile(r"^.*?: line (\d+): (.*)$", re.MULTILINE)


def judge_end(seen: Seen) -> Iterator[Finding]:
    """Yield a finding if the warning signal comes too late to save, or at once."""
    signal, lead_s = signal_and_lead(seen.slurm.signal)
    limit_min = seen.job.parameters.time_min
    if limit_min is not None and limit_min * 60 <= lead_s:
        yield Finding(
            "slurm-signal",
            "error",
            f"the warning signal comes {lead_s} s before the end, and the job has {limit_min} min",
            "it comes as soon as the job starts",
            f"use a longer --time, or fewer seconds, such as --signal {signal}@{limit_min * 30}",
        )
    elif lead_s < SHUTDOWN_S:
        yield Finding(
            "slurm-signal",
            "warning",
            f"the warning signal comes {lead_s} s before the end",
            f"ending a script that doesn't end by itself takes up to {SHUTDOWN_S:g} s",
            f"use --signal {signal}@90",
        )


def judge_binding(seen: Seen) -> Iterator[Finding]:
    """Yield a finding if each task gets one GPU but the script chooses one by its local rank."""
    if not seen.gpus_per_task or seen.slurm.tasks.value != "per-gpu":
        return
    place = seen.local_rank
    yield Finding(
        "slurm-gpus-per-task",
        "error" if place else "warning",
        f"{seen.gpus_per_task} gives each task one GPU"
        + (f", and the script reads {place.what}" if place else ""),
        "if the cluster confines tasks to their GPUs, each task sees only its own, as cuda:0, and"
        " cuda:LOCAL_RANK doesn't exist",
        "leave it out; --gpus-per-node with --tasks per-gpu shows each task all GPUs of the node",
        place.where if place else "",
    )


def judge_places(seen: Seen) -> Iterator[Finding]:
    """Yield findings for folders that other nodes may not see."""
    by_type: dict[str, dict[str, str]] = {}
    for place in seen.places:
        needed = by_type.setdefault(place.filesystem, {})
        if not any(Path(place.path).is_relative_to(folder) for folder in needed):
            needed[place.path] = f"{place.what} ({place.path})"
    for filesystem, needed in by_type.items():
        if filesystem not in LOCAL:
            continue
        yield Finding(
            "slurm-shared",
            "warning",
            f"on a file system of only this machine ({filesystem}): {', '.join(needed.values())}",
            "without them under the same path on the nodes, the job fails as soon as it starts",
            "move them to a file system that the nodes share, if they don't have this one",
        )


def judge_python(seen: Seen) -> Iterator[Finding]:
    """Yield a finding if the nodes' interpreter can't run a task, as far as this machine shows."""
    trial, named = seen.python, seen.slurm.python.value
    if trial is None:
        return
    if trial.error:
        said = trial.said.strip().splitlines()
        what, why = f"{named} can't import fasttrain", said[-1] if said else trial.error
    elif (version := trial.said.strip()) != fasttrain.__version__:
        what = f"{named} has fasttrain {version[:40]!r}"
        why = (
            f"this is fasttrain {fasttrain.__version__}; tasks read only files of their own version"
        )
    else:
        return
    fix = f"{named} -m pip install fasttrain=={fasttrain.__version__}, or leave out --python"
    yield Finding("slurm-python", "error", what, why, fix)


def judge_setup(seen: Seen) -> Iterator[Finding]:
    """Yield a finding if bash can't parse the setup lines."""
    trial = seen.setup
    if trial is None or not trial.error:
        return
    found = _BASH_LINE.search(trial.said)
    lines = "\n".join(seen.slurm.setup.value).splitlines()
    number = int(found[1]) if found else 0
    line = lines[number - 1] if 0 < number <= len(lines) else lines[-1]
    yield Finding(
        "slurm-setup",
        "error",
        f"{seen.slurm.setup.source} is not valid bash: {line!r}",
        found[2] if found else trial.error,
        "write it as in a batch script; quotes and blocks must be closed",
    )


def judge_environment(seen: Seen) -> Iterator[Finding]:
    """Yield a finding for each of sbatch's own variables: those it takes, and those left out."""
    parameters = seen.job.parameters
    for name, value in in_force(parameters, seen.environ).items():
        yield Finding(
            "slurm-environment",
            "hint",
            f"{name}={value} is in the environment",
            "sbatch takes it as an option, since nothing else was asked for",
            f"unset {name} if you don't want that",
        )
    for name, option in sorted(left_out(parameters, seen.environ).items()):
        yield Finding(
            "slurm-environment",
            "hint",
            f"{name} is in the environment, and left out of the job",
            f"it would override the batch script; {option} decides",
            f"unset {name}, or leave it",
        )


def judge_sent(seen: Seen) -> Iterator[Finding]:
    """Yield a finding if ``sbatch --test-only`` refuses the script that would be sent."""
    trial = seen.sent
    if not trial.error:
        return
    if not trial.said:
        why = trial.error
        fix = "check scontrol ping"
        yield Finding("slurm-hangs", "error", "sbatch --test-only gave no answer", why, fix)
        return
    refusal = refused(RuntimeError(trial.said), int(TIMEOUT_S))
    yield Finding(refusal.slug, "error", refusal.what, refusal.why, refusal.fix)


def predicted_start(trial: ToolResult) -> str:
    """Return when and where the job would start, in sbatch's words; empty if it doesn't say."""
    found = re.search(r"^sbatch: Job \d+ (to start at .*)$", trial.said, re.MULTILINE)
    return found[1] if found and not trial.error else ""


CHECKS: tuple[Callable[[Seen], Iterator[Finding]], ...] = (
    judge_partition,
    judge_time,
    judge_nodes,
    judge_resources,
    judge_account,
    judge_end,
    judge_binding,
    judge_python,
    judge_setup,
    judge_places,
    judge_environment,
    judge_unread,
)


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of all checks.

    Attributes:
        findings: What would fail, or may fail, in the order of the checks.
        start: When and where the job would start, in sbatch's words; empty if it doesn't say.
        sbatch: The whole output of ``sbatch --test-only``.
        warnings: What else the user should know, one sentence each.
    """

    findings: tuple[Finding, ...]
    start: str
    sbatch: str
    warnings: tuple[str, ...] = ()

    @property
    def broken(self) -> bool:
        """True if the job would fail, or never start."""
        return any(finding.severity == "error" for finding in self.findings)


def check(seen: Seen) -> Checked:
    """Return what would fail in a job, perhaps only after hours in the queue."""
    findings = [finding for judge in CHECKS for finding in judge(seen)]
    causes = {finding.check for finding in findings if finding.severity == "error"}
    if any(finding.check == "slurm-nodes" for finding in findings):
        # --test-only refuses a job that needs a drained node, but sbatch itself accepts it, and it
        # waits. Seen on SLURM 22.05.
        causes.add("slurm-resources")
    # sbatch's own words count only if no check has found the cause of its refusal.
    findings += [finding for finding in judge_sent(seen) if finding.check not in causes]
    said = seen.sent.said.strip()
    start = predicted_start(seen.sent)
    return Checked(tuple(findings), start, said, seen.job.parameters.warnings)
