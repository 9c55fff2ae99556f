"""What measurements are held against, what they say, and interpreters that don't measure."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fasttrain.doctor.bench import Measurement, expected, measure, verdicts
from fasttrain.hardware.torch_trial import MARKER
from fasttrain.hardware.vendors.cuda_state import data_sheet
from fasttrain.model.machine import Device

H100 = Device("cuda", 3, "NVIDIA H100 80GB HBM3", "GPU-3", bf16=True, fp16=True, tf32=True)
T4 = Device("cuda", 0, "Tesla T4", "GPU-0", fp16=True)
SLICE = Device("cuda", 0, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "MIG-1", parent_uuid="GPU-0")


def product(kind: str, value: float, sheet: float | None = None) -> Measurement:
    return Measurement(f"matmul {kind}", "cuda:0", value, "TFLOP/s", sheet)


@pytest.mark.parametrize(
    "name",
    ["NVIDIA A10G", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D", "NVIDIA L40", ""],
)
def test_a_board_with_a_similar_name_is_another_board(name: str) -> None:
    assert data_sheet(Device("cuda", 0, name)) is None


@pytest.mark.parametrize(
    ("name", "fp16", "memory_gbs"),
    [
        ("Tesla V100-SXM2-32GB", 125, 900),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA A100-PCIE-40GB", 312, 1555),
        ("NVIDIA H100 PCIe", 1513 / 2, 2000),
        ("NVIDIA H100 NVL", 1671 / 2, 3900),
        ("NVIDIA H200", 1979 / 2, 4800),
        ("NVIDIA B200", 4500 / 2, 7700),
    ],
)
def test_boards_are_known_by_the_names_of_the_driver(
    name: str, fp16: float, memory_gbs: float
) -> None:
    sheet = data_sheet(Device("cuda", 0, name))
    assert sheet is not None
    assert (sheet.half, sheet.memory_gbs) == (fp16, memory_gbs)


def test_expected_is_the_dense_rate_of_the_type() -> None:
    assert expected(product("fp32", 1), H100) == 67
    assert expected(product("tf32", 1), H100) == 989 / 2
    assert expected(product("bf16", 1), H100) == 1979 / 2
    assert expected(product("bf16", 1), T4) is None
    assert expected(Measurement("memory copy", "cuda:0", 1, "GB/s"), T4) == 300
    assert expected(Measurement("copy to it", "cuda:0", 1, "GB/s"), T4) is None


def test_a_slice_is_not_held_against_its_whole_board() -> None:
    whole = Device("cuda", 0, "NVIDIA A100-SXM4-40GB", parent_uuid="GPU-0")
    assert data_sheet(whole) is None


def test_a_board_near_its_data_sheet_is_fine() -> None:
    (verdict,) = verdicts([product("fp32", 8, 10), product("fp16", 60, 100)])
    assert verdict.fine
    assert re.findall(r"\d+%", verdict.text) == ["60%", "80%"]


def test_a_board_far_from_its_data_sheet_is_not() -> None:
    (verdict,) = verdicts([product("fp32", 8, 10), product("fp16", 40, 100)])
    assert not verdict.fine
    assert "matmul fp16" in verdict.text
    assert re.findall(r"\b\d+(?: TFLOP/s|%)?", verdict.text) == ["40 TFLOP/s", "40%", "100"]


def test_bf16_pays_only_if_it_beats_tf32() -> None:
    fp32, tf32, bf16 = product("fp32", 10), product("tf32", 50), product("bf16", 90)
    (verdict,) = verdicts([fp32, tf32, bf16])
    assert verdict.fine
    assert re.findall(r"[\d.]{3}\D+(?:fp32|tf32)", verdict.text) == [
        "9.0 times fp32",
        "1.8 times tf32",
    ]
    (verdict,) = verdicts([fp32, tf32, product("bf16", 40)])
    assert not verdict.fine


def test_what_was_not_measured_is_not_judged() -> None:
    broken = Measurement("matmul bf16", "cuda:0", 0, "TFLOP/s", 100, "out of memory")
    assert verdicts([product("fp32", 10), broken]) == ()
    assert verdicts([Measurement("disk read", "", 2, "GB/s")]) == ()


def interpreter(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_measurements_come_with_what_is_expected(tmp_path: Path) -> None:
    answer = {"what": "matmul fp32", "device": "cuda:0", "value": 60.5, "unit": "TFLOP/s"}
    python = interpreter(tmp_path, f"echo '{MARKER}{json.dumps(answer)}'")
    assert list(measure(python, {}, [H100], "")) == [product("fp32", 60.5, 67)]


def test_only_the_chosen_devices_are_shown_in_their_order(tmp_path: Path) -> None:
    python = interpreter(tmp_path, 'echo "$CUDA_VISIBLE_DEVICES $3" > "${0%/*}/asked"; echo "$3"')
    assert list(measure(python, {"CUDA_VISIBLE_DEVICES": "7"}, [H100, T4], "runs")) == []
    shown, _, request = (tmp_path / "asked").read_text().partition(" ")
    asked = json.loads(request)
    assert shown == "GPU-3,GPU-0"
    assert (asked["ranks"], asked["backend"], asked["folder"]) == (2, "nccl", "runs")
    assert asked["devices"] == [
        {"name": "cuda:0", "types": ["fp32", "tf32", "bf16", "fp16"]},
        {"name": "cuda:1", "types": ["fp32", "fp16"]},
    ]


def test_amd_gpus_are_counted_by_hip_from_those_that_rocr_leaves(tmp_path: Path) -> None:
    show = 'echo "$ROCR_VISIBLE_DEVICES/$HIP_VISIBLE_DEVICES" > "${0%/*}/asked"'
    gpus = [Device("rocm", index, "AMD MI300X") for index in (2, 5)]
    list(measure(interpreter(tmp_path, show), {"ROCR_VISIBLE_DEVICES": "2,5"}, gpus, ""))
    assert (tmp_path / "asked").read_text() == "2,5/0,1\n"


def test_one_slice_is_measured_of_several(tmp_path: Path) -> None:
    other = Device("cuda", 0, SLICE.name, "MIG-2", parent_uuid="GPU-0")
    python = interpreter(tmp_path, 'echo "$CUDA_VISIBLE_DEVICES" > "${0%/*}/asked"')
    list(measure(python, {}, [SLICE, other], ""))
    assert (tmp_path / "asked").read_text() == "MIG-1\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kill -SEGV $$", "SIGSEGV"),
        ("echo 'ImportError: no torch' >&2; exit 1", "no torch"),
        (f"echo '{MARKER}{{\"what\": 1}}'", "what"),
    ],
)
def test_what_breaks_is_one_problem(tmp_path: Path, text: str, problem: str) -> None:
    (broken,) = measure(interpreter(tmp_path, text), {}, [], "")
    assert problem in broken.problem


def test_a_missing_interpreter_is_a_problem(tmp_path: Path) -> None:
    (broken,) = measure(str(tmp_path / "nowhere"), {}, [], "")
    assert "nowhere" in broken.problem
