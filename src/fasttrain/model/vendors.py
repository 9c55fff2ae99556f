"""What differs between the kinds of devices, as one table.

A new vendor is its kind and its row here, and its probe in ``fasttrain.hardware.vendors``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fasttrain.model.decision import DEVICES, Setting, option

DeviceKind = Literal["cuda", "npu", "rocm", "xpu", "musa", "mps", "cpu"]
DeviceChoice = Literal["auto", DeviceKind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """The facts about one kind of device.

    Its key in `VENDORS` is the value of ``--device``; its probe is
    ``fasttrain.hardware.vendors.KEY``, a module with a function ``vendor``.

    Attributes:
        maker: Who makes them.
        torch_type: torch's name for such a device, and of the module that drives it.
        noun: What a person calls one of them.
        visibility: Variable that narrows what a process sees; empty where there is none.
        hidden: Value of that variable that hides every device; empty where none is documented.
        narrowed_first: Variable by which a layer below narrows before that one, whose numbers count
            what is left; empty where there is none.
        visibility_else: Variable that is read where `visibility` isn't set; empty if none.
        bus_order: Variable and value with which the runtime counts devices as the probe does; None
            where it always does.
        ascending: Whether its visibility variable takes ids in ascending order only.
        blocking: Variable and value that make launches synchronous; None where there is none.
        prefixes: How the names of its other variables begin, those of its collectives included.
        torch_build: Build of torch that drives it; empty where builds don't tell.
        build_name: How that build is written.
        extension: Package that teaches torch such devices, which torch loads by itself; empty where
            torch has them built in.
        extension_needs: What the extension can't be loaded without, and the fix.
        cuda_stand_in: Import that makes a script's own ``cuda`` mean such a device; empty if none.
        counted: Whether torch counts the same devices as the probe. Of Intel's it counts integrated
            GPUs, which the probe leaves out, and on a Mac it can't count.
        memory_words: What torch begins its error with when one is ``out of memory``.
        fused_since: First torch with fused optimizers for it; None where we know of none.
        own_optimizers: The value of ``--optimizer`` that takes the extension's; empty if none.
        bf16_needs: What native bf16 takes, for the error that says it is missing.
        loss_scaling: Whether fp16's loss scaling is known to be right on it.
        may_saturate: Whether some of them never give inf in fp16, which loss scaling looks for.
        compiles_since: First torch that compiles for it.
        compiles_by: Distribution that torch.compile needs for it besides torch; empty if none.
        cuda_graphs: Whether torch.compile's strongest modes record CUDA graphs on it.
        other_graphs: What they record in their place, which the worker has no guard for.
        collectives: torch.distributed's backend for it; empty where there is none.
        beside_gloo: Whether one process group has that backend for it and gloo for the CPU.
        socket_variable: Variable that names the network interface of that backend, where it has to
            be set for ranks on one node; empty where not.
    """

    maker: str
    torch_type: str
    noun: str = "GPU"
    visibility: str = ""
    hidden: str = ""
    narrowed_first: str = ""
    visibility_else: str = ""
    bus_order: tuple[str, str] | None = None
    ascending: bool = False
    blocking: tuple[str, str] | None = None
    prefixes: tuple[str, ...] = ()
    torch_build: str = ""
    build_name: str = ""
    extension: str = ""
    extension_needs: tuple[str, str] = ("", "")
    cuda_stand_in: str = ""
    counted: bool = False
    memory_words: str = ""
    fused_since: tuple[int, int] | None = None
    own_optimizers: Literal["npu", ""] = ""
    bf16_needs: str = ""
    loss_scaling: bool = False
    may_saturate: bool = False
    compiles_since: tuple[int, int] = (2, 0)
    compiles_by: str = ""
    cuda_graphs: bool = False
    other_graphs: str = ""
    collectives: str = ""
    beside_gloo: bool = False
    socket_variable: str = ""


# NCCL and RCCL use loopback only if it is named, or there is no other interface.
# Source: docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, NCCL_SOCKET_IFNAME
_NCCL_SOCKET = "NCCL_SOCKET_IFNAME"

# The order is that of --device auto: the first kind that is there wins; the CPU always is.
VENDORS: dict[DeviceKind, Vendor] = {
    "cuda": Vendor(
        maker="NVIDIA",
        torch_type="cuda",
        visibility="CUDA_VISIBLE_DEVICES",
        hidden="-1",
        bus_order=("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        blocking=("CUDA_LAUNCH_BLOCKING", "1"),
        prefixes=("CUDA_", "NVIDIA_", "NCCL_"),
        torch_build="cuda",
        build_name="CUDA",
        counted=True,
        memory_words="CUDA",
        fused_since=(2, 0),
        bf16_needs="compute capability 8.0",
        loss_scaling=True,
        cuda_graphs=True,
        collectives="nccl",
        beside_gloo=True,
        socket_variable=_NCCL_SOCKET,
    ),
    "npu": Vendor(
        maker="Huawei",
        torch_type="npu",
        noun="NPU",
        visibility="ASCEND_RT_VISIBLE_DEVICES",
        ascending=True,
        blocking=("ASCEND_LAUNCH_BLOCKING", "1"),
        prefixes=("ASCEND_", "HCCL_"),
        extension="torch_npu",
        extension_needs=("the libraries of CANN", "source CANN's set_env.sh"),
        # Source: "Automatic Migration", https://www.hiascend.com/document/detail/en/mindstudio/830/
        # TITools/migrationtoolpt/atlasfmkt_16_0035.html
        cuda_stand_in="from torch_npu.contrib import transfer_to_npu",
        counted=True,
        memory_words="NPU",
        own_optimizers="npu",
        bf16_needs="an Ascend 910B or later",
        loss_scaling=True,
        may_saturate=True,
        # Source: https://github.com/Ascend/pytorch, releases from 7.3.0 on, which begin at torch
        # 2.6; torch_npu/_inductor/__init__.py, torch_npu 2.13.0.
        compiles_since=(2, 6),
        compiles_by="triton-ascend",
        other_graphs="NPU graphs",
        collectives="hccl",
        beside_gloo=True,
    ),
    "rocm": Vendor(
        maker="AMD",
        torch_type="cuda",
        visibility="HIP_VISIBLE_DEVICES",
        hidden="-1",
        # Source: ROCm 6.3, rocclr/device/rocm/rocdevice.cpp, Device::init: HIP chooses from the
        # agents of ROCr, by CUDA_VISIBLE_DEVICES where its own variable isn't set.
        narrowed_first="ROCR_VISIBLE_DEVICES",
        visibility_else="CUDA_VISIBLE_DEVICES",
        # What torch puts for CUDA_LAUNCH_BLOCKING on ROCm.
        # Source: torch/utils/hipify/cuda_to_hip_mappings.py, torch 2.13.
        blocking=("AMD_SERIALIZE_KERNEL", "3"),
        prefixes=("HIP_", "HSA_", "ROCR_"),
        torch_build="rocm",
        build_name="ROCm",
        counted=True,
        memory_words="HIP",
        fused_since=(2, 0),
        bf16_needs="a CDNA or RDNA 3 GPU",
        loss_scaling=True,
        cuda_graphs=True,
        collectives="nccl",
        beside_gloo=True,
        socket_variable=_NCCL_SOCKET,
    ),
    "xpu": Vendor(
        maker="Intel",
        torch_type="xpu",
        visibility="ZE_AFFINITY_MASK",
        prefixes=("ZE_",),
        memory_words="XPU",
        bf16_needs="XMX engines",
        collectives="xccl",
    ),
    # From public sources alone, see the probe's; nothing of it ever ran on a card.
    "musa": Vendor(
        maker="Moore Threads",
        torch_type="musa",
        visibility="MUSA_VISIBLE_DEVICES",
        blocking=("MUSA_LAUNCH_BLOCKING", "1"),
        prefixes=("MUSA_", "MCCL_", "MTHREADS_"),
        extension="torch_musa",
        extension_needs=(
            "the libraries of the MUSA SDK",
            "put the lib folder of the MUSA SDK into LD_LIBRARY_PATH",
        ),
        cuda_stand_in="import torchada",  # as torch_musa's README recommends
        counted=True,
        memory_words="MUSA",  # torch_musa/csrc/core/MUSACachingAllocator.cpp, torch_musa 2.7.1
        bf16_needs="an MTT S4000 or later",
        compiles_since=(2, 5),  # torch_musa/_inductor/__init__.py, torch_musa 2.5.0
        other_graphs="MUSA graphs",
        collectives="mccl",
        beside_gloo=True,  # torch_musa/csrc/distributed/Register.cpp, torch_musa 2.7.1
    ),
    "mps": Vendor(
        maker="Apple",
        torch_type="mps",
        memory_words="MPS backend",
        bf16_needs="macOS 14 on Apple silicon",
    ),
    "cpu": Vendor(
        maker="",
        torch_type="cpu",
        noun="CPU",
        fused_since=(2, 4),
        bf16_needs="AVX512_BF16 or AMX",
        loss_scaling=True,
        collectives="gloo",
    ),
}

ACCELERATORS: tuple[DeviceKind, ...] = tuple(kind for kind in VENDORS if kind != "cpu")
# torch's types of accelerators, each once, and those whose modules are made as torch.cuda is.
TORCH_TYPES = tuple(dict.fromkeys(VENDORS[kind].torch_type for kind in ACCELERATORS))
LIKE_CUDA = tuple(name for name in TORCH_TYPES if name != "mps")


def group_backend(collectives: str) -> str:
    """Return what ``init_process_group`` takes for a backend, with gloo for tensors on the CPU."""
    for vendor in VENDORS.values():
        if vendor.collectives == collectives and vendor.beside_gloo:
            return f"cpu:gloo,{vendor.torch_type}:{collectives}"
    return collectives


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """The options of `Settings` that choose devices."""

    gpus: Setting[str | None] = option(
        None, "GPUs to use: 0,3 | all | auto:N; indices, UUIDs or MIG ids", panel=DEVICES,
        metavar="LIST",
    )  # fmt: skip
    device: Setting[DeviceChoice] = option("auto", "Kind of device to train on", panel=DEVICES)
