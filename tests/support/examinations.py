"""Healthy machines to spoil one thing of: what the tests of the checks are made of.

A test file lists its cases by `fires` and `quiet`; test_checks_registry.py sees that none is
forgotten.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from fasttrain.doctor.diagnosis import diagnose
from fasttrain.model.machine import (
    Cluster,
    Cpu,
    Device,
    DeviceState,
    Disk,
    Examination,
    Finding,
    HostState,
    Machine,
    Torch,
    TorchTrial,
    Trial,
)

GIB, MIB = 2**30, 2**20
OK = Trial("ok", 2.0)

H100 = Device("cuda", 0, "H100", "", 80 * GIB, "9.0", bf16=True, fp16=True, tf32=True)
NPU = Device("npu", 0, "Ascend910B3", "", 64 * GIB, "Ascend910B3", bf16=True, fp16=True)

HOST = HostState(
    shm_bytes=512 * GIB,
    shm_free_bytes=500 * GIB,
    open_files=(65536, 1048576),
    locked_memory_bytes=-1,
    disks=(
        Disk("runs", "/home/me", 900 * GIB, filesystem="ext4"),
        Disk("cache", "/home/me/.cache", 900 * GIB, filesystem="ext4"),
        Disk("temporary", "/tmp", 100 * GIB, filesystem="xfs"),
    ),
    memory_available_bytes=1900 * GIB,
    load=3.0,
    logical_cpus=224,
    numa_nodes=2,
    hostname_resolves=True,
    ports=(32768, 60999),
    kernel="6.8.0",
)
TRIAL = TorchTrial(
    imported=OK,
    version="2.13.0+cu128",
    available=("cuda",),
    device_counts={"cuda": 8, "npu": 8},
    architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
    cudnn="9.10",
    nccl="2.27",
    triton="3.5",
    backends=("gloo", "nccl", "hccl"),
    compiled=OK,
    all_reduced=OK,
)
STATE = DeviceState(
    "cuda",
    0,
    memory_used_bytes=600 * MIB,
    power_limit_w=700.0,
    power_default_w=700.0,
    clock_limit_mhz=1980,
    clock_max_mhz=1980,
    persistence=True,
    ecc_uncorrected=0,
    numa_node=0,
    pcie_gen=5,
    pcie_gen_max=5,
    pcie_width=16,
    pcie_width_max=16,
)


def node(
    count: int = 8, *, device: Device = H100, state: DeviceState = STATE, **parts: Any
) -> Examination:
    """Return a healthy server: `count` devices behind NVSwitch, half on each NUMA node.

    Of `parts`, `host`, `trial`, `cluster` and `machine` change fields of those, `environ` is the
    environment, `devices` and `states` change fields of single devices by their index.
    """
    devices = [replace(device, index=i, uuid=f"GPU-{i}") for i in range(count)]
    states = [
        replace(
            state,
            kind=device.kind,
            index=i,
            uuid=f"GPU-{i}",
            numa_node=2 * i // count,
            links={str(j): "NV18" for j in range(count) if j != i},
            peer_access=tuple(j for j in range(count) if j != i),
        )
        for i in range(count)
    ]
    changed = parts.get("devices", {})
    spoiled = parts.get("states", {})
    machine = Machine(
        hostname="node7",
        system="Linux",
        python="3.11.9",
        torch=Torch("2.13.0+cu128", "cuda", "12.8"),
        cpu=Cpu("Xeon", 224, "224 CPUs in the affinity mask", 2048 * GIB),
        devices=tuple(replace(d, **changed.get(i, {})) for i, d in enumerate(devices)),
        cxx_compiler="/usr/bin/g++",
        driver="570.133.20",
    )
    trial = replace(TRIAL, device_counts={"cuda": count, "npu": count})
    return Examination(
        machine=replace(machine, **parts.get("machine", {})),
        devices=tuple(replace(s, **spoiled.get(i, {})) for i, s in enumerate(states)),
        host=replace(HOST, **parts.get("host", {})),
        environ=parts.get("environ", {}),
        torch=replace(trial, **parts.get("trial", {})),
        cluster=replace(Cluster(), **parts.get("cluster", {})),
    )


def container(**parts: Any) -> Examination:
    """Return a plain container without accelerators, as CI services and notebooks offer them."""
    host: dict[str, Any] = {
        "shm_bytes": GIB,
        "shm_free_bytes": GIB,
        "open_files": (1048576, 1048576),
        "locked_memory_bytes": 8 * MIB,
        "disks": tuple(
            replace(disk, free_bytes=20 * GIB, filesystem="overlay") for disk in HOST.disks
        ),
        "memory_available_bytes": 12 * GIB,
        "logical_cpus": 4,
        "numa_nodes": 1,
        "container": "docker",
        **parts.pop("host", {}),
    }
    machine: dict[str, Any] = {
        "torch": Torch("2.13.0+cpu", "cpu"),
        "cpu": Cpu("EPYC", 4, "4 CPUs in the affinity mask", 16 * GIB),
        "driver": "",
        **parts.pop("machine", {}),
    }
    trial: dict[str, Any] = {
        "version": "2.13.0+cpu",
        "available": ("cpu",),
        "device_counts": {},
        "architectures": (),
        "triton": "",
        "backends": ("gloo",),
        **parts.pop("trial", {}),
    }
    return node(0, host=host, machine=machine, trial=trial, **parts)


@dataclass(frozen=True)
class Case:
    """A machine on which a check finds something, or nothing.

    `what` holds the facts that a finding must name, with " … " between them.
    """

    slug: str
    seen: Examination
    severity: str = ""
    what: str = ""


def fires(slug: str, severity: str, what: str, seen: Examination) -> Case:
    return Case(slug, seen, severity, what)


def quiet(slug: str, seen: Examination) -> Case:
    return Case(slug, seen)


def verify(case: Case) -> None:
    """See that the check finds just what the case says."""
    found = diagnose(case.seen, only=[case.slug])
    if not case.severity:
        assert found == ()
        return
    assert {(finding.check, finding.severity) for finding in found} == {(case.slug, case.severity)}
    facts = [_alone(fact) for fact in case.what.split(" … ")]
    assert any(all(fact.search(finding.what) for fact in facts) for finding in found), [
        finding.what for finding in found
    ]
    for finding in found:
        _verify_style(finding)


def _alone(fact: str) -> re.Pattern[str]:
    """Match a fact that isn't a part of a longer word or number: GPU 0 is not GPU 01."""
    before = r"(?<![\w.])" if fact[0].isalnum() else ""
    behind = r"(?!\d|\.\d)" if fact[-1].isdigit() else ""
    return re.compile(f"{before}{re.escape(fact)}{behind}")


def _verify_style(finding: Finding) -> None:
    """See that a finding reads like an error: three plain lines without full stops."""
    assert finding.why != finding.what
    for text in (finding.what, finding.why, finding.fix):
        assert text.strip() == text != ""
        assert not re.search(r"\n|  |\bNone\b|[{}]", text), text
        # what torch or a tool said is quoted with the dots that it has
        assert text is finding.what or not text.endswith((".", "!")), text
