"""The state of NVIDIA's GPUs, against an NVML that is strict about what it is asked."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from fasttrain.hardware.runs import RunProcess
from fasttrain.hardware.vendors.cuda_state import cuda_states
from fasttrain.model.machine import Device, DeviceProcess, DeviceState
from support.fake_nvml import Board, FakeNvml, device, pci, states

GIB = 2**30
V2 = pynvml.nvmlMemory_v2
GRAPHICS, APP_TARGET, APP_DEFAULT, MAX_BOOST = 0, 1, 2, 3


def only(host: Any, answers: dict[tuple[Any, ...], Any], runs: Any = None) -> DeviceState:
    state: DeviceState
    (state,) = states(host, FakeNvml([Board(0, "GPU-0", answers)]), runs=runs)
    return state


BOARD = {
    ("MemoryInfo", V2): SimpleNamespace(used=3 * GIB),
    ("PciInfo",): pci(0xC1),
    ("CurrentClocksThrottleReasons",): 0,
    ("PowerManagementLimit",): 300_000,
    ("PowerManagementDefaultLimit",): 400_000,
    ("MaxClockInfo", GRAPHICS): 1530,
    ("Clock", GRAPHICS, MAX_BOOST): 1530,
    ("Clock", GRAPHICS, APP_TARGET): 1312,
    ("Clock", GRAPHICS, APP_DEFAULT): 1312,
    ("PersistenceMode",): 0,
    ("Temperature", 0): 61,
    ("TotalEccErrors", 1, 0): 2,
    ("RemappedRows",): (3, 1, 0, 1),
    ("MaxPcieLinkGeneration",): 3,
    ("GpuMaxPcieLinkGeneration",): 4,
    ("CurrPcieLinkGeneration",): 1,  # idle
    ("CurrPcieLinkWidth",): 8,
    ("MaxPcieLinkWidth",): 16,
}
BOARD_FILES = {"sys/bus/pci/devices/0000:c1:00.0/numa_node": "1\n"}
KERNEL_LOG = """\
[    1.0] NVRM: loading NVIDIA UNIX Open Kernel Module
[   99.1] NVRM: Xid (PCI:0000:c1:00): 79, pid=77, GPU has fallen off the bus.
[   99.2] NVRM: Xid (PCI:0000:01:00): 31, pid=78, MMU Fault
"""


def test_a_board_is_told_in_full(make_host: Any) -> None:
    host = make_host(BOARD_FILES, tools={"dmesg": f"echo '{KERNEL_LOG}'"})
    assert only(host, BOARD) == DeviceState(
        kind="cuda",
        index=0,
        uuid="GPU-0",
        memory_used_bytes=3 * GIB,
        throttled=(),
        power_limit_w=300.0,
        power_default_w=400.0,
        clock_limit_mhz=1530,
        clock_max_mhz=1530,
        temperature_c=61,
        persistence=False,
        ecc_uncorrected=2,
        rows_failed=True,
        xids=(79,),
        numa_node=1,
        pcie_gen=3,
        pcie_gen_max=4,
        pcie_width=8,
        pcie_width_max=16,
        links={},
        peer_access=(),
    )


def test_what_a_board_does_not_tell_is_none(make_host: Any) -> None:
    assert only(make_host(), {}) == DeviceState("cuda", 0, "GPU-0", peer_access=())


@pytest.mark.parametrize(
    ("question", "name"),
    [
        (("MemoryInfo", V2), "memory_used_bytes"),
        (("PciInfo",), "numa_node"),
        (("PowerManagementLimit",), "power_limit_w"),
        (("PowerManagementDefaultLimit",), "power_default_w"),
        (("MaxClockInfo", GRAPHICS), "clock_max_mhz"),
        (("Clock", GRAPHICS, MAX_BOOST), "clock_limit_mhz"),
        (("PersistenceMode",), "persistence"),
        (("Temperature", 0), "temperature_c"),
        (("TotalEccErrors", 1, 0), "ecc_uncorrected"),
        (("MaxPcieLinkGeneration",), "pcie_gen"),
        (("GpuMaxPcieLinkGeneration",), "pcie_gen_max"),
        (("CurrPcieLinkWidth",), "pcie_width"),
        (("MaxPcieLinkWidth",), "pcie_width_max"),
    ],
)
def test_a_failing_question_costs_its_own_field_alone(
    make_host: Any, question: Any, name: str
) -> None:
    host = make_host(BOARD_FILES)
    state = only(host, {**BOARD, question: pynvml.NVMLError_Unknown})
    assert replace(only(host, BOARD), **{name: None}) == state


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        (pynvml.nvmlClocksThrottleReasonGpuIdle, ()),
        (pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting, ()),
        (pynvml.nvmlClocksThrottleReasonSyncBoost, ()),
        (pynvml.nvmlClocksThrottleReasonSwPowerCap, ("power",)),
        (pynvml.nvmlClocksThrottleReasonSwThermalSlowdown, ("thermal",)),
        (
            pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
            | pynvml.nvmlClocksThrottleReasonHwSlowdown,
            ("thermal", "hardware"),
        ),
        (pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown, ("hardware",)),
    ],
)
def test_throttling_is_named_and_idling_is_not(
    make_host: Any, bits: int, names: tuple[str, ...]
) -> None:
    assert only(make_host(), {("CurrentClocksThrottleReasons",): bits}).throttled == names


@pytest.mark.parametrize(
    ("target", "default", "boost", "limit"),
    [
        (1312, 1312, 1530, 1530),  # as it comes from the factory
        (900, 1312, 1530, 900),
        (1530, 1312, 1530, 1530),
        (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NotSupported, 1530, 1530),
        (900, 1312, pynvml.NVMLError_NotSupported, 900),
    ],
)
def test_only_clocks_that_somebody_set_are_a_limit(
    make_host: Any, target: Any, default: Any, boost: Any, limit: int
) -> None:
    answers = {
        ("Clock", GRAPHICS, APP_TARGET): target,
        ("Clock", GRAPHICS, APP_DEFAULT): default,
        ("Clock", GRAPHICS, MAX_BOOST): boost,
    }
    assert only(make_host(), answers).clock_limit_mhz == limit


def test_processes_are_named_and_known_by_their_run(make_host: Any) -> None:
    listed = [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=5 * GIB),
        SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None),  # above any pid of Linux
    ]
    runs = {os.getpid(): RunProcess("/runs/a", orphan=True)}
    state = only(make_host(), {("ComputeRunningProcesses",): listed}, runs)
    mine, hidden = state.processes
    assert (mine.pid, mine.memory_bytes, mine.run, mine.orphan) == (
        os.getpid(),
        5 * GIB,
        "/runs/a",
        True,
    )
    assert "python" in mine.command
    assert hidden == DeviceProcess(0, 0, "")


def test_who_draws_on_a_board_is_told_from_who_computes(make_host: Any) -> None:
    compositor, trainer, server = (
        SimpleNamespace(pid=2**22 + n, usedGpuMemory=n * GIB) for n in (1, 2, 3)
    )
    answers = {
        ("ComputeRunningProcesses",): [compositor, trainer],
        ("GraphicsRunningProcesses",): [server, compositor],
    }
    told = [(p.memory_bytes // GIB, p.display) for p in only(make_host(), answers).processes]
    assert told == [(1, True), (2, False), (3, True)]


def test_an_old_driver_is_asked_the_old_way(make_host: Any) -> None:
    answers = {
        ("MemoryInfo", V2): pynvml.NVMLError_FunctionNotFound,
        ("MemoryInfo",): SimpleNamespace(used=GIB),
        ("ComputeRunningProcesses",): pynvml.NVMLLibraryMismatchError,
    }
    state = only(make_host(), answers)
    assert (state.memory_used_bytes, state.processes) == (GIB, ())


def test_instances_have_their_own_memory_and_their_boards_clocks(make_host: Any) -> None:
    board = Board(0, "GPU-0", {**BOARD, ("MemoryInfo", V2): SimpleNamespace(used=9 * GIB)})
    slices = [
        Board(-1, f"MIG-{used}", {("MemoryInfo", V2): SimpleNamespace(used=used * GIB)})
        for used in (1, 2)
    ]
    whole = Board(1, "GPU-1", {("TopologyCommonAncestor", 0): 50, ("P2PStatus", 0, 0): 0})
    cut = [device(0, part.uuid, "GPU-0") for part in slices]
    found = states(make_host(), FakeNvml([board, whole, *slices]), *cut, device(1))
    assert [(s.uuid, s.memory_used_bytes and s.memory_used_bytes // GIB) for s in found] == [
        ("MIG-1", 1),
        ("MIG-2", 2),
        ("GPU-1", None),
    ]
    assert [s.power_limit_w for s in found] == [300.0, 300.0, None]
    assert [s.links for s in found] == [{}, {}, {}]
    assert [s.peer_access for s in found] == [None, None, ()]


def test_a_board_lost_meanwhile_keeps_its_name_and_hides_no_other(make_host: Any) -> None:
    nvml = FakeNvml([Board(0, "GPU-0", lost=True), Board(1, "GPU-1", dict(BOARD))])
    lost, alive = states(make_host(), nvml)
    assert lost == DeviceState("cuda", 0, "GPU-0")
    assert (alive.power_limit_w, alive.links) == (300.0, {})


@pytest.mark.parametrize(
    "error", [pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_LibRmVersionMismatch]
)
def test_a_broken_nvml_gives_no_states(make_host: Any, error: type[Exception]) -> None:
    assert states(make_host(), FakeNvml([Board(0, "GPU-0")], fails=error)) == ()


def test_without_nvidias_devices_nvml_is_not_touched(make_host: Any) -> None:
    npu = Device("npu", 0, "Ascend910B3")
    assert cuda_states(make_host(), [npu], {}, object()) == ()


def test_nvml_is_closed_when_a_question_breaks(make_host: Any) -> None:
    nvml = FakeNvml([Board(0, "GPU-0", {("PersistenceMode",): ZeroDivisionError})])
    with pytest.raises(ZeroDivisionError):
        cuda_states(make_host(), [device(0)], {}, nvml)
    assert nvml.open == 0
