"""`doctor --bench`: measures the devices and compares them with their data sheets."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fasttrain.hardware.torch_trial import MARKER, Talk
from fasttrain.hardware.vendors.cuda_state import data_sheet
from fasttrain.model.codec import CodecError, from_data
from fasttrain.model.machine import Device
from fasttrain.model.places import BENCH_PROGRAM, program
from fasttrain.model.vendors import VENDORS, DeviceKind

LIMIT_S = 60.0
MEASURING_S = 45.0  # after that no measurement is started
SHARED_S = 20.0  # for all timed loops; the rest goes to start, allocation and warming up
LONGEST_S = 0.5

# With the best shapes, boards reach 78 to 87 % of the bf16 rate of their data sheets; with square
# matrices or a power limit less. Below half, something is wrong with this board.
# Source: stas00/ml-engineering, compute/accelerator, "Maximum Achievable Matmul FLOPS comparison
# table": B200 77.6 %, H100 SXM 80.3 %, A100 PCIe 81.1 %, A100 SXM 86.9 %.
FAIR_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of one measurement.

    Attributes:
        what: ``matmul bf16``, ``memory copy``, ``copy to it``, ``all-reduce of 8 by nccl``, ….
        device: torch's name of the device; empty for the machine as a whole.
        value: In `unit`; 0 if there was a problem.
        unit: ``TFLOP/s`` or ``GB/s``.
        expected: The data sheet's value; None if unknown.
        problem: Why there is no value; empty if there is one.
    """

    what: str
    device: str
    value: float
    unit: str
    expected: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A sentence about a device's measurements; `fine` if it is good news."""

    device: str
    text: str
    fine: bool


def measure(
    python: str, environ: Mapping[str, str], devices: Sequence[Device], folder: str
) -> Iterator[Measurement]:
    """Yield measurements as they are made, for less than a minute; never raise.

    Args:
        python: The interpreter that runs scripts.
        environ: The environment that a run would start in.
        devices: Devices of one kind; if empty, the processor is measured.
        folder: Existing folder for the file that is read; empty to measure no disk.
    """
    # A process can use one MIG instance at a time.
    # Source: NVIDIA MIG User Guide, "CUDA Device Enumeration".
    whole = [device for device in devices if not device.parent_uuid] or list(devices[:1])
    names = {_torch_type(device.kind, i): device for i, device in enumerate(whole)}
    argv = [python, program(BENCH_PROGRAM), MARKER, json.dumps(_request(names, folder))]
    try:
        talk = Talk(argv, {**environ, **_visibility(whole)}, LIMIT_S)
    except (OSError, ValueError) as error:
        yield _failed(f"it can't be measured: {error}")
        return
    for answer in talk.answers():
        try:
            made = from_data(Measurement, answer)
        except CodecError as error:
            yield _failed(str(error))
            continue
        yield Measurement(**{**asdict(made), "expected": expected(made, names.get(made.device))})
    if talk.hung or talk.process.returncode:
        yield _failed(talk.ending().message)


def expected(measured: Measurement, device: Device | None) -> float | None:
    """Return the data sheet's value for a measurement, in its unit; None if unknown."""
    sheet = data_sheet(device) if device else None
    if sheet is None:
        return None
    rates = {
        "matmul fp32": sheet.fp32,
        "matmul tf32": sheet.tf32,
        "matmul bf16": sheet.bf16,
        "matmul fp16": sheet.half,
        "memory copy": sheet.memory_gbs,
    }
    return rates.get(measured.what)


def verdicts(measurements: Sequence[Measurement]) -> tuple[Verdict, ...]:
    """Return, for each device, how it compares with its data sheet and whether bf16 pays."""
    found = []
    for device in dict.fromkeys(item.device for item in measurements if item.device):
        mine = [item for item in measurements if item.device == device and not item.problem]
        found += [verdict for verdict in (_against_sheet(mine), _bf16(mine)) if verdict]
    return tuple(found)


def _against_sheet(mine: Sequence[Measurement]) -> Verdict | None:
    shares = {item: item.value / item.expected for item in mine if item.expected}
    if not shares:
        return None
    worst = min(shares, key=lambda item: shares[item])
    if shares[worst] >= FAIR_SHARE:
        low, high = (f"{share:.0%}" for share in (shares[worst], max(shares.values())))
        text = f"it reaches {low} to {high} of its data sheet, as it should"
        return Verdict(worst.device, text, fine=True)
    text = (
        f"{worst.what} reaches {worst.value:.4g} {worst.unit}, {shares[worst]:.0%} of the data "
        f"sheet's {worst.expected:g}: others may be using it, or its clocks are throttled"
    )
    return Verdict(worst.device, text, fine=False)


def _bf16(mine: Sequence[Measurement]) -> Verdict | None:
    rates = {item.what.removeprefix("matmul "): item.value for item in mine}
    others = {name: rates[name] for name in ("fp32", "tf32") if rates.get(name)}
    if not others or "bf16" not in rates:
        return None
    times = [f"{rates['bf16'] / rate:.1f} times {name}" for name, rate in others.items()]
    pays = rates["bf16"] > max(others.values())
    text = f"bf16 {'pays' if pays else 'does not pay'} here: {' and '.join(times)}"
    return Verdict(mine[0].device, text, fine=pays)


def _failed(problem: str) -> Measurement:
    return Measurement("bench", "", 0.0, "", problem=problem)


def _request(names: Mapping[str, Device], folder: str) -> dict[str, Any]:
    # Without a device, the CPU is measured, and gloo with two ranks at most.
    kinds = {name: _types(device) for name, device in names.items()} or {"cpu": ["fp32", "bf16"]}
    vendor = VENDORS[next(iter(names.values())).kind] if names else None
    backend = vendor.collectives if vendor and vendor.torch_type == "cuda" else ""
    count = sum(len(types) + 3 for types in kinds.values()) + 2
    return {
        "devices": [{"name": name, "types": types} for name, types in kinds.items()],
        "ranks": len(names) if backend else 0 if names else min(2, os.cpu_count() or 1),
        "backend": backend or "gloo",
        "folder": folder,
        "each_s": min(LONGEST_S, SHARED_S / count),
        "all_s": MEASURING_S,
    }


def _types(device: Device) -> list[str]:
    # TF32 is a switch of fp32 products, not a dtype, but has a rate of its own in data sheets.
    able = {"fp32": True, "tf32": device.tf32, "bf16": device.bf16, "fp16": device.fp16}
    return [name for name, can in able.items() if can]


def _torch_type(kind: DeviceKind, index: int) -> str:
    return f"{VENDORS[kind].torch_type}:{index}"


def _visibility(devices: Sequence[Device]) -> dict[str, str]:
    """Return the variables that make exactly these devices visible, in this order."""
    vendor = VENDORS[devices[0].kind] if devices else None
    if vendor is None or not vendor.visibility:
        return {}
    by_uuid = vendor.bus_order is not None
    ids = [device.uuid if by_uuid and device.uuid else str(device.index) for device in devices]
    if vendor.narrowed_first:
        left = ",".join(map(str, range(len(ids))))
        return {vendor.narrowed_first: ",".join(ids), vendor.visibility: left}
    order = dict([vendor.bus_order] if vendor.bus_order else [])
    return {vendor.visibility: ",".join(ids), **order}
