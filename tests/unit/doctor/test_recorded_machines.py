"""Recorded machines: what doctor shows of them, finds and advises, written down by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from fasttrain.cli.cards.diagnosis import device_rows
from fasttrain.doctor.diagnosis import best_command, diagnose
from fasttrain.hardware.machine_file import read_examination

DATA = Path(__file__).parents[2] / "data/examinations"


@dataclass(frozen=True)
class Expected:
    """What a machine must give.

    Attributes:
        rows: Device, precisions and state of each row of the table but the processor's.
        findings: Severity and slug, the worst first.
        command: The advice.
    """

    rows: list[tuple[str, str, str]]
    findings: list[tuple[str, str]]
    command: str


EXPECTED = {
    "8xh100-nvlink": Expected(
        [("cuda 0-7 (8)", "bf16 fp16 tf32", "free")],
        [("hint", "numa")],
        "fasttrain run train.py --gpus all --compile default",
    ),
    # Docker's defaults: 64 MiB of shared memory, 1024 open files, 64 KiB of locked memory.
    "4xt4": Expected(
        [("cuda 0, 1 (2)", "fp16", "free"), ("cuda 2", "fp16", "throttled: thermal"),
         ("cuda 3", "fp16", "free")],
        [("warning", "throttling"), ("warning", "shared-memory"), ("hint", "persistence"),
         ("hint", "peer-access"), ("hint", "open-files"), ("hint", "locked-memory")],
        "fasttrain run train.py --gpus all --compile default",
    ),
    # CUDA shows a process one instance, the first one that the variable names.
    "a100-mig": Expected(
        [("cuda 0", "bf16 fp16 tf32", "free"), ("cuda 0", "bf16 fp16 tf32", "1 process")],
        [("warning", "device-busy")],
        "fasttrain run train.py --compile default",
    ),
    "3090-and-1080": Expected(
        [("cuda 0", "fp16", "display"), ("cuda 1", "bf16 fp16 tf32", "free")],
        [("error", "torch-architecture"), ("warning", "power-limit"), ("warning", "pcie-width"),
         ("warning", "mixed-devices"), ("hint", "triton-capability"), ("hint", "persistence"),
         ("hint", "device-order"), ("hint", "peer-access"), ("hint", "open-files")],
        "fasttrain run train.py --gpus 1 --compile default",
    ),
    # ASCEND_RT_VISIBLE_DEVICES=3,1: torch_npu reads ascending numbers only.
    "8xascend910b": Expected(
        [("npu 0-4 (5)", "bf16 fp16", "free"), ("npu 5", "bf16 fp16", "Warning"),
         ("npu 6, 7 (2)", "bf16 fp16", "free")],
        [("error", "visible-ascending"), ("warning", "device-health"), ("hint", "triton")],
        "fasttrain run train.py --gpus all",
    ),
    # A 910ProB and a 910B of the first generation, as one node's npu-smi has listed them.
    "ascend-910a": Expected(
        [("npu 0", "fp16", "free"), ("npu 1", "fp16", "free")],
        [("warning", "mixed-devices"), ("hint", "triton")],
        "fasttrain run train.py --gpus 0",
    ),
    # torch_npu without CANN's set_env.sh: torch can't be imported.
    "ascend-310p": Expected(
        [("npu 0", "fp16", "free"), ("npu 1", "fp16", "free")],
        [("error", "torch-extension"), ("hint", "triton")],
        "fasttrain run train.py",
    ),
    "cpu-amx": Expected([], [], "fasttrain run train.py"),
    "cpu-quota": Expected(
        [],
        [("warning", "thread-count"), ("warning", "shared-memory"), ("warning", "cpu-quota")],
        "fasttrain run train.py",
    ),
}  # fmt: skip


def test_every_recorded_machine_is_in_the_table() -> None:
    assert sorted(EXPECTED) == sorted(path.stem for path in DATA.glob("*.json"))


@pytest.mark.parametrize("name", EXPECTED)
def test_devices_are_told_at_a_glance(name: str) -> None:
    *rows, processor = device_rows(read_examination(DATA / f"{name}.json"))
    # Devices of one model with unlike memory are two rows.
    assert [(row[0], row[3], row[4]) for row in rows] == EXPECTED[name].rows
    assert processor[0] == "cpu"


@pytest.mark.parametrize("name", EXPECTED)
def test_findings_come_the_worst_first(name: str) -> None:
    findings = diagnose(read_examination(DATA / f"{name}.json"))
    assert [(finding.severity, finding.check) for finding in findings] == EXPECTED[name].findings


@pytest.mark.parametrize("name", EXPECTED)
def test_the_command_fits_the_machine(name: str) -> None:
    assert best_command(read_examination(DATA / f"{name}.json"), "")[0] == EXPECTED[name].command


def test_the_command_names_the_script() -> None:
    seen = read_examination(DATA / "cpu-amx.json")
    assert best_command(seen, "tools/fit.py")[0] == "fasttrain run tools/fit.py"
