"""Checks of the host: cores, memory, limits, names, folders and SLURM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fasttrain.doctor.diagnosis import diagnose
from fasttrain.hardware.vendors.npu import HEALTH, NPU_WITHOUT
from fasttrain.model.machine import Cpu, Disk, Partition
from support.examinations import GIB, MIB, NPU, container, fires, node, quiet, verify

RELEASE = "24.11.3"
NOTE = "GPU 3 can't be used: GPU is lost"
GPU_PARTITION = Partition("gpu", 16, 12, gpus_per_node=8, default=True)
ONE_CORE = Cpu("Xeon", 1, "SLURM_CPUS_PER_TASK=1", 2048 * GIB)


def host(**fields: Any) -> Any:
    return container(host=fields)


def disk(purpose: str, **fields: Any) -> Any:
    """Return a machine of one folder, with these fields."""
    healthy = Disk(purpose, f"/{purpose}", 20 * GIB, filesystem="ext4")  # type: ignore[arg-type]
    return container(host={"disks": (replace(healthy, **fields),)})


def slurm(count: int = 8, **fields: Any) -> Any:
    return node(count, cluster=fields)


def cpus(cores: int, memory_bytes: int = 16 * 2**30) -> Any:
    return {"cpu": Cpu("EPYC", cores, "a cgroup quota", memory_bytes)}


CASES = [
    fires("probe", "warning", NOTE, node(machine={"notes": (NOTE,)})),
    fires(
        "probe",
        "warning",
        "torch_npu",
        node(device=NPU, machine={"notes": (f"{NPU_WITHOUT} …",)}),
    ),
    fires(
        "probe",
        "warning",
        "NPU 1 (x) … Alarm",
        node(machine={"notes": (f"NPU 1 (x) {HEALTH} Alarm",)}),
    ),
    quiet("probe", node()),
    quiet(
        "probe",
        node(
            device=NPU,
            machine={"notes": (f"NPU 1 (x) {HEALTH} Alarm",)},
            states={1: {"health": "Alarm"}},
        ),
    ),
    quiet(
        "probe",
        node(
            device=NPU,
            machine={"notes": (f"{NPU_WITHOUT} …",)},
            trial={"autoload_error": "libhccl.so"},
        ),
    ),
    fires("shared-memory", "warning", "/dev/shm … 64 MiB", host(shm_bytes=64 * MIB)),
    fires("shared-memory", "warning", "/dev/shm … 10 MiB", host(shm_free_bytes=10 * MIB)),
    quiet("shared-memory", host(shm_bytes=GIB, shm_free_bytes=64 * MIB)),
    quiet("shared-memory", host(shm_bytes=None, shm_free_bytes=None)),
    fires(
        "memory-left",
        "warning",
        "1.5 GiB … 16 GiB",
        host(memory_available_bytes=3 * GIB // 2),
    ),
    quiet("memory-left", host(memory_available_bytes=2 * GIB)),
    quiet("memory-left", host(memory_available_bytes=None)),
    fires(
        "memory-granted",
        "hint",
        "64 GiB … 80 GiB",
        node(1, machine=cpus(8, 64 * GIB)),
    ),
    quiet("memory-granted", node(1, machine=cpus(8, 0))),
    quiet("memory-granted", node(1, machine=cpus(8, 80 * GIB))),
    fires("cpu-quota", "warning", "1.5 … 64", host(quota_cores=1.5, logical_cpus=64)),
    fires("cpu-quota", "hint", "2 … 64", host(quota_cores=2.0, logical_cpus=64)),
    quiet("cpu-quota", host(quota_cores=4.0, logical_cpus=4)),
    quiet("cpu-quota", host(quota_cores=1.0, logical_cpus=None)),
    quiet("cpu-quota", host(quota_cores=None, logical_cpus=64)),
    fires(
        "cores-per-device",
        "warning",
        "1 core … 8 devices … SLURM_CPUS_PER_TASK=1",
        node(machine={"cpu": ONE_CORE}),
    ),
    quiet("cores-per-device", node(machine=cpus(8))),
    quiet(
        "cores-per-device", node(machine={"cpu": ONE_CORE}, environ={"CUDA_VISIBLE_DEVICES": "0"})
    ),
    fires("load", "warning", "9 processes … 4 processors", host(load=9.2)),
    quiet("load", host(load=4.0)),
    quiet("load", host(load=None)),
    quiet("load", host(load=9.0, logical_cpus=None)),
    fires("open-files", "hint", "1024", host(open_files=(1024, 4096))),
    fires("open-files", "warning", "256", host(open_files=(256, -1))),
    quiet("open-files", host(open_files=(1025, 4096))),
    quiet("open-files", host(open_files=(-1, -1))),
    quiet("open-files", host(open_files=None)),
    fires("locked-memory", "hint", "8192 KiB", node(host={"locked_memory_bytes": 8 * MIB})),
    quiet("locked-memory", node(host={"locked_memory_bytes": 8 * MIB + 1})),
    fires("locked-memory", "hint", "0 KiB", node(2, host={"locked_memory_bytes": 0})),
    quiet("locked-memory", node(host={"locked_memory_bytes": None})),
    quiet("locked-memory", node(host={"locked_memory_bytes": -1})),
    quiet("locked-memory", node(1, host={"locked_memory_bytes": 65536})),
    fires("hostname", "warning", "node7", host(hostname_resolves=False)),
    quiet("hostname", host(hostname_resolves=None)),
    fires("ports", "warning", "100 … 40000 … 40099", host(ports=(40000, 40099))),
    quiet("ports", host(ports=(40000, 40999))),
    quiet("ports", host(ports=None)),
    fires(
        "disk-space",
        "warning",
        "512 MiB … /runs",
        disk("runs", free_bytes=512 * MIB),
    ),
    fires(
        "disk-space",
        "error",
        "/temporary",
        disk("temporary", free_bytes=0),
    ),
    quiet("disk-space", disk("runs", free_bytes=GIB)),
    quiet("disk-space", disk("runs", free_bytes=0, writable=False)),
    fires(
        "disk-access",
        "error",
        "/runs",
        disk("runs", writable=False),
    ),
    fires("disk-access", "warning", "/cache", disk("cache", writable=False)),
    quiet("disk-access", disk("runs")),
    fires(
        "noexec",
        "warning",
        "/temporary … noexec",
        disk("temporary", executable=False),
    ),
    quiet("noexec", disk("runs", executable=False)),
    quiet("noexec", disk("cache", executable=False, writable=False)),
    fires(
        "network-disk",
        "hint",
        "/cache … nfs4",
        disk("cache", filesystem="nfs4"),
    ),
    quiet("network-disk", disk("temporary", filesystem="nfs4")),
    quiet("network-disk", disk("cache", filesystem="lustre")),
    fires(
        "slurm",
        "hint",
        "SLURM 24.11.3 … gpu (default) … 12 of 16 nodes … 8 GPUs",
        slurm(version=RELEASE, partitions=(GPU_PARTITION,)),
    ),
    quiet("slurm", slurm(version=RELEASE, partitions=(GPU_PARTITION,), job="7")),
    quiet("slurm", container()),
    fires(
        "slurm-controller",
        "warning",
        "Unable to contact slurm controller",
        slurm(version=RELEASE, error="Unable to contact slurm controller"),
    ),
    fires(
        "slurm-controller",
        "hint",
        "SLURM",
        slurm(configured=False, error="fatal", job="7"),
    ),
    quiet("slurm-controller", slurm(configured=False, error="fatal")),  # the package alone
    quiet("slurm-controller", slurm(version=RELEASE)),
    fires(
        "slurm-allocation",
        "hint",
        "job 7 … 2 … 8 GPUs",
        slurm(job="7", job_gpus=("0", "1")),
    ),
    fires("slurm-allocation", "hint", "job 7 … 8 GPUs", slurm(job="7")),
    quiet("slurm-allocation", slurm(2, job="7", job_gpus=("4", "5"))),
    quiet("slurm-allocation", node(device=NPU, cluster={"job": "7"})),
    quiet("slurm-allocation", node()),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.slug)
def test_a_check_of_the_host(case: Any) -> None:
    verify(case)


@pytest.mark.parametrize(
    ("container_kind", "fix"),
    [("docker", "--shm-size"), ("kubernetes", "emptyDir"), ("", "remount")],
)
def test_the_fix_of_shared_memory_fits_the_container(container_kind: str, fix: str) -> None:
    seen = host(shm_bytes=64 * MIB, container=container_kind)
    (finding,) = diagnose(seen, only=["shared-memory"])
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("limits", "fix"),
    [
        ((1024, 4096), "ulimit -n 4096"),
        ((256, -1), "ulimit -n unlimited"),
        ((1024, 1024), "limits.conf"),
    ],
)
def test_the_fix_of_open_files_goes_as_far_as_the_hard_limit(
    limits: tuple[int, int], fix: str
) -> None:
    (finding,) = diagnose(host(open_files=limits), only=["open-files"])
    assert fix in finding.fix


def test_folders_of_one_file_system_are_one_finding() -> None:
    disks = tuple(
        Disk(purpose, f"/{purpose}", free, filesystem="ext4")
        for purpose, free in (("runs", 5 * MIB), ("cache", 5 * MIB), ("temporary", 6 * MIB))
    )
    found = diagnose(container(host={"disks": disks}), only=["disk-space"])
    assert ["/runs" in finding.what for finding in found] == [True, False]
    assert ["/cache" in finding.what for finding in found] == [True, False]
