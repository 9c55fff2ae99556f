"""NVIDIA GPUs and their MIG instances, by NVML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from fasttrain.hardware.host import Host, Vendor, VendorReport
from fasttrain.hardware.runs import RunProcess
from fasttrain.hardware.tool import within
from fasttrain.hardware.vendors.cuda_state import cuda_states, import_nvml
from fasttrain.model.machine import Device, DeviceState
from fasttrain.model.vendors import DeviceKind

T = TypeVar("T")

# Each of these files shows an NVIDIA driver; without one, NVML's binding needn't be imported. In
# order: desktop and server, containers, Jetson, WSL.
DRIVER_TRACES = (
    "proc/driver/nvidia/version",
    "dev/nvidiactl",
    "dev/nvmap",
    "usr/lib/wsl/lib/libnvidia-ml.so.1",
)


@dataclass(frozen=True, slots=True)
class Cuda:
    """NVIDIA's probe; in tests `nvml` replaces the ``pynvml`` module."""

    host: Host
    nvml: Any = None
    kind: ClassVar[DeviceKind] = "cuda"

    def probe(self) -> VendorReport:
        """Return GPUs in NVML's order, which is CUDA's with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.

        A GPU in MIG mode is replaced by its instances, which have its index: CUDA can't use the
        GPU as a whole.
        """
        if not any(self.host.exists(trace) for trace in DRIVER_TRACES):
            return VendorReport()
        nvml = self.nvml or _import_nvml()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            return VendorReport(
                notes=(
                    f"an NVIDIA driver is on this machine, but NVML can't use it ({error}), so no "
                    "NVIDIA GPU is seen; a container needs its GPUs passed in, a new driver a "
                    "restart of the machine",
                )
            )
        try:
            return _report(nvml)
        finally:
            nvml.nvmlShutdown()

    def states(
        self, devices: Iterable[Device], runs: Mapping[int, RunProcess]
    ) -> tuple[DeviceState, ...]:
        """Return how its GPUs are."""
        return cuda_states(self.host, devices, runs, self.nvml)


def vendor(host: Host, _installed: Callable[[str], bool]) -> Vendor:
    """Return the probe."""
    return Cuda(host)


def _import_nvml() -> Any:
    import pynvml

    return pynvml


def _report(nvml: Any) -> VendorReport:
    devices: list[Device] = []
    notes: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        # One lost GPU must not hide the other seven.
        try:
            gpu, instances = _gpu(nvml, index)
        except nvml.NVMLError as error:
            notes.append(f"GPU {index} can't be used: {error}")
            continue
        if instances == ():
            notes.append(f"GPU {index} ({gpu.name}) is in MIG mode but has no instance to run on")
        devices += [gpu] if instances is None else instances
    driver = _unless_unsupported(nvml, nvml.nvmlSystemGetDriverVersion, "")
    return VendorReport(tuple(devices), driver, tuple(notes))


def _gpu(nvml: Any, index: int) -> tuple[Device, tuple[Device, ...] | None]:
    """Return a GPU and its MIG instances; None for these if MIG is off."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    gpu = _device(nvml, handle, index, capability, "")
    mode = _unless_unsupported(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0], 0)
    if not mode:
        return gpu, None
    slices = _mig_handles(nvml, handle)
    return gpu, tuple(_device(nvml, item, index, capability, gpu.uuid) for item in slices)


def _mig_handles(nvml: Any, handle: Any) -> Iterator[Any]:
    for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except nvml.NVMLError_NotFound:
            continue  # slots are sparse: a 7-slot GPU may hold two instances


def _device(
    nvml: Any, handle: Any, index: int, capability: tuple[int, int], parent_uuid: str
) -> Device:
    """Return one GPU or instance.

    Source: CUDA C++ Programming Guide 12.8, "Arithmetic Instructions": half from 5.3; bf16 and
    TF32 from 8.0.
    """
    # Boards that share the host's memory (GB10, Jetson) don't report a total of their own.
    memory = _unless_unsupported(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total, 0)
    return Device(
        kind="cuda",
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        memory_bytes=int(memory),
        capability=f"{capability[0]}.{capability[1]}",
        bf16=capability >= (8, 0),
        fp16=capability >= (5, 3),
        tf32=capability >= (8, 0),
        parent_uuid=parent_uuid,
    )


def _unless_unsupported(nvml: Any, ask: Callable[[], T], fallback: T) -> T:
    """Return the answer, or `fallback` if this board or driver doesn't support the question."""
    try:
        return ask()
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return fallback


# Which processes hold memory of NVIDIA's GPUs, for the list of runs.


# For a list of runs a user waits no longer; without persistence mode NVML can take more.
TIMEOUT_S = 3.0


def held_bytes(nvml: Any = None) -> dict[int, int]:
    """Return device memory in bytes by pid; empty if NVML is missing, broken or slow.

    Args:
        nvml: Replaces the ``pynvml`` module in tests.
    """
    binding = nvml or import_nvml()
    try:
        return within(TIMEOUT_S, lambda: _ask(binding))
    except (TimeoutError, binding.NVMLError):
        return {}


def _ask(nvml: Any) -> dict[int, int]:
    nvml.nvmlInit()
    held: dict[int, int] = {}
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            board = nvml.nvmlDeviceGetHandleByIndex(index)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(board):
                held[process.pid] = held.get(process.pid, 0) + (process.usedGpuMemory or 0)
    finally:
        nvml.nvmlShutdown()
    return held
