"""Who holds memory of NVIDIA's GPUs, without a look at anything else of them."""

from __future__ import annotations

from typing import Any

from fasttrain.hardware.patience import within
from fasttrain.hardware.vendors.cuda_state import import_nvml

TIMEOUT_S = 3.0  # a list of runs is not worth more; without persistence mode NVML can take longer


def held_bytes(nvml: Any = None) -> dict[int, int]:
    """Give device memory by process; nothing where NVML is missing, broken or slow.

    Args:
        nvml: Stands in for the ``pynvml`` module in tests.
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
