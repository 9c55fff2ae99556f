"""Checks of the host: cores, memory, limits and names."""

from __future__ import annotations

from collections.abc import Iterator

from fasttrain.doctor.checks.words import GIB, MIB, check, most_visible, size, visible
from fasttrain.hardware.vendors.npu import HEALTH
from fasttrain.model.examination import Examination, Finding
from fasttrain.model.vendors import VENDORS
from fasttrain.planning.describe import counted

_SHM = "/dev/shm"  # noqa: S108 - only named
# Docker gives 64 MiB. Source: docs.nvidia.com/deeplearning/nccl/user-guide, "Troubleshooting",
# "Docker": --shm-size=1g.
_SHM_BYTES = GIB
# What docker gives in all, and DataLoaders fill with a few batches.
_SHM_FREE_BYTES = 64 * MIB
# The kernel's own limit for a process that asks for none.
# Source: Linux 5.16, include/uapi/linux/resource.h, MLOCK_LIMIT; 64 KiB before.
_LOCKED_BYTES = 8 * MIB
# The soft limit that Linux starts with. Source: Linux 6.8, include/uapi/linux/fs.h, INR_OPEN_CUR.
_OPEN_FILES = 1024
# Gloo and NCCL connect every pair of ranks: 32 ranks make 496 pairs, with a port at each end.
_PORTS = 1000
# Of the memory granted, below which loader workers and a checkpoint drive a machine into swap.
_AVAILABLE_SHARE = 0.1

_SHM_FIXES = {
    "docker": "start the container with --shm-size=8g or --ipc=host",
    "podman": "start the container with --shm-size=8g or --ipc=host",
    "kubernetes": "mount an emptyDir with medium: Memory at /dev/shm",
}


@check("probe", "what the probes could not find out")
def _probe(seen: Examination) -> Iterator[Finding]:
    told_elsewhere = []
    if seen.torch and seen.torch.autoload_error:
        extensions = [vendor.extension for vendor in VENDORS.values() if vendor.extension]
        told_elsewhere += [f"{extension} is installed" for extension in extensions]
    if any(state.health != "OK" for state in seen.devices):
        told_elsewhere.append(HEALTH)
    for note in seen.machine.notes:
        if not any(text in note for text in told_elsewhere):
            yield _probe.finding(
                "warning",
                note,
                why="fasttrain plans with what the probes see, and goes without the rest",
                fix="mend what it names; till then leave it out of --device and --gpus",
            )


@check("shared-memory", "room in /dev/shm, by which loader workers hand batches over")
def _shared_memory(seen: Examination) -> Iterator[Finding]:
    total, free = seen.host.shm_bytes, seen.host.shm_free_bytes
    why = "loader workers and NCCL hand data over in it, and die of a bus error when it is full"
    if total is not None and total < _SHM_BYTES:
        otherwise = "sudo mount -o remount,size=8G /dev/shm"
        yield _shared_memory.finding(
            "warning",
            f"{_SHM} has {size(total)}",
            why=why,
            fix=_SHM_FIXES.get(seen.host.container, otherwise),
        )
    elif free is not None and free < _SHM_FREE_BYTES:
        yield _shared_memory.finding(
            "warning",
            f"{_SHM} has {size(free)} left",
            why=why,
            fix="ls -l /dev/shm shows whose it is; remove torch_* and nccl-* files of dead runs",
        )


@check("memory-left", "memory that is left on the host")
def _memory_left(seen: Examination) -> Iterator[Finding]:
    available, granted = seen.host.memory_available_bytes, seen.machine.cpu.memory_bytes
    if available is not None and available < granted * _AVAILABLE_SHARE:
        yield _memory_left.finding(
            "warning",
            f"{size(available)} of memory is left, of {size(granted)}",
            why="the kernel ends a process when loader workers or a checkpoint need more",
            fix="end what holds it: ps aux --sort=-rss | head",
        )


@check("memory-granted", "whether the host's memory can hold what a device holds")
def _memory_granted(seen: Examination) -> Iterator[Finding]:
    granted = seen.machine.cpu.memory_bytes
    largest = max((device.memory_bytes for device in seen.machine.devices), default=0)
    if 0 < granted < largest:
        yield _memory_granted.finding(
            "hint",
            f"this process may use {size(granted)} of memory; a device has {size(largest)}",
            why="a checkpoint of all that is on the device doesn't fit into it",
            fix="ask for more: --mem of SLURM, -m of docker",
        )


@check("cpu-quota", "a CPU quota below the processors that programs count")
def _quota(seen: Examination) -> Iterator[Finding]:
    quota, logical = seen.host.quota_cores, seen.host.logical_cpus
    if quota is None or logical is None or quota >= logical:
        return
    what = f"a quota grants {quota:g} of {logical} processors"
    if quota < 2:
        yield _quota.finding(
            "warning",
            what,
            why="a training loop and its loader workers share less than two cores",
            fix="raise the quota: --cpus of docker, limits.cpu of kubernetes",
        )
        return
    yield _quota.finding(
        "hint",
        what,
        why="os.cpu_count() and OpenMP count all of them, and their threads stall each other",
        fix=f"set num_workers to {int(quota)} or less; fasttrain run sets OpenMP's threads",
    )


@check("cores-per-device", "whether every device has a core for its process")
def _cores(seen: Examination) -> Iterator[Finding]:
    cores, devices = seen.machine.cpu.cores, most_visible(seen)
    if cores < devices:
        yield _cores.finding(
            "warning",
            f"{counted(cores, 'core')} granted for {devices} devices "
            f"({seen.machine.cpu.cores_reason})",
            why="each device's process needs a core of its own to keep it busy",
            fix="ask for more: --cpus-per-task of SLURM, --cpus of docker; or use fewer --gpus",
        )


@check("load", "whether others keep the processors busy")
def _load(seen: Examination) -> Iterator[Finding]:
    load, logical = seen.host.load, seen.host.logical_cpus
    if load is not None and logical is not None and load > logical:
        yield _load.finding(
            "warning",
            f"{load:.0f} processes want to run on {counted(logical, 'processor')}",
            why="loader workers and ranks wait for their turn",
            fix="top shows who is running; wait, or end what is not needed",
        )


@check("open-files", "the limit of open files")
def _open_files(seen: Examination) -> Iterator[Finding]:
    limits = seen.host.open_files
    if not limits or limits[0] == -1 or limits[0] > _OPEN_FILES:
        return
    soft, hard = limits[0], limits[-1]
    higher = "unlimited" if hard == -1 else str(hard)
    yield _open_files.finding(
        "hint" if soft == _OPEN_FILES else "warning",
        f"a process may open {soft} files",
        # Source: torch 2.13, torch.multiprocessing, "File descriptor - file_descriptor".
        why="each tensor that a loader worker hands over is an open file (Too many open files)",
        fix=f"ulimit -n {higher}"
        if hard == -1 or hard > soft
        else "raise nofile in /etc/security/limits.conf, or --ulimit nofile of docker",
    )


@check("locked-memory", "the limit of locked memory, for fast networks")
def _locked(seen: Examination) -> Iterator[Finding]:
    limit = seen.host.locked_memory_bytes
    if limit is None or not 0 <= limit <= _LOCKED_BYTES or len(visible(seen, "cuda")) < 2:
        return
    yield _locked.finding(
        "hint",
        f"a process may lock {limit // 1024} KiB of memory",
        why="NCCL locks its buffers for InfiniBand and RoCE between nodes, and fails if it may not",
        fix="ulimit -l unlimited, or --ulimit memlock=-1 of docker",
    )


@check("hostname", "whether this machine's own name has an address")
def _hostname(seen: Examination) -> Iterator[Finding]:
    if seen.host.hostname_resolves is False:
        name = seen.machine.hostname
        yield _hostname.finding(
            "warning",
            f"the name of this machine, {name}, has no address here",
            why="torchrun and gloo look it up, and wait or fail",
            fix=f'echo "127.0.1.1 {name}" | sudo tee -a /etc/hosts',
        )


@check("ports", "ports that the kernel can give to the ranks")
def _ports(seen: Examination) -> Iterator[Finding]:
    if not seen.host.ports:
        return
    first, last = seen.host.ports[0], seen.host.ports[-1]
    count = max(last - first + 1, 0)
    if count < _PORTS:
        yield _ports.finding(
            "warning",
            f"the kernel has {counted(count, 'port')} to give out, {first} to {last}",
            why="every pair of ranks takes some, and the last ones fail to connect",
            fix='sudo sysctl -w net.ipv4.ip_local_port_range="32768 60999"',
        )


CHECKS = (
    _probe,
    _shared_memory,
    _memory_left,
    _memory_granted,
    _quota,
    _cores,
    _load,
    _open_files,
    _locked,
    _hostname,
    _ports,
)
