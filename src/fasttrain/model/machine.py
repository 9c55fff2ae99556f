"""The description of a machine: the result of the probes, and the input of ``--machine FILE``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fasttrain.model.vendors import DeviceKind

MACHINE_SCHEMA = 1

# The result of an fp16 overflow: inf, or fp16's largest number.
Overflow = Literal["inf", "saturates", ""]


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator that a process can use.

    Attributes:
        kind: Vendor family; also torch's device type, except that ROCm's is ``cuda``.
        index: Index in the driver's own numbering, before any visibility variable.
        name: Marketing name, such as ``NVIDIA H100 80GB HBM3``.
        uuid: Stable identity, such as ``GPU-…`` or ``MIG-…``; empty if the vendor has none.
        memory_bytes: Total device memory; 0 if unknown.
        capability: CUDA compute capability as ``"9.0"``, or the chip name of an Ascend card.
        bf16: Whether bf16 arithmetic is native.
        fp16: Whether fp16 arithmetic is native.
        tf32: Whether fp32 matrix products can use TF32.
        overflow: The result of an fp16 overflow, for kinds whose devices differ in it (Ascend);
            empty for other kinds, or if unknown.
        parent_uuid: UUID of the GPU that a MIG instance is a slice of; else empty.
    """

    kind: DeviceKind
    index: int
    name: str
    uuid: str = ""
    memory_bytes: int = 0
    capability: str = ""
    bf16: bool = False
    fp16: bool = False
    tf32: bool = False
    parent_uuid: str = ""
    overflow: Overflow = ""


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor, and the part of it that this process may use.

    Attributes:
        model: Name of the processor.
        cores: Whole cores granted: the least of affinity, cgroup quota and SLURM_CPUS_PER_TASK.
        cores_reason: Which of those limits is the least.
        memory_bytes: Memory granted: the lesser of physical memory and the cgroup's limit.
        features: Instruction sets that matter here: ``avx2``, ``avx512_bf16``, ``amx_bf16``, ….
    """

    model: str
    cores: int
    cores_reason: str
    memory_bytes: int = 0
    features: tuple[str, ...] = ()

    @property
    def bf16(self) -> bool:
        """True if bf16 products run natively (AVX512_BF16 or AMX); elsewhere they are emulated."""
        return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(self.features))


@dataclass(frozen=True, slots=True)
class Torch:
    """The torch that the script would import, read without importing it.

    Attributes:
        version: Full version, such as ``2.13.0+cpu``; empty if torch is not installed.
        build: ``cuda``, ``rocm`` or ``cpu``.
        build_version: Version of that toolkit, such as ``12.8``; empty for ``cpu``.
        triton_ascend: Version of triton-ascend, which torch.compile needs on NPUs; empty if none.
    """

    version: str = ""
    build: Literal["cuda", "rocm", "cpu", ""] = ""
    build_version: str = ""
    triton_ascend: str = ""

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version; ``(0, 0)`` if torch is not installed."""
        parts = self.version.split("+")[0].split(".")
        if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
            return (0, 0)
        return (int(parts[0]), int(parts[1]))


@dataclass(frozen=True, slots=True)
class Machine:
    """One node: devices, processor, interpreter and compiler.

    Attributes:
        hostname: Name of the node.
        system: ``Linux``, ``Darwin`` or ``Windows``.
        python: Version of the interpreter that runs the script.
        torch: Its torch.
        cpu: Its processor.
        devices: Accelerators, in the order of their drivers.
        cxx_compiler: Path or name of the C++ compiler that inductor would use; empty if none.
        driver: Version of the accelerator's driver; empty if none.
        notes: Findings of the probes for the user, one sentence each.
    """

    hostname: str
    system: str
    python: str
    torch: Torch
    cpu: Cpu
    devices: tuple[Device, ...] = ()
    cxx_compiler: str = ""
    driver: str = ""
    notes: tuple[str, ...] = ()
    schema: int = MACHINE_SCHEMA


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python other than fasttrain's own, as it describes itself; it never imports torch for that.

    Attributes:
        path: Absolute path. Links aren't followed: Python finds its virtual environment by the
            path that it was started with.
        error: Why it couldn't be queried; empty on success.
        version: Its version, such as ``3.12.1``.
        prefix: Its environment's folder.
        torch: Folder of its torch; empty without one.
        search: Its module search path.
    """

    path: str
    error: str = ""
    version: str = ""
    prefix: str = ""
    torch: str = ""
    search: tuple[str, ...] = ()
