"""What differs between the kinds of devices, as one table; a new vendor is one more entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fasttrain.model.decision import Setting
from fasttrain.model.option import DEVICES, option

DeviceKind = Literal["cuda", "npu", "rocm", "xpu", "mps", "cpu"]
DeviceChoice = Literal["auto", DeviceKind]


@dataclass(frozen=True, slots=True)
class Vendor:
    """The facts about one kind of device that a plan depends on.

    Attributes:
        noun: What a person calls one of them.
        visibility: Variable that narrows what a process sees; empty where there is none.
        hidden: Value of that variable that hides every device; empty where none is documented.
        blocking: Variable and value that make launches synchronous; None where there is none.
        torch_build: Build of torch that drives it; empty where builds don't tell.
        fused_since: First torch with fused optimizers for it; None where we know of none.
        bf16_needs: What native bf16 takes, for the error that says it is missing.
        loss_scaling: Whether fp16's loss scaling is known to be right on it.
        may_saturate: Whether some of them never give inf in fp16, which loss scaling looks for.
        compiles_since: First torch that compiles for it.
        compiles_by: Distribution that torch.compile needs for it besides torch; empty if none.
        cuda_graphs: Whether torch.compile's strongest modes record CUDA graphs on it.
        other_graphs: What they record in their place, which the worker has no guard for.
        collectives: torch.distributed's backend for it; empty where there is none.
        ascending: Whether its visibility variable takes ids in ascending order only.
    """

    noun: str = "GPU"
    visibility: str = ""
    hidden: str = ""
    blocking: tuple[str, str] | None = None
    torch_build: str = ""
    fused_since: tuple[int, int] | None = None
    bf16_needs: str = ""
    loss_scaling: bool = False
    may_saturate: bool = False
    compiles_since: tuple[int, int] = (2, 0)
    compiles_by: str = ""
    cuda_graphs: bool = False
    other_graphs: str = ""
    collectives: str = ""
    ascending: bool = False


# The order is that of --device auto: the first kind that is there wins; the CPU always is.
VENDORS: dict[DeviceKind, Vendor] = {
    "cuda": Vendor(
        visibility="CUDA_VISIBLE_DEVICES",
        hidden="-1",
        blocking=("CUDA_LAUNCH_BLOCKING", "1"),
        torch_build="cuda",
        fused_since=(2, 0),
        bf16_needs="compute capability 8.0",
        loss_scaling=True,
        cuda_graphs=True,
        collectives="nccl",
    ),
    "npu": Vendor(
        noun="NPU",
        visibility="ASCEND_RT_VISIBLE_DEVICES",
        blocking=("ASCEND_LAUNCH_BLOCKING", "1"),
        bf16_needs="an Ascend 910B or later",
        loss_scaling=True,
        may_saturate=True,
        # Source: https://github.com/Ascend/pytorch, releases from 7.3.0 on, which begin at torch
        # 2.6; torch_npu/_inductor/__init__.py, torch_npu 2.13.0.
        compiles_since=(2, 6),
        compiles_by="triton-ascend",
        other_graphs="NPU graphs",
        collectives="hccl",
        ascending=True,
    ),
    "rocm": Vendor(
        visibility="HIP_VISIBLE_DEVICES",
        hidden="-1",
        # What torch puts for CUDA_LAUNCH_BLOCKING on ROCm.
        # Source: torch/utils/hipify/cuda_to_hip_mappings.py, torch 2.13.
        blocking=("AMD_SERIALIZE_KERNEL", "3"),
        torch_build="rocm",
        fused_since=(2, 0),
        bf16_needs="a CDNA or RDNA 3 GPU",
        loss_scaling=True,
        cuda_graphs=True,
        collectives="nccl",
    ),
    "xpu": Vendor(visibility="ZE_AFFINITY_MASK", bf16_needs="XMX engines", collectives="xccl"),
    "mps": Vendor(bf16_needs="macOS 14 on Apple silicon"),
    "cpu": Vendor(
        noun="CPU",
        fused_since=(2, 4),
        bf16_needs="AVX512_BF16 or AMX",
        loss_scaling=True,
        collectives="gloo",
    ),
}

ACCELERATORS: tuple[DeviceKind, ...] = tuple(kind for kind in VENDORS if kind != "cpu")


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """The options of `Settings` that choose devices."""

    gpus: Setting[str | None] = option(
        None, "GPUs to use: 0,3 | all | auto:N; indices, UUIDs or MIG ids", panel=DEVICES,
        metavar="LIST",
    )  # fmt: skip
    device: Setting[DeviceChoice] = option("auto", "Kind of device to train on", panel=DEVICES)
