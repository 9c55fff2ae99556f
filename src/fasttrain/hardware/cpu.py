"""The processor: its name, its instruction sets, and how many cores this process may use."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping

from fasttrain.hardware.host import Host
from fasttrain.model.machine import Cpu
from fasttrain.processes.control_groups import group_folders

# The limits of this process's control groups.


def quota_cores(host: Host) -> float | None:
    """Return the tightest CPU quota in cores, such as 1.5; None if there is none."""
    quotas = [_quota(host, folder) for folder in group_folders(host.read, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_limit_bytes(host: Host) -> int | None:
    """Return the tightest memory limit in bytes; None if there is none."""
    limits = [
        host.read(f"{folder}/{name}").strip()
        for folder in group_folders(host.read, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    return min((int(limit) for limit in limits if limit.isdigit()), default=None)


def oom_kills(host: Host) -> int | None:
    """Return how many processes of this group the kernel has killed for memory; None if unknown.

    The count includes processes killed because the whole machine ran out of memory, and in version
    2 those of the groups below.

    Source: Documentation/admin-guide/cgroup-v2.rst, memory.events, and cgroup-v1/memory.rst,
    memory.oom_control, of Linux 6.12; mm/oom_kill.c, __oom_kill_process.
    """
    # The first folder is the group's own; those above count the processes of other groups as well.
    counts = (
        host.counted(f"{folder}/{name}", "oom_kill")
        for folder in group_folders(host.read, "memory")
        for name in ("memory.events", "memory.oom_control")
    )
    return next((count for count in counts if count is not None), None)


def _quota(host: Host, folder: str) -> float | None:
    words = host.read(f"{folder}/cpu.max").split() or [
        host.read(f"{folder}/cpu.cfs_quota_us").strip(),
        host.read(f"{folder}/cpu.cfs_period_us").strip(),
    ]
    # Without a limit the file holds "max" in version 2 and -1 in version 1.
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


# The processor: its name, its instruction sets, and how many cores this process may use.


# Flags of /proc/cpuinfo that matter to torch's kernels, and their names in a `Machine`.
FEATURES = {
    "avx2": "avx2",
    "avx512f": "avx512f",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_bf16": "amx_bf16",
    "amx_int8": "amx_int8",
    "amx_fp16": "amx_fp16",
    "asimd": "neon",
    "sve": "sve",
    "bf16": "bf16",
}

APPLE_BF16 = "hw.optional.arm.FEAT_BF16"


def probe_cpu(host: Host) -> Cpu:
    """Return the processor, with the cores and the memory granted to this process."""
    if host.system == "Darwin":
        model, features, physical = _apple(host)
    else:
        model, features = _cpuinfo(host)
        physical = _physical_memory_bytes(host)
    cores, reason = granted_cores(host)
    limits = [limit for limit in (physical, memory_limit_bytes(host)) if limit]
    return Cpu(model or host.architecture, cores, reason, min(limits, default=0), features)


def granted_cores(host: Host) -> tuple[int, str]:
    """Return the granted whole cores, at least 1, and the limit that decides."""
    limits: list[tuple[int, str]] = [(host.affinity, f"{host.affinity} CPUs in the affinity mask")]
    if (quota := quota_cores(host)) is not None:
        limits.append((int(quota), f"a cgroup quota of {quota:g} cores"))
    # srun sets it. A job script without --cpus-per-task has none; there the affinity decides.
    tasks = host.environ.get("SLURM_CPUS_PER_TASK", "")
    if tasks.isdecimal():
        limits.append((int(tasks), f"SLURM_CPUS_PER_TASK={tasks}"))
    cores, reason = min(limits, key=lambda limit: limit[0])  # on a tie, the affinity
    return max(cores, 1), reason


def physical_cores(host: Host) -> int:
    """Return how many physical cores this process may run on; 0 if that isn't known.

    Source: Linux 6.12, Documentation/ABI/stable/sysfs-devices-system-cpu, thread_siblings_list
    """
    siblings: set[str] = set()
    for cpu in _allowed_cpus(host):
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        listed = host.read(f"{folder}/thread_siblings_list").strip()
        if not listed:
            return 0
        siblings.add(listed)
    return len(siblings)


def _allowed_cpus(host: Host) -> Iterator[int]:
    for line in host.read("proc/self/status").splitlines():
        name, _, listed = line.partition(":")
        if name == "Cpus_allowed_list":  # such as 0-3,8
            for part in listed.strip().split(","):
                first, _, last = part.partition("-")
                if first.isdecimal() and (last or first).isdecimal():
                    yield from range(int(first), int(last or first) + 1)


def _cpuinfo(host: Host) -> tuple[str, tuple[str, ...]]:
    """Return model and features of the first processor; empty if the kernel lists none."""
    # Reading ends after one processor: the kernel takes long to list 256 of them.
    values: dict[str, str] = {}
    try:
        with (host.root / "proc/cpuinfo").open(errors="replace") as lines:
            for line in lines:
                if not line.strip():
                    break
                key, _, value = line.partition(":")
                values[key.strip()] = value.strip()
    except FileNotFoundError:
        return "", ()
    flags = set((values.get("flags") or values.get("Features", "")).split())
    return values.get("model name", ""), tuple(FEATURES[name] for name in FEATURES if name in flags)


def _physical_memory_bytes(host: Host) -> int:
    for line in host.read("proc/meminfo").splitlines():
        words = line.split()
        if words[:1] == ["MemTotal:"]:
            return int(words[1]) * 1024  # unlike host.counted(), an unreadable number is an error
    return 0


def _apple(host: Host) -> tuple[str, tuple[str, ...], int]:
    values = host.sysctl("machdep.cpu.brand_string", "hw.memsize", APPLE_BF16)
    features = ("bf16",) if values.get(APPLE_BF16) == "1" else ()
    return (
        values.get("machdep.cpu.brand_string", ""),
        features,
        int(values.get("hw.memsize", 0)),
    )


# The compiler of torch.compile's CPU code.


def find_cxx_compiler(environ: Mapping[str, str], *, system: str = "") -> str:
    """Return the path of the C++ compiler that inductor would call; empty if it would find none.

    Inductor calls ``$CXX``, or else ``g++`` (``clang++`` on macOS), and nothing else. On Linux it
    fails with clang++ alone, and with two words such as ``CXX="ccache g++"``.

    Source: torch 2.13.0, torch/_inductor/config.py, ``cpp.cxx``.
    """
    usual = "clang++" if (system or platform.system()) == "Darwin" else "g++"
    name = environ.get("CXX", usual)
    return shutil.which(name, path=environ.get("PATH", os.defpath)) or ""
