"""What is in a job itself that would fail on its nodes, or at its end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import fasttrain
from fasttrain.model.examination import Finding
from fasttrain.planning.slurm.environment import in_force, left_out
from fasttrain.planning.slurm.values import signal_and_lead
from fasttrain.slurm.check.facts import TIMEOUT_S, Seen, Trial
from fasttrain.slurm.ending import SHUTDOWN_S
from fasttrain.slurm.refusals import refused

# File systems that one machine has for itself. All others may be shared, and most are.
LOCAL = frozenset(
    {"tmpfs", "ramfs", "overlay", "aufs", "squashfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs",
     "f2fs", "jfs", "reiserfs", "bcachefs"}
)  # fmt: skip
# "FILE: line 3: syntax error ...", as bash prints it.
_BASH_LINE = re.compile(r"^.*?: line (\d+): (.*)$", re.MULTILINE)


def judge_end(seen: Seen) -> Iterator[Finding]:
    """Tell of a warning signal that comes too late to save, or at once."""
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
    """Tell of tasks with one GPU each whose script counts them by its local rank."""
    if not seen.gpus_per_task or seen.slurm.tasks.value != "per-gpu":
        return
    place = seen.local_rank
    yield Finding(
        "slurm-gpus-per-task",
        "error" if place else "warning",
        f"{seen.gpus_per_task} gives each task one GPU"
        + (f", and the script reads {place.what}" if place else ""),
        "where the cluster confines tasks to their GPUs, each sees its own as cuda:0 alone, and"
        " cuda:LOCAL_RANK doesn't exist",
        "leave it out; --gpus-per-node with --tasks per-gpu shows each task all of the node's GPUs",
        place.where if place else "",
    )


def judge_places(seen: Seen) -> Iterator[Finding]:
    """Tell of folders that other nodes may not see."""
    by_type: dict[str, dict[str, str]] = {}
    for place in seen.places:
        told = by_type.setdefault(place.filesystem, {})
        if not any(Path(place.path).is_relative_to(folder) for folder in told):
            told[place.path] = f"{place.what} ({place.path})"
    for filesystem, needed in by_type.items():
        if filesystem not in LOCAL:
            continue
        yield Finding(
            "slurm-shared",
            "warning",
            f"on a file system of this machine alone ({filesystem}): {', '.join(needed.values())}",
            "the nodes need them under the same path, or the job fails as soon as it starts",
            "move them to a file system that the nodes share, if they don't have this one",
        )


def judge_python(seen: Seen) -> Iterator[Finding]:
    """Tell of an interpreter that can't do a task, as far as it can be tried here."""
    trial, named = seen.python, seen.slurm.python.value
    if trial is None:
        return
    if trial.error:
        said = trial.said.strip().splitlines()
        what, why = f"{named} can't import fasttrain", said[-1] if said else trial.error
    elif (version := trial.said.strip()) != fasttrain.__version__:
        what = f"{named} has fasttrain {version[:40]!r}"
        why = f"this is fasttrain {fasttrain.__version__}, and tasks read only what their own wrote"
    else:
        return
    fix = f"{named} -m pip install fasttrain=={fasttrain.__version__}, or leave out --python"
    yield Finding("slurm-python", "error", what, why, fix)


def judge_setup(seen: Seen) -> Iterator[Finding]:
    """Tell of setup lines that bash can't read."""
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
        f"{seen.slurm.setup.source} is no valid bash: {line!r}",
        found[2] if found else trial.error,
        "write it as you would in a batch script; quotes and blocks have to be closed",
    )


def judge_environment(seen: Seen) -> Iterator[Finding]:
    """Tell which of sbatch's own variables decide over the job, and which are left out."""
    parameters = seen.job.parameters
    for name, value in in_force(parameters, seen.environ).items():
        yield Finding(
            "slurm-environment",
            "hint",
            f"{name}={value} is in the environment",
            "sbatch takes it as an option, since nothing else was asked for",
            f"unset {name} if that isn't meant",
        )
    for name, option in sorted(left_out(parameters, seen.environ).items()):
        yield Finding(
            "slurm-environment",
            "hint",
            f"{name} is in the environment, and left out of the job",
            f"it would overrule what the batch script says; {option} decides",
            f"unset {name}, or leave it",
        )


def judge_sent(seen: Seen) -> Iterator[Finding]:
    """Tell what sbatch has against the very script that would be sent."""
    trial = seen.sent
    if not trial.error:
        return
    if not trial.said:
        why = trial.error
        fix = "see what scontrol ping says"
        yield Finding("slurm-hangs", "error", "sbatch --test-only gave no answer", why, fix)
        return
    refusal = refused(RuntimeError(trial.said), int(TIMEOUT_S))
    yield Finding(refusal.slug, "error", refusal.what, refusal.why, refusal.fix)


def foretold(trial: Trial) -> str:
    """Return when and where the job would start, in sbatch's words; empty where it says none."""
    found = re.search(r"^sbatch: Job \d+ (to start at .*)$", trial.said, re.MULTILINE)
    return found[1] if found and not trial.error else ""
