"""What NVIDIA's data sheets promise of a board: the measure of `doctor --bench`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fasttrain.model.machine import Device


@dataclass(frozen=True, slots=True)
class DataSheet:
    """A board's peak rates; None where its data sheet has none.

    Attributes:
        fp32: TFLOP/s of fp32 without tensor cores.
        tf32: Dense TFLOP/s of tensor cores with TF32.
        half: Dense TFLOP/s of tensor cores with fp16, accumulated in fp32 as torch does.
        bf16: Dense TFLOP/s of tensor cores with bf16.
        memory_gbs: Bandwidth of its memory in GB/s.
    """

    fp32: float
    tf32: float | None
    half: float
    bf16: float | None
    memory_gbs: float


# Boards by the name that the driver gives them; a board of another name, such as an A10G or a
# 3090 Ti, is another board. Where a data sheet gives tensor cores with sparsity only, this is half.
_BOARDS: tuple[tuple[str, DataSheet], ...] = (
    # Source: volta-v100-datasheet-update-us-1165301-r5.pdf.
    (r"Tesla V100-SXM2-\d+GB", DataSheet(15.7, None, 125, None, 900)),
    (r"Tesla V100-PCIE-\d+GB", DataSheet(14, None, 112, None, 900)),
    # Source: t4-tensor-core-datasheet-951643.pdf.
    (r"Tesla T4", DataSheet(8.1, None, 65, None, 300)),
    # Source: NVIDIA's data sheets of A10, A30 and A40.
    (r"NVIDIA A10", DataSheet(31.2, 62.5, 125, 125, 600)),
    (r"NVIDIA A30", DataSheet(10.3, 82, 165, 165, 933)),
    (r"NVIDIA A40", DataSheet(37.4, 74.8, 149.7, 149.7, 696)),
    # Source: nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf, and that of the 40 GB before it.
    (r"(NVIDIA )?A100-(SXM4|PCIE)-40GB", DataSheet(19.5, 156, 312, 312, 1555)),
    (r"(NVIDIA )?A100-SXM4-80GB", DataSheet(19.5, 156, 312, 312, 2039)),
    (r"NVIDIA A100 80GB PCIe", DataSheet(19.5, 156, 312, 312, 1935)),
    # Source: nvidia.com/en-us/data-center/l4 and l40s.
    (r"NVIDIA L4", DataSheet(30.3, 60, 121, 121, 300)),
    (r"NVIDIA L40S", DataSheet(91.6, 183, 362, 362, 864)),
    # Source: nvidia.com/en-us/data-center/h100; the data sheet had 67 TFLOP/s of fp32 for the NVL
    # before 2024, and the PCIe board in place of it.
    (r"NVIDIA H100 80GB HBM3", DataSheet(67, 494.5, 989.5, 989.5, 3350)),
    (r"NVIDIA H100 PCIe", DataSheet(51, 378, 756.5, 756.5, 2000)),
    (r"NVIDIA H100 NVL", DataSheet(60, 417.5, 835.5, 835.5, 3900)),
    # Source: nvidia.com/en-us/data-center/h200.
    (r"NVIDIA H200", DataSheet(67, 494.5, 989.5, 989.5, 4800)),
    (r"NVIDIA H200 NVL", DataSheet(60, 417.5, 835.5, 835.5, 4800)),
    # Source: nvidia.com/en-us/data-center/grace-hopper-superchip; 480GB is Grace's own memory.
    (r"NVIDIA GH200 480GB", DataSheet(67, 494, 990, 990, 4000)),
    # Source: nvidia.com/en-us/data-center/hgx, HGX B200 with 180 GB; the technical brief before it
    # had 80 TFLOP/s of fp32 and 8000 GB/s, as boards of the GB200 have.
    (r"NVIDIA B200", DataSheet(75, 1100, 2250, 2250, 7700)),
    # Source: NVIDIA Ampere GA102 GPU Architecture whitepaper V2, appendix A.
    (r"(NVIDIA )?GeForce RTX 3090", DataSheet(35.6, 35.6, 71, 71, 936)),
    # Source: NVIDIA Ada GPU Architecture whitepaper V2, appendix A.
    (r"NVIDIA GeForce RTX 4090", DataSheet(82.6, 82.6, 165.2, 165.2, 1008)),
    # Source: NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A.
    (r"NVIDIA GeForce RTX 5090", DataSheet(104.8, 104.8, 209.5, 209.5, 1792)),
)


def data_sheet(device: Device) -> DataSheet | None:
    """Give a board's data sheet; None for an unknown one, and for a slice of a board."""
    if device.kind != "cuda" or device.parent_uuid:
        return None
    found = (sheet for pattern, sheet in _BOARDS if re.fullmatch(pattern, device.name))
    return next(found, None)
