"""Checks of the host: cores, memory, limits, names, and the folders that runs write to."""

from __future__ import annotations

from collections.abc import Iterator

from fasttrain.doctor.check import check, most_visible, visible
from fasttrain.files import FEW_BYTES
from fasttrain.hardware.vendors.npu import HEALTH
from fasttrain.model.errors import size
from fasttrain.model.machine import Disk, Examination, Finding
from fasttrain.model.vendors import VENDORS
from fasttrain.planning.describe import and_join, counted

_SHM = "/dev/shm"  # noqa: S108 - only named
# Docker gives 64 MiB. Source: docs.nvidia.com/deeplearning/nccl/user-guide, "Troubleshooting",
# "Docker": --shm-size=1g.
_SHM_BYTES = 2**30
# Docker's default for the whole of it; a few batches of a DataLoader fill as much.
_SHM_FREE_BYTES = 64 * 2**20
# The kernel's default limit.
# Source: Linux 5.16, include/uapi/linux/resource.h, MLOCK_LIMIT; 64 KiB before.
_LOCKED_BYTES = 8 * 2**20
# Linux's default soft limit. Source: Linux 6.8, include/uapi/linux/fs.h, INR_OPEN_CUR.
_OPEN_FILES = 1024
# Gloo and NCCL connect every pair of ranks: 32 ranks make 496 pairs, with a port at each end.
_PORTS = 1000
# Share of the granted memory; with less, loader workers and a checkpoint make a machine swap.
_AVAILABLE_SHARE = 0.1

_SHM_FIXES = {
    "docker": "start the container with --shm-size=8g or --ipc=host",
    "podman": "start the container with --shm-size=8g or --ipc=host",
    "kubernetes": "mount an emptyDir with medium: Memory at /dev/shm",
}

_NETWORKS = frozenset({"nfs", "nfs3", "nfs4", "cifs", "smb3", "fuse.sshfs"})

_NAMES = {"runs": "run directories", "cache": "the cache", "temporary": "temporary files"}
_ELSEWHERE = {
    "runs": "name another folder with --run-dir",
    "cache": "set XDG_CACHE_HOME or TORCHINDUCTOR_CACHE_DIR to another folder",
    "temporary": "set TMPDIR to another folder",
}
_USES = {
    "runs": "plan, logs and receipt of a run go there",
    "cache": "compiled kernels are kept there",
    "temporary": "compilers and communicating processes put files there",
}


@check("probe", "what the probes could not find out")
def _probe(seen: Examination) -> Iterator[Finding]:
    reported_elsewhere = []  # notes whose facts have a check of their own
    if seen.torch and seen.torch.autoload_error:
        extensions = [vendor.extension for vendor in VENDORS.values() if vendor.extension]
        reported_elsewhere += [f"{extension} is installed" for extension in extensions]
    if any(state.health != "OK" for state in seen.devices):
        reported_elsewhere.append(HEALTH)
    for note in seen.machine.notes:
        if not any(text in note for text in reported_elsewhere):
            yield _probe.finding(
                "warning",
                note,
                why="fasttrain plans with what the probes see, and ignores the rest",
                fix="repair what it names; until then leave it out of --device and --gpus",
            )


@check("shared-memory", "room in /dev/shm, through which loader workers pass batches")
def _shared_memory(seen: Examination) -> Iterator[Finding]:
    total, free = seen.host.shm_bytes, seen.host.shm_free_bytes
    why = "loader workers and NCCL pass data through it, and die of a bus error when it is full"
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
            f"{_SHM} has {size(free)} free",
            why=why,
            fix="ls -l /dev/shm shows who uses it; remove torch_* and nccl-* files of dead runs",
        )


@check("memory-left", "free memory of the host")
def _memory_left(seen: Examination) -> Iterator[Finding]:
    available, granted = seen.host.memory_available_bytes, seen.machine.cpu.memory_bytes
    if available is not None and available < granted * _AVAILABLE_SHARE:
        yield _memory_left.finding(
            "warning",
            f"{size(available)} of {size(granted)} of memory is free",
            why="the kernel kills a process when loader workers or a checkpoint need more",
            fix="end the processes that hold it: ps aux --sort=-rss | head",
        )


@check("memory-granted", "whether the host's memory can hold what a device holds")
def _memory_granted(seen: Examination) -> Iterator[Finding]:
    granted = seen.machine.cpu.memory_bytes
    largest = max((device.memory_bytes for device in seen.machine.devices), default=0)
    if 0 < granted < largest:
        yield _memory_granted.finding(
            "hint",
            f"this process may use {size(granted)} of memory; a device has {size(largest)}",
            why="a checkpoint of a full device doesn't fit into it",
            fix="ask for more: --mem of SLURM, -m of docker",
        )


@check("cpu-quota", "a CPU quota below the number of visible processors")
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
        why="os.cpu_count() and OpenMP count all of them, so too many threads compete",
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


@check("load", "whether other processes keep the processors busy")
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
        why="each tensor that a loader worker passes on is an open file (Too many open files)",
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


@check("hostname", "whether this machine's own name resolves to an address")
def _hostname(seen: Examination) -> Iterator[Finding]:
    if seen.host.hostname_resolves is False:
        name = seen.machine.hostname
        yield _hostname.finding(
            "warning",
            f"the name of this machine, {name}, does not resolve to an address",
            why="torchrun and gloo look it up, and wait or fail",
            fix=f'echo "127.0.1.1 {name}" | sudo tee -a /etc/hosts',
        )


@check("ports", "ports that are left for connections between ranks")
def _ports(seen: Examination) -> Iterator[Finding]:
    if not seen.host.ports:
        return
    first, last = seen.host.ports[0], seen.host.ports[-1]
    count = max(last - first + 1, 0)
    if count < _PORTS:
        yield _ports.finding(
            "warning",
            f"the kernel has {counted(count, 'ephemeral port')}, {first} to {last}",
            why="every pair of ranks needs some, and the last ranks fail to connect",
            fix='sudo sysctl -w net.ipv4.ip_local_port_range="32768 60999"',
        )


@check("disk-space", "room for checkpoints, caches and temporary files")
def _space(seen: Examination) -> Iterator[Finding]:
    # Folders on one file system share its free space: one finding for all of them.
    shared: dict[tuple[int, str], list[Disk]] = {}
    for disk in seen.host.disks:
        if disk.writable and disk.free_bytes < FEW_BYTES:
            shared.setdefault((disk.free_bytes, disk.filesystem), []).append(disk)
    for (free, _), disks in shared.items():
        purposes = and_join(f"{_NAMES[disk.purpose]} ({disk.path})" for disk in disks)
        yield _space.finding(
            "warning" if free else "error",
            f"{size(free) if free else 'nothing'} is free for {purposes}",
            why="a run fails when its checkpoint doesn't fit",
            fix=f"delete what is old (du -xh {disks[0].path} | sort -h | tail), or "
            + _ELSEWHERE[disks[0].purpose],
        )


@check("disk-access", "whether the folders that a run writes to are writable")
def _access(seen: Examination) -> Iterator[Finding]:
    for disk in seen.host.disks:
        if not disk.writable:
            yield _access.finding(
                "warning" if disk.purpose == "cache" else "error",
                f"{disk.path}, for {_NAMES[disk.purpose]}, can't be written",
                why=_USES[disk.purpose],
                fix=_ELSEWHERE[disk.purpose],
            )


@check("noexec", "whether compiled kernels can be loaded from their folder")
def _noexec(seen: Examination) -> Iterator[Finding]:
    for disk in seen.host.disks:
        if disk.writable and not disk.executable and disk.purpose != "runs":
            yield _noexec.finding(
                "warning",
                f"{disk.path}, for {_NAMES[disk.purpose]}, is mounted noexec",
                why="torch.compile builds libraries there, and can't load them",
                fix=_ELSEWHERE[disk.purpose],
            )


@check("network-disk", "whether caches and runs are on a network file system")
def _network(seen: Examination) -> Iterator[Finding]:
    for disk in seen.host.disks:
        if disk.filesystem in _NETWORKS and disk.purpose != "temporary":
            yield _network.finding(
                "hint",
                f"{disk.path}, for {_NAMES[disk.purpose]}, is on {disk.filesystem}",
                why="many small files and locks are slow over the network",
                fix=f"{_ELSEWHERE[disk.purpose]}, on a disk of this machine",
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
    _space,
    _access,
    _noexec,
    _network,
)
