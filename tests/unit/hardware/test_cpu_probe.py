"""The processor, and the share of it that is granted, on recorded trees."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from fasttrain.hardware.cpu import granted_cores, physical_cores, probe_cpu

GIB = 2**30
NO_LIMIT_V1 = "9223372036854771712\n"

CPUINFO_X86 = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
model name\t: not this one
flags\t\t: avx512_fp16
"""
CPUINFO_ARM = "processor\t: 0\nBogoMIPS\t: 200.00\nFeatures\t: fp asimd sve bf16 i8mm\n\n"


def v1(folder: str, quota: str, period: str = "100000") -> dict[str, str]:
    return {
        f"sys/fs/cgroup/{folder}/cpu.cfs_quota_us": f"{quota}\n",
        f"sys/fs/cgroup/{folder}/cpu.cfs_period_us": f"{period}\n",
    }


V1_GROUPS = "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n"
V2_GROUPS = "0::/user.slice/job_7/step\n"

QUOTAS = {
    "v1 in a container, whose group's path is the host's": (
        {"proc/self/cgroup": V1_GROUPS, **v1("cpu,cpuacct", "150000")},
        1,
        "1.5",
    ),
    "v1 on the host": (
        {
            "proc/self/cgroup": V1_GROUPS,
            **v1("cpu,cpuacct/docker/abc", "400000"),
            **v1("cpu,cpuacct", "-1"),
        },
        4,
        "4",
    ),
    "v1 mounted by the controller's name alone": (
        {"proc/self/cgroup": V1_GROUPS, **v1("cpu", "300000")},
        3,
        "3",
    ),
    "v2, own group": (
        {
            "proc/self/cgroup": V2_GROUPS,
            "sys/fs/cgroup/user.slice/job_7/step/cpu.max": "250000 100000\n",
        },
        2,
        "2.5",
    ),
    "v2, a group above is tighter": (
        {
            "proc/self/cgroup": V2_GROUPS,
            "sys/fs/cgroup/user.slice/job_7/step/cpu.max": "600000 100000\n",
            "sys/fs/cgroup/user.slice/job_7/cpu.max": "150000 50000\n",
            "sys/fs/cgroup/user.slice/cpu.max": "max 100000\n",
        },
        3,
        "3",
    ),
    "v2 in a container of its own namespace": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"},
        1,
        "0.5",
    ),
    "v2 outside the namespace": (
        {
            "proc/self/cgroup": "0::/../../job\n",
            "sys/fs/cgroup/cpu.max": "200000 100000\n",
            "sys/job/cpu.max": "100000 100000\n",  # where the dots lead in the file system
        },
        2,
        "2",
    ),
    "v2 beside v1": (
        {
            "proc/self/cgroup": "1:cpu:/\n0::/x\n",
            **v1("cpu", "-1"),
            "sys/fs/cgroup/unified/x/cpu.max": "500000 100000\n",
        },
        5,
        "5",
    ),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_a_quota_gives_whole_cores_and_is_named(make_host: Any, name: str) -> None:
    files, cores, quota = QUOTAS[name]
    granted, reason = granted_cores(make_host(files, affinity=8))
    assert granted == cores
    assert re.search(rf"\bquota\b.* {re.escape(quota)} ", reason)


@pytest.mark.parametrize(
    "limits",
    [
        {"proc/self/cgroup": V2_GROUPS, "sys/fs/cgroup/cpu.max": "max 100000\n"},
        {"proc/self/cgroup": V1_GROUPS, **v1("cpu,cpuacct", "-1")},
        {"proc/self/cgroup": V1_GROUPS, **v1("cpu,cpuacct", "100000", "0")},
        {"proc/self/cgroup": "garbage\n0::\n::::\n", "sys/fs/cgroup/cpu.max": "x y z\n"},
        {},
    ],
)
def test_without_a_quota_the_affinity_decides(make_host: Any, limits: dict[str, str]) -> None:
    granted, reason = granted_cores(make_host(limits, affinity=6))
    assert granted == 6
    assert "6 CPUs" in reason
    assert "affinity" in reason


@pytest.mark.parametrize(
    ("value", "cores"), [("4", 4), ("16", 8), ("0", 1), ("", 8), ("many", 8), ("-2", 8)]
)
def test_slurms_share_counts_when_it_is_a_number(make_host: Any, value: str, cores: int) -> None:
    granted, reason = granted_cores(make_host(SLURM_CPUS_PER_TASK=value))
    assert granted == cores
    assert ("SLURM" in reason) == (cores != 8)


def test_the_tightest_limit_wins(make_host: Any) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}
    assert granted_cores(make_host(files, affinity=16, SLURM_CPUS_PER_TASK="2"))[0] == 2
    assert granted_cores(make_host(files, affinity=16, SLURM_CPUS_PER_TASK="4"))[0] == 3


def test_an_x86_processor_is_named_with_its_features(make_host: Any) -> None:
    cpu = probe_cpu(make_host({"proc/cpuinfo": CPUINFO_X86}))
    assert cpu.model == "Intel(R) Xeon(R) Platinum 8480+"
    assert set(cpu.features) == {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}
    assert cpu.bf16


def test_an_arm_processor_is_named_by_its_architecture(make_host: Any) -> None:
    cpu = probe_cpu(make_host({"proc/cpuinfo": CPUINFO_ARM}))
    assert cpu.model == "x86_64"  # the recorded host's own word; the file has no model name
    assert set(cpu.features) == {"neon", "sve", "bf16"}
    assert cpu.bf16


def test_a_tree_without_proc_is_survived(make_host: Any) -> None:
    cpu = probe_cpu(make_host())
    assert (cpu.model, cpu.cores, cpu.memory_bytes, cpu.features) == ("x86_64", 8, 0, ())


@pytest.mark.parametrize(
    ("groups", "limit", "expected"),
    [
        ("0::/job\n", {"sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n"}, 4 * GIB),
        ("0::/job\n", {"sys/fs/cgroup/job/memory.max": "max\n"}, 16 * GIB),
        (
            V1_GROUPS,
            {"sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{3 * GIB}\n"},
            3 * GIB,
        ),
        (V1_GROUPS, {"sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1}, 16 * GIB),
        ("0::/\n", {"sys/fs/cgroup/memory.max": f"{64 * GIB}\n"}, 16 * GIB),
    ],
)
def test_memory_is_the_least_of_physical_and_granted(
    make_host: Any, groups: str, limit: dict[str, str], expected: int
) -> None:
    files = {"proc/meminfo": f"MemTotal:  {16 * 2**20} kB\nMemFree: 5 kB\n", **limit}
    cpu = probe_cpu(make_host({"proc/self/cgroup": groups, **files}))
    assert cpu.memory_bytes == expected


def test_this_process_is_granted_its_affinity_mask() -> None:
    code = (
        "import os\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from fasttrain.hardware.host import Host\n"
        "print(Host({}).affinity)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


def test_a_mac_is_asked_by_sysctl(make_host: Any) -> None:
    lines = (
        "machdep.cpu.brand_string: Apple M2",
        "hw.memsize: 17179869184",
        "hw.optional.arm.FEAT_BF16: 1",
    )
    script = "\n".join(f"echo '{line}'" for line in lines)
    cpu = probe_cpu(make_host(system="Darwin", tools={"sysctl": script}))
    assert (cpu.model, cpu.memory_bytes, cpu.features) == ("Apple M2", 16 * GIB, ("bf16",))


def topology(allowed: str, siblings: dict[int, str]) -> dict[str, str]:
    folder = "sys/devices/system/cpu"
    listed = {
        f"{folder}/cpu{n}/topology/thread_siblings_list": f"{it}\n" for n, it in siblings.items()
    }
    return {"proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{allowed}\n", **listed}


@pytest.mark.parametrize(
    ("allowed", "siblings", "cores"),
    [
        ("0-3", {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 2),
        ("0-3", {0: "0", 1: "1", 2: "2", 3: "3"}, 4),
        ("1,3", {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 1),
        ("0,2-3", {0: "0-1", 2: "2-3", 3: "2-3"}, 2),
        ("0-1", {0: "0"}, 0),  # of cpu1 nothing is known
        ("", {}, 0),
    ],
)
def test_physical_cores_are_those_of_the_affinity_mask(
    make_host: Any, allowed: str, siblings: dict[int, str], cores: int
) -> None:
    assert physical_cores(make_host(topology(allowed, siblings))) == cores
