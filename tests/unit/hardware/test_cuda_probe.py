"""NVIDIA's probe against a fake NVML that refuses every function it doesn't know."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from fasttrain.hardware.vendors.cuda import Cuda

DRIVER = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20"
}
GIB = 2**30


@dataclass(frozen=True)
class Board:
    """A GPU or MIG instance of the fake; `lost` and `no_memory` make the driver's queries fail."""

    name: str
    uuid: str
    capability: tuple[int, int] | None
    memory: int = 0
    mig: bool | None = None
    slots: tuple[Board | None, ...] = ()
    lost: bool = False


@dataclass
class FakeNvml:
    """Only the functions below exist: any other is an AttributeError, as is any typing error."""

    boards: list[Board] = field(default_factory=list)
    fails: type[Exception] | None = None
    open: int = 0

    NVMLError = pynvml.NVMLError
    NVMLError_NotFound = pynvml.NVMLError_NotFound
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported
    NVMLError_FunctionNotFound = pynvml.NVMLError_FunctionNotFound

    def nvmlInit(self) -> None:  # noqa: N802
        if self.fails:
            raise self.fails
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        assert self.open == 1, "shut down what was not open"
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        assert self.open
        return "570.133.20"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        assert self.open
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Board:  # noqa: N802
        if self.boards[index].lost:
            raise pynvml.NVMLError_GpuIsLost
        return self.boards[index]

    def nvmlDeviceGetName(self, board: Board) -> str:  # noqa: N802
        return board.name

    def nvmlDeviceGetUUID(self, board: Board) -> str:  # noqa: N802
        return board.uuid

    def nvmlDeviceGetMemoryInfo(self, board: Board) -> Any:  # noqa: N802
        if not board.memory:
            raise pynvml.NVMLError_NotSupported
        return SimpleNamespace(total=board.memory)

    def nvmlDeviceGetCudaComputeCapability(self, board: Board) -> tuple[int, int]:  # noqa: N802
        if board.capability is None:  # a MIG instance: ask its GPU
            raise pynvml.NVMLError_InvalidArgument
        return board.capability

    def nvmlDeviceGetMigMode(self, board: Board) -> list[int]:  # noqa: N802
        if board.mig is None:
            raise pynvml.NVMLError_NotSupported
        return [int(board.mig), int(board.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, board: Board) -> int:  # noqa: N802
        return len(board.slots)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, board: Board, slot: int) -> Board:  # noqa: N802
        if (instance := board.slots[slot]) is None:
            raise pynvml.NVMLError_NotFound
        return instance


def test_gpus_are_read_with_what_they_can_do(make_host: Any) -> None:
    nvml = FakeNvml(
        [
            Board("NVIDIA H100 80GB HBM3", "GPU-a", (9, 0), 80 * GIB, mig=False),
            Board("Tesla T4", "GPU-b", (7, 5), 15 * GIB),
        ]
    )
    report = Cuda(make_host(DRIVER), nvml).probe()
    h100, t4 = report.devices
    assert (h100.index, h100.name, h100.uuid) == (0, "NVIDIA H100 80GB HBM3", "GPU-a")
    assert (h100.memory_bytes, h100.capability) == (80 * GIB, "9.0")
    assert (h100.bf16, h100.fp16, h100.tf32) == (True, True, True)
    assert (t4.index, t4.capability) == (1, "7.5")
    assert (t4.bf16, t4.fp16, t4.tf32) == (False, True, False)
    assert (report.driver, report.notes, nvml.open) == ("570.133.20", (), 0)


@pytest.mark.parametrize(
    ("capability", "bf16", "fp16"),
    [
        ((5, 2), False, False),
        ((5, 3), False, True),
        ((7, 5), False, True),
        ((8, 0), True, True),
        ((10, 0), True, True),
    ],
)
def test_arithmetic_follows_the_capability(
    make_host: Any, capability: tuple[int, int], bf16: bool, fp16: bool
) -> None:
    nvml = FakeNvml([Board("GPU", "GPU-a", capability, GIB)])
    (device,) = Cuda(make_host(DRIVER), nvml).probe().devices
    assert (device.bf16, device.tf32, device.fp16) == (bf16, bf16, fp16)


def test_mig_instances_replace_their_gpu_and_keep_its_index(make_host: Any) -> None:
    slices = tuple(
        Board(f"NVIDIA A100-SXM4-80GB MIG {size}", f"MIG-{size}", None, memory * GIB)
        for size, memory in (("3g.40gb", 40), ("1g.10gb", 10))
    )
    cut = Board("A100", "GPU-cut", (8, 0), 80 * GIB, mig=True, slots=(None, *slices, None))
    whole = Board("A100", "GPU-whole", (8, 0), 80 * GIB, mig=False)
    devices = Cuda(make_host(DRIVER), FakeNvml([whole, cut])).probe().devices
    assert [(d.index, d.uuid, d.parent_uuid) for d in devices] == [
        (0, "GPU-whole", ""),
        (1, "MIG-3g.40gb", "GPU-cut"),
        (1, "MIG-1g.10gb", "GPU-cut"),
    ]
    assert devices[1].memory_bytes == 40 * GIB
    assert devices[1].capability == "8.0"
    assert devices[1].bf16


def test_mig_mode_without_instances_is_told(make_host: Any) -> None:
    report = Cuda(
        make_host(DRIVER), FakeNvml([Board("A100", "GPU-a", (8, 0), GIB, mig=True)])
    ).probe()
    assert report.devices == ()
    (note,) = report.notes
    assert "MIG" in note


def test_one_lost_gpu_does_not_hide_the_others(make_host: Any) -> None:
    lost = Board("A100", "GPU-a", (8, 0), GIB, lost=True)
    nvml = FakeNvml([lost, Board("A100", "GPU-b", (8, 0), GIB)])
    report = Cuda(make_host(DRIVER), nvml).probe()
    assert [(d.index, d.uuid) for d in report.devices] == [(1, "GPU-b")]
    (note,) = report.notes
    assert "GPU 0" in note


def test_unified_memory_is_unknown_not_an_error(make_host: Any) -> None:
    nvml = FakeNvml([Board("NVIDIA GB10", "GPU-a", (12, 1))])
    (device,) = Cuda(make_host(DRIVER), nvml).probe().devices
    assert device.memory_bytes == 0


def test_a_machine_without_nvidia_is_not_even_asked(make_host: Any) -> None:
    nvml = FakeNvml(fails=pynvml.NVMLError_LibraryNotFound)
    report = Cuda(make_host({"proc/cpuinfo": ""}), nvml).probe()
    assert (report.devices, report.notes) == ((), ())


@pytest.mark.parametrize(
    "error",
    [
        pynvml.NVMLError_LibraryNotFound,
        pynvml.NVMLError_DriverNotLoaded,
        pynvml.NVMLError_LibRmVersionMismatch,
    ],
)
def test_a_broken_driver_is_one_note(make_host: Any, error: type[Exception]) -> None:
    nvml = FakeNvml(fails=error)
    report = Cuda(make_host(DRIVER), nvml).probe()
    assert report.devices == ()
    (note,) = report.notes
    assert str(error()) in note


def test_nvml_is_shut_down_when_a_query_breaks(make_host: Any) -> None:
    nvml = FakeNvml([Board("A100", "GPU-a", (8, 0), GIB)])
    nvml.nvmlDeviceGetName = None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        Cuda(make_host(DRIVER), nvml).probe()
    assert nvml.open == 0


def test_the_fake_knows_nothing_that_the_binding_does_not() -> None:
    ours = [name for name in dir(FakeNvml) if name.lower().startswith("nvml")]
    assert ours
    assert [name for name in ours if not hasattr(pynvml, name)] == []
