"""A stand-in for the backend ``hccl``: gloo, over the memory that simulated NPUs share with it.

``FAKE_HCCL_LOG`` names a file that gets a line, the rank, for each collective.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

_dist: Any = dist


# Source: checkSupportedDataTypeOfAllReduce of torch_npu's ProcessGroupHCCL.cpp
REDUCED = {
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32),
}


class _Done(dist.Work):
    """Work that is over already."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class SimulatedHccl(dist.ProcessGroup):
    """The collectives that data-parallel training uses, each waited for.

    Args:
        in_host_memory: Gives a CPU tensor over the bytes of one on the device.
        group: Position and size of the group, as torch hands them to a backend.
    """

    def __init__(self, in_host_memory: Callable[[Any], Any], *group: Any) -> None:
        store, rank, size, timeout = group
        super().__init__(rank, size)
        self._alias = in_host_memory
        self._gloo = _dist.ProcessGroupGloo(store, rank, size, timeout)

    def _host(self, tensors: Any) -> Any:
        if isinstance(tensors, torch.Tensor):
            return self._alias(tensors) if tensors.device.type == "npu" else tensors
        return [self._host(tensor) for tensor in tensors]

    def _done(self, work: Any, result: Any) -> _Done:
        work.wait()
        if log := os.environ.get("FAKE_HCCL_LOG"):
            lines = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # unseen by fasttrain
            os.write(lines, f"{self.rank()}\n".encode())
            os.close(lines)
        return _Done(result)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        for tensor in tensors:
            if tensor.device.type == "npu" and tensor.dtype not in REDUCED:
                raise RuntimeError(f"HCCL AllReduce: Unsupported data type {tensor.dtype}")
        opts = opts or _dist.AllreduceOptions()
        return self._done(self._gloo.allreduce(self._host(tensors), opts), tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or _dist.BroadcastOptions()
        return self._done(self._gloo.broadcast(self._host(tensors), opts), tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or _dist.AllgatherOptions()
        work = self._gloo.allgather(self._host(outputs), self._host(inputs), opts)
        return self._done(work, outputs)

    def barrier(self, opts: Any = None) -> Any:
        return self._done(self._gloo.barrier(opts or _dist.BarrierOptions()), None)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "hccl"


def register(in_host_memory: Callable[[Any], Any]) -> None:
    """Make ``init_process_group`` know the backend for the device type ``npu``."""

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return SimulatedHccl(in_host_memory, store, rank, size, timeout)

    dist.Backend.register_backend("hccl", make, devices=["npu"])
