"""Checks of the devices: how they are, who uses them, and how they belong together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fasttrain.doctor.diagnosis import diagnose
from fasttrain.model.machine import DeviceProcess
from support.examinations import GIB, H100, NPU, STATE, container, fires, node, quiet, verify

PYTHON = DeviceProcess(4242, 12 * GIB, "python")
DISPLAY = DeviceProcess(900, 300 * 2**20, "Xorg", display=True)
DEAD = DeviceProcess(77, 3 * GIB, "python", "/runs/a", orphan=True)
GTX = {"name": "GTX 1080", "capability": "6.1"}
SLICE = replace(H100, uuid="MIG-a", parent_uuid="GPU-0")


def all_of(**fields: Any) -> Any:
    return node(state=replace(STATE, **fields))


def one(index: int, **fields: Any) -> Any:
    """Return eight GPUs, one of them with these fields."""
    return node(states={index: fields})


def npu(index: int, **fields: Any) -> Any:
    return node(device=NPU, states={index: fields})


def pair(**fields: Any) -> Any:
    """Return two GPUs, each with these fields."""
    return node(2, states={0: fields, 1: fields})


def on_two(first: DeviceProcess, second: DeviceProcess) -> Any:
    return node(states={0: {"processes": (first,)}, 1: {"processes": (second,)}})


CASES = [
    fires("device-health", "error", "NPU 3 … Alarm", npu(3, health="Alarm")),
    fires("device-health", "warning", "NPU 3 … Warning", npu(3, health="Warning")),
    quiet("device-health", node(device=NPU)),
    fires(
        "ecc-errors",
        "error",
        "2 … GPU 5",
        one(5, ecc_uncorrected=2),
    ),
    fires(
        "ecc-errors",
        "error",
        "1 … GPUs 0-7",
        all_of(ecc_uncorrected=1),
    ),
    quiet("ecc-errors", all_of(ecc_uncorrected=None)),
    fires("row-remap", "error", "GPU 1", one(1, rows_failed=True)),
    quiet("row-remap", node()),
    fires("xid", "warning", "Xid 13, 79 … GPU 2", one(2, xids=(79, 13, 79))),
    fires("xid", "hint", "Xid 31 … GPU 2", one(2, xids=(31,))),
    fires("xid", "hint", "Xid 13, 31, 43, 45", one(2, xids=(13, 31, 43, 45))),
    quiet("xid", node()),
    fires(
        "throttling",
        "warning",
        "GPU 0 … power, thermal",
        one(0, throttled=("power", "thermal")),
    ),
    fires("throttling", "hint", "GPUs 0-7", all_of(throttled=("power",))),
    quiet("throttling", node()),
    fires(
        "power-limit",
        "warning",
        "GPUs 0-7 … 500 W … 700 W",
        all_of(power_limit_w=500.0),
    ),
    quiet("power-limit", all_of(power_limit_w=699.98)),
    quiet("power-limit", all_of(power_limit_w=None)),
    quiet("power-limit", all_of(power_default_w=None)),
    fires(
        "clock-limit",
        "hint",
        "1200 MHz … 1980 MHz",
        all_of(clock_limit_mhz=1200),
    ),
    quiet("clock-limit", all_of(clock_limit_mhz=None)),
    fires("persistence", "hint", "GPUs 0-7", all_of(persistence=False)),
    quiet("persistence", all_of(persistence=None)),
    quiet(
        "persistence", node(state=replace(STATE, persistence=False), machine={"system": "Windows"})
    ),
    fires("pcie-width", "warning", "GPU 4 … 8 … 16", one(4, pcie_width=8)),
    quiet("pcie-width", all_of(pcie_width=None)),
    fires("pcie-generation", "hint", "4 … 5", all_of(pcie_gen=4)),
    quiet("pcie-generation", all_of(pcie_gen_max=None)),
    fires("orphans", "warning", "1 process … 77", on_two(DEAD, DEAD)),
    fires(
        "orphans",
        "warning",
        "2 processes … 77, 78",
        container(host={"orphans": (DEAD, replace(DEAD, pid=78))}),
    ),
    quiet("orphans", one(0, processes=(PYTHON,))),
    fires(
        "device-busy",
        "warning",
        "GPUs 0, 1 … python (pid 4242)",
        on_two(PYTHON, replace(PYTHON, memory_bytes=GIB)),
    ),
    fires(
        "device-busy",
        "warning",
        "2 processes",
        one(0, processes=(DeviceProcess(0), DeviceProcess(0))),
    ),
    fires(
        "device-busy",
        "warning",
        "GPU 0 … (pid 9)",
        one(0, processes=(DeviceProcess(9),)),
    ),
    fires(
        "device-busy",
        "warning",
        "python (pid 4242) … /runs/b",
        one(0, processes=(replace(PYTHON, run="/runs/b"),)),
    ),
    fires(
        "device-busy",
        "warning",
        "MIG-a … python",
        node(
            1,
            devices={0: {"uuid": "MIG-a", "parent_uuid": "GPU-0"}},
            states={0: {"uuid": "MIG-a", "processes": (PYTHON,)}},
        ),
    ),
    quiet("device-busy", one(0, processes=(DEAD,))),
    quiet("device-busy", one(0, processes=(DISPLAY, replace(DISPLAY, pid=901)))),
    fires(
        "device-busy",
        "warning",
        "Xorg (pid 900)",
        one(0, processes=(replace(DISPLAY, memory_bytes=9 * GIB),)),  # more than a tenth
    ),
    fires("device-memory", "warning", "20 GiB … GPU 6", one(6, memory_used_bytes=20 * GIB)),
    quiet("device-memory", one(6, memory_used_bytes=20 * GIB, processes=(PYTHON,))),
    quiet("device-memory", one(6, memory_used_bytes=8 * GIB)),  # a tenth
    fires(
        "device-memory",
        "warning",
        "19.7 GiB … GPU 6",
        one(6, memory_used_bytes=20 * GIB, processes=(DISPLAY,)),
    ),
    quiet(
        "device-memory",
        one(6, memory_used_bytes=9 * GIB, processes=(replace(DISPLAY, memory_bytes=3 * GIB),)),
    ),
    quiet(
        "device-memory",
        node(state=replace(STATE, memory_used_bytes=GIB), device=replace(H100, memory_bytes=0)),
    ),
    quiet("device-memory", npu(6, memory_used_bytes=20 * GIB)),
    fires("mixed-devices", "warning", "2 x H100 … GTX 1080", node(3, devices={2: GTX})),
    quiet("mixed-devices", node(3)),
    quiet("mixed-devices", node(3, devices={2: GTX}, environ={"CUDA_VISIBLE_DEVICES": "0,1"})),
    fires("device-order", "hint", "FASTEST_FIRST", node(3, devices={2: GTX})),
    quiet("device-order", node(3, devices={2: GTX}, environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})),
    quiet("device-order", node(3)),
    fires(
        "mig",
        "hint",
        "2 GPUs … MIG",
        node(machine={"devices": (SLICE, replace(H100, index=1, uuid="GPU-1"))}),
    ),
    quiet("mig", node(machine={"devices": (SLICE,)})),
    quiet("mig", node()),
    fires("peer-access", "hint", "GPUs 0, 1", pair(peer_access=())),
    quiet("peer-access", pair(peer_access=None)),
    quiet("peer-access", node(1, states={0: {"peer_access": ()}})),
    quiet("peer-access", node()),
    fires(
        "links",
        "hint",
        "GPUs 0, 1",
        pair(links={"0": "SYS", "1": "SYS"}),
    ),
    fires(
        "links",
        "hint",
        "GPU 2",
        node(3, states={2: {"links": {"0": "SYS", "1": "SYS"}}}),
    ),
    quiet("links", node(3, states={2: {"links": {"0": "SYS", "1": "NODE"}}})),
    quiet("links", pair(links={})),
    fires("numa", "hint", "GPUs 0-3 … node 0 … GPUs 4-7 … node 1", node()),
    quiet("numa", node(environ={"CUDA_VISIBLE_DEVICES": "0,1"})),
    quiet("numa", node(2, states={0: {"numa_node": -1}})),
    quiet("numa", pair(numa_node=None)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.slug)
def test_a_check_of_devices(case: Any) -> None:
    verify(case)


def test_the_fix_names_the_gpus() -> None:
    (finding,) = diagnose(one(2, power_limit_w=500.0), only=["power-limit"])
    assert finding.fix == "sudo nvidia-smi -i 2 -pl 700"


def test_different_facts_are_different_findings() -> None:
    seen = node(states={0: {"power_limit_w": 500.0}, 3: {"power_limit_w": 400.0}})
    found = [finding.what for finding in diagnose(seen, only=["power-limit"])]
    assert ["GPU 0" in text and " 500 W" in text for text in found] == [True, False]
    assert ["GPU 3" in text and " 400 W" in text for text in found] == [False, True]


def test_mixed_gpus_are_told_apart_as_gpus_counts_them() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "2,1,0"}
    seen = node(3, devices={2: GTX}, environ=environ)
    (finding,) = diagnose(seen, only=["mixed-devices"])
    assert finding.fix.endswith("--gpus 1,2")


def test_a_display_is_not_named_beside_who_computes() -> None:
    (finding,) = diagnose(one(0, processes=(PYTHON, DISPLAY)), only=["device-busy"])
    assert "python (pid 4242)" in finding.what
    assert "Xorg" not in finding.what
    assert finding.why.startswith("12 GiB")


def test_orphans_are_named_by_their_pids_and_can_be_ended() -> None:
    seen = container(host={"orphans": (DEAD, replace(DEAD, pid=12, run=""))})
    (finding,) = diagnose(seen, only=["orphans"])
    assert "fasttrain doctor --fix" in finding.fix
    assert "kill 12 77" in finding.fix
    assert "GiB" not in finding.why
    assert finding.why.endswith(" /runs/a")
    assert finding.mendable


def test_the_memory_that_is_taken_is_added_up() -> None:
    (busy,) = diagnose(on_two(PYTHON, PYTHON), only=["device-busy"])
    assert busy.why.startswith("24 GiB ")
    (dead,) = diagnose(on_two(DEAD, DEAD), only=["orphans"])
    assert dead.why.startswith("6 GiB ")
    assert dead.why.endswith(" /runs/a")
    (shared,) = diagnose(one(0, processes=(PYTHON, DEAD)), only=["device-busy"])
    assert shared.why.startswith("12 GiB ")
