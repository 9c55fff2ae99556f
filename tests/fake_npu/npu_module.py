"""What ``torch.npu`` holds on the simulated device: the part that torch and the optimizers ask."""

from __future__ import annotations

import os
import time
import types
from typing import Any

import torch

TOTAL_BYTES = 64 << 30
# Numbers by which torch_npu orders its chips; from 220 on they compute in bf16.
# Source: torch_npu 2.13.0, aclrtGetSocName as its csrc/core/npu/NpuVariables.cpp maps it
SOC_VERSIONS = {"Ascend910A": 102, "Ascend910B": 104, "Ascend310P3": 202, "Ascend910B3": 223}
FIRST_WITH_BF16 = 220
SATURATE_ALL_THE_SAME = range(240, 250)  # 310B


class Stream:
    """A stream on which all has been done already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device_index = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...

    def query(self) -> bool:
        return True


class Event:
    """A point in time of such a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorded_s = 0.0

    def record(self, _: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, _: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return (other._recorded_s - self._recorded_s) * 1e3


def _take_streams() -> None:
    """Have a tensor's ``record_stream`` take these streams, as it takes those of a card."""
    record: Any = torch.Tensor.record_stream

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        if not isinstance(stream, Stream):
            record(tensor, stream)

    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign]


def make(extension: Any) -> Any:
    """Return the module; ``FAKE_NPU_NAME`` names the chip and ``FAKE_NPU_COUNT`` says how many."""
    _take_streams()
    module: Any = types.ModuleType("torch.npu")
    module.extension = extension
    for part in (_devices, _precision, _random, _memory):
        vars(module).update(part(extension))
    return module


def _name(_: Any = None) -> str:
    return os.environ.get("FAKE_NPU_NAME", "Ascend910B3")


def _soc_version() -> int:
    return SOC_VERSIONS[_name()]


def is_support_inf_nan() -> bool:
    """Whether the chip gives inf where fp16 overflows; its CPU kernels do so on any."""
    return _soc_version() >= FIRST_WITH_BF16 and _soc_version() not in SATURATE_ALL_THE_SAME


def _devices(extension: Any) -> dict[str, Any]:
    def index(device: Any) -> int:
        given = device if isinstance(device, int) else torch.device(device).index
        return int(extension.current_device() if given is None else given)

    class Device:
        """Makes a device the current one inside of a with-block."""

        def __init__(self, device: Any) -> None:
            self._index = index(device)

        def __enter__(self) -> None:
            self._before = extension.current_device()
            extension.set_device(self._index)

        def __exit__(self, *_: object) -> None:
            extension.set_device(self._before)

    return {
        "is_available": lambda: extension.device_count() > 0,
        "device_count": extension.device_count,
        "current_device": extension.current_device,
        "set_device": lambda device: extension.set_device(index(device)),
        "synchronize": lambda device=None: None,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda function: function(),
        "get_device_name": _name,
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            name=_name(), total_memory=TOTAL_BYTES
        ),
        "device": Device,
        "Stream": Stream,
        "Event": Event,
        "current_stream": Stream,
        "default_stream": Stream,
        "stream": lambda stream: stream,
        "set_stream": lambda stream: None,
    }


def _precision(_: Any) -> dict[str, Any]:
    def is_bf16_supported() -> bool:
        return _soc_version() >= FIRST_WITH_BF16

    def get_amp_supported_dtype() -> list[torch.dtype]:
        bf16 = [torch.bfloat16] if is_bf16_supported() else []
        return [torch.float16, *bf16, torch.float32]

    return {
        "soc_version": _soc_version,
        "is_bf16_supported": is_bf16_supported,
        "get_amp_supported_dtype": get_amp_supported_dtype,
        "get_autocast_dtype": lambda: torch.get_autocast_dtype("npu"),
        "set_autocast_dtype": lambda dtype: torch.set_autocast_dtype("npu", dtype),
        "is_autocast_enabled": lambda: torch.is_autocast_enabled("npu"),
        "set_autocast_enabled": lambda on: torch.set_autocast_enabled("npu", on),
        "FloatTensor": torch.Tensor,
    }


def _random(extension: Any) -> dict[str, Any]:
    def generators() -> list[Any]:
        return [extension.default_generator(i) for i in range(extension.device_count())]

    def manual_seed_all(seed: int) -> None:
        for generator in generators():
            generator.manual_seed(seed)

    return {
        "default_generators": tuple(generators()),
        "manual_seed": manual_seed_all,
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device=None: generators()[0].get_state(),
        "set_rng_state": lambda state, device=None: generators()[0].set_state(state),
    }


def _memory(extension: Any) -> dict[str, Any]:
    return {
        "memory_allocated": lambda device=None: extension.memory_allocated(),
        "max_memory_allocated": lambda device=None: extension.max_memory_allocated(),
        "reset_peak_memory_stats": lambda device=None: extension.reset_peak(),
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (
            TOTAL_BYTES - extension.memory_allocated(),
            TOTAL_BYTES,
        ),
    }
