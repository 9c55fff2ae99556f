"""Check a job itself for what would fail on its nodes or at its end, and make all checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fasttrain
from fasttrain.model.machine import Finding, Severity
from fasttrain.model.settings import NodeKind, PartitionLimits
from fasttrain.planning.slurm_values import in_force, left_out, signal_and_lead
from fasttrain.slurm.check_facts import TIMEOUT_S, Seen, ToolResult
from fasttrain.slurm.follow import SHUTDOWN_S
from fasttrain.slurm.refusals import refused

# Check a job against the limits of the cluster, and against the user's accounting.


# States of nodes that take no jobs until somebody repairs them. Powered-down nodes are not here:
# SLURM wakes them for a job.
# Source: sinfo(1), SLURM 22.05, "NODE STATE CODES".
AWAY = frozenset(
    {"down", "drained", "draining", "fail", "failing", "error", "unknown", "inval", "future"}
)
# With any of these enforced, the account must be the user's.
# Source: slurm.conf(5), SLURM 22.05, AccountingStorageEnforce: each of the others sets the first.
ASSOCIATIONS = frozenset({"associations", "limits", "qos", "safe", "wckeys"})
# Source: sbatch(1), SLURM 22.05, --mem: "Default units are megabytes"; [K|M|G|T].
_MEMORY = re.compile(r"(\d{1,12})([KMGT]?)B?", re.ASCII | re.IGNORECASE)
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024 * 1024}
# What a node has, in the order of `_has` and `_needs`.
_RESOURCES = (
    ("GPUs", "--gpus-per-node"),
    ("CPUs", "--cpus-per-task"),
    ("MiB of memory", "--mem"),
)


def judge_unread(seen: Seen) -> Iterator[Finding]:
    """Yield a finding for each query of the cluster that failed, whose checks are left out."""
    for what, why in seen.cluster.unread:
        yield Finding(
            "slurm-unread",
            "warning",
            f"the cluster's {what} can't be checked",
            why,
            "see whether scontrol ping says UP, or ask the cluster's administrators",
        )


def judge_partition(seen: Seen) -> Iterator[Finding]:
    """Yield findings for partitions that don't exist, or take no jobs."""
    known = {partition.name: partition for partition in seen.cluster.partitions}
    for name in _named(seen) if known else ():
        if name not in known:
            yield _partition(f"there is no partition {name}", f"there are {', '.join(known)}")
        elif known[name].state != "UP":
            why = "SLURM refuses its jobs, or lets them wait until it is up again"
            yield _partition(f"partition {name} is {known[name].state}", why)
    if known and not _named(seen) and not _partitions(seen):
        why = f"the cluster has no default partition; there are {', '.join(known)}"
        yield _partition("no partition was named", why)


def judge_time(seen: Seen) -> Iterator[Finding]:
    """Yield a finding if no partition of the job allows its time limit."""
    asked, partitions = seen.job.parameters.time_min, _partitions(seen)
    limits = [p.time_limit_min for p in partitions if p.time_limit_min is not None]
    if asked is None or not limits or len(limits) < len(partitions) or asked <= max(limits):
        return
    # Source: sacctmgr(1), SLURM 22.05, QOS flag PartitionTimeLimit: it may lift the limit.
    severity: Severity = "warning" if _asked(seen, "qos") else "error"
    yield Finding(
        "slurm-limit",
        severity,
        f"a time limit of {asked} min is over the {max(limits)} min of {_words(partitions)}",
        "SLURM refuses such a job, or lets it wait for ever (PartitionTimeLimit)",
        f"use --time {max(limits)} or less, or another --partition",
    )


def judge_nodes(seen: Seen) -> Iterator[Finding]:
    """Yield a finding if a job may not have so many nodes, or if too few fit or are up."""
    asked, partitions = seen.job.parameters.nodes, _partitions(seen)
    if not partitions:
        return
    where, most = _words(partitions), max(map(_most_nodes, partitions))
    fitting = [kind for kind in _kinds(seen) if _fits(seen, kind)]
    there = _count(fitting)
    up = _count(kind for kind in fitting if kind.state not in AWAY)
    if asked > most:
        yield _too_many(asked, f"a job in {where} gets at most {most}", most)
    elif fitting and asked > there:
        yield _too_many(asked, f"{where} has {there} with the GPUs, CPUs and memory needed", there)
    elif fitting and asked > up:
        yield Finding(
            "slurm-nodes",
            "warning",
            f"of the {there} nodes that fit in {where}, {up} are up, and the job needs {asked}",
            "it waits until the others are repaired; sinfo -R shows what is wrong with them",
            f"use --nodes {up} or fewer, or wait" if up else "wait, or use another --partition",
        )


def judge_resources(seen: Seen) -> Iterator[Finding]:
    """Yield findings for GPUs, CPUs or memory that no node of the partition has."""
    kinds, needs = _kinds(seen), _needs(seen)
    if not kinds:
        return
    where = _words(_partitions(seen))
    most = [max(column) for column in zip(*map(_has, kinds), strict=True)]
    short = False
    for (what, option), need, has in zip(_RESOURCES, needs, most, strict=True):
        if need > has:
            short = True
            yield _resources(f"no node of {where} has {need} {what}", f"{has} is the most", option)
    if not short and not any(_fits(seen, kind) for kind in kinds):
        wanted = [f"{need} {what}" for (what, _), need in zip(_RESOURCES, needs, strict=True)]
        why = f"no single node has all of {', '.join(wanted)}"
        yield _resources(f"no node of {where} fits", why, "one of them")


def judge_account(seen: Seen) -> Iterator[Finding]:
    """Yield a finding if the account or the QOS isn't the user's."""
    account, qos, cluster = _asked(seen, "account"), _asked(seen, "qos"), seen.cluster
    if cluster.associations is None:
        if (account or qos) and cluster.accounting is False:
            why = "this cluster has no accounting, and accepts any"
            fix = "leave out --account and --qos"
            yield Finding("slurm-account", "hint", "account and QOS aren't checked", why, fix)
        return
    mine = [each for each in cluster.associations if account in ("", each.account)]
    if not mine and (account or cluster.enforced & ASSOCIATIONS):
        names = {each.account for each in cluster.associations}
        yield _not_mine("account", account, names, strict=bool(cluster.enforced & ASSOCIATIONS))
    elif qos and not any(qos in each.qos for each in mine):
        names = {name for each in mine for name in each.qos}
        yield _not_mine("QOS", qos, names, strict="qos" in cluster.enforced)


def _named(seen: Seen) -> tuple[str, ...]:
    return tuple(name for name in _asked(seen, "partition").split(",") if name)


def _asked(seen: Seen, option: str) -> str:
    """Return the value of a sbatch option: that of the script, else sbatch's own variable."""
    written: str | None = seen.job.parameters.submitit.get(option)
    return written or seen.environ.get(f"SBATCH_{option.upper()}", "")


def _partitions(seen: Seen) -> tuple[PartitionLimits, ...]:
    """Return the existing partitions in which the job may run."""
    named = _named(seen)
    return tuple(p for p in seen.cluster.partitions if (p.name in named if named else p.default))


def _kinds(seen: Seen) -> list[NodeKind]:
    names = {partition.name for partition in _partitions(seen)}
    return [kind for kind in seen.cluster.nodes if kind.partition in names]


def _needs(seen: Seen) -> tuple[int, ...]:
    """Return the GPUs, CPUs and MiB of memory that each node must have."""
    wanted = seen.job.parameters.submitit
    cpus = wanted.get("ntasks_per_node", 1) * wanted.get("cpus_per_task", 1)
    return (wanted.get("gpus_per_node", 0), cpus, _memory_mb(wanted.get("mem", "0")))


def _memory_mb(text: str) -> int:
    found = _MEMORY.fullmatch(text)  # sbatch itself refuses what is not a size
    return int(int(found[1]) * _MIB[found[2].upper()]) if found else 0


def _has(kind: NodeKind) -> tuple[int, ...]:
    return (kind.gpus, kind.cpus, kind.memory_mb)


def _fits(seen: Seen, kind: NodeKind) -> bool:
    return all(has >= need for has, need in zip(_has(kind), _needs(seen), strict=True))


def _count(kinds: Iterable[NodeKind]) -> int:
    """Return the node count of the largest partition; no sum, as a node may be in several."""
    counts: dict[str, int] = {}
    for kind in kinds:
        counts[kind.partition] = counts.get(kind.partition, 0) + kind.count
    return max(counts.values(), default=0)


def _most_nodes(partition: PartitionLimits) -> int:
    limit = partition.max_nodes
    return partition.nodes if limit is None else min(limit, partition.nodes)


def _words(partitions: Iterable[PartitionLimits]) -> str:
    return "partition " + ",".join(partition.name for partition in partitions)


def _partition(what: str, why: str) -> Finding:
    return Finding("slurm-partition", "error", what, why, "use another --partition")


def _too_many(asked: int, why: str, most: int) -> Finding:
    return Finding(
        "slurm-nodes",
        "error",
        f"{asked} nodes are more than the job can get",
        f"{why}; SLURM refuses such a job, or lets it wait for ever",
        f"use --nodes {most} or fewer, or another --partition",
    )


def _resources(what: str, why: str, option: str) -> Finding:
    fix = f"ask for less of {option}, or use another --partition"
    return Finding("slurm-resources", "error", what, why, fix)


def _not_mine(what: str, name: str, names: set[str], *, strict: bool) -> Finding:
    listed = f"sacctmgr lists {', '.join(sorted(names))}" if names else "sacctmgr lists none"
    return Finding(
        "slurm-account",
        "error" if strict else "hint",
        f"{what} {name} isn't yours" if name else f"you have no {what}",
        listed if strict else f"{listed}; this cluster accepts any",
        f"use one of them with --{what.lower()}" if names else "ask the cluster's administrators",
    )


# Check a job itself for what would fail on its nodes or at its end, and make all checks.


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
