"""Ascend's probe against recorded `npu-smi info` layouts and broken ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fasttrain.hardware.vendors.npu import (
    HEALTH,
    NO_TABLE,
    NOT_INSTALLED,
    Npu,
    NpuSmi,
    parse_npu_smi,
)

RECORDED = Path(__file__).parents[2] / "data" / "npu_smi"
MIB = 2**20

# Read off the recorded tables by eye: tool version, then name, MiB and bf16 of each chip. In the
# recorded ones those with bf16 are those that give inf in fp16.
LAYOUTS = {
    "910b3_24.1": ("24.1.0", [("Ascend910B3", 65536, True)] * 2),
    "910b4_26.0": ("26.0.rc2", [("Ascend910B4", 32768, True)]),
    "910a_24.1": ("24.1.0", [("Ascend910ProB", 32768, False), ("Ascend910B", 32768, False)]),
    "310p3_25.2": ("25.2.0", [("Ascend310P3", 44280, False), ("Ascend310P3", 43693, False)]),
    "a3_25.5": ("25.5.0", [("Ascend910_93", 65536, True)] * 4),
    "950_a5": ("99.0.rc1.b1", [("Ascend950DT", 8192, True)] * 2),
}


def installed(_: str) -> bool:
    return True


def probe(host: Any, smi: Any = None) -> Any:
    return Npu(host, installed, smi).probe()


def smi(name: str, code: int = 0) -> dict[str, str]:
    """Return an npu-smi that prints a recorded file, and only for the sub-command `info`."""
    script = f'[ "$*" = info ] || exit 64\ncat "{RECORDED / name}.txt"; exit {code}'
    return {"npu-smi": script}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_recorded_layout_is_read(make_host: Any, layout: str) -> None:
    version, chips = LAYOUTS[layout]
    report = probe(make_host(tools=smi(layout), ASCEND_HOME_PATH="/cann"))
    assert [(d.name, d.memory_bytes // MIB, d.bf16) for d in report.devices] == chips
    assert [d.overflow == "inf" for d in report.devices] == [bf16 for _, _, bf16 in chips]
    assert [d.index for d in report.devices] == list(range(len(chips)))
    assert all(d.kind == "npu" and d.fp16 and d.capability == d.name for d in report.devices)
    assert report.driver == version
    assert not [note for note in report.notes if HEALTH not in note]


def test_every_recorded_file_is_tested() -> None:
    assert {path.stem for path in RECORDED.glob("*.txt")} == {*LAYOUTS, "fail_dcmi"}


def test_health_other_than_ok_is_told(make_host: Any) -> None:
    report = probe(make_host(tools=smi("a3_25.5"), ASCEND_HOME_PATH="/cann"))
    (note,) = report.notes
    assert "NPU 1" in note
    assert "Warning" in note


@pytest.mark.parametrize("code", [0, 1])
def test_a_failing_tool_leaves_a_note_and_no_devices(make_host: Any, code: int) -> None:
    files = {"dev/davinci0": "", "dev/davinci_manager": ""}
    report = probe(make_host(files, tools=smi("fail_dcmi", code), ASCEND_HOME_PATH="/cann"))
    assert report.devices == ()
    (note,) = report.notes
    assert "dcmi module initialize failed" in note


def test_a_hanging_tool_is_cut_off(make_host: Any) -> None:
    host = make_host(tools={"npu-smi": "exec sleep 5"}, ASCEND_HOME_PATH="/cann")
    report = probe(host, smi=NpuSmi(host, timeout_s=0.05))
    assert report.devices == ()
    (note,) = report.notes
    assert "0.05 s" in note


def test_every_cut_off_table_is_refused_or_read_in_full() -> None:
    text = (RECORDED / "910b3_24.1.txt").read_text()
    lines = text.splitlines()
    head_of_second = next(i for i, line in enumerate(lines) if line.startswith("| 1     910B3"))
    assert len(parse_npu_smi("\n".join(lines[:head_of_second])).chips) == 1
    with pytest.raises(ValueError, match=r"NPU '1 +910B3'"):
        parse_npu_smi("\n".join(lines[: head_of_second + 1]))


@pytest.mark.parametrize(
    "text", ["", "\x00\xff", "| 0 | 910B3 | OK |", "Version: 1\n| 0 X | OK | 1 |"]
)
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"{NO_TABLE}|NPU '"):
        parse_npu_smi(text)


def test_the_910_of_old_is_not_the_ascend910_of_a3() -> None:
    text = (RECORDED / "910b3_24.1.txt").read_text()
    old = parse_npu_smi(text.replace("910B3  ", "910    "))
    assert {chip.name for chip in old.chips} == {"Ascend910"}


def _chip(make_host: Any, folder: Path, name: str) -> Any:
    recorded = folder / "chips.txt"
    text = (RECORDED / "910b3_24.1.txt").read_text()
    recorded.write_text(text.replace("910B3  ", f"{name:7}"))
    tools = {"npu-smi": f"cat {recorded}"}
    return probe(make_host(tools=tools, ASCEND_HOME_PATH="/cann")).devices[0]


# Source: torch_npu 2.13.0, is_support_inf_nan of each soc name
@pytest.mark.parametrize(
    ("name", "overflow"),
    [
        *((name, "saturates") for name in ("910A", "910B", "910ProB", "310P3", "310B4")),
        *((name, "inf") for name in ("910B1", "910B4-1", "910B2C")),
        ("999X1", ""),
    ],
)
def test_what_a_chip_gives_where_fp16_overflows(
    make_host: Any, tmp_path: Path, name: str, overflow: str
) -> None:
    assert _chip(make_host, tmp_path, name).overflow == overflow


def test_an_unknown_chip_gets_no_bf16_and_a_note(make_host: Any, tmp_path: Path) -> None:
    text = (RECORDED / "910b3_24.1.txt").read_text().replace("910B3", "999X1")
    recorded = tmp_path / "new.txt"
    recorded.write_text(text)
    report = probe(make_host(tools={"npu-smi": f"cat {recorded}"}, ASCEND_HOME_PATH="/cann"))
    assert [d.bf16 for d in report.devices] == [False, False]
    (note,) = report.notes
    assert "Ascend999X1" in note


def test_device_files_without_the_tool_are_counted(make_host: Any) -> None:
    names = ("davinci2", "davinci10", "davinci_manager", "vdavinci100")
    report = probe(make_host({f"dev/{name}": "" for name in names}, ASCEND_HOME_PATH="/cann"))
    assert [(d.index, d.bf16, d.fp16, d.overflow) for d in report.devices] == [
        (0, False, True, ""),
        (1, False, True, ""),
    ]
    (note,) = report.notes
    assert "npu-smi" in note


def test_fewer_device_files_than_chips_is_told(make_host: Any) -> None:
    host = make_host({"dev/davinci1": ""}, tools=smi("910b3_24.1"), ASCEND_HOME_PATH="/cann")
    (note,) = probe(host).notes
    assert re.findall(r"\b\d+\b", note) == ["2", "1"]


def test_the_drivers_own_version_file_wins_wherever_it_is_installed(make_host: Any) -> None:
    files = {
        "etc/ascend_install.info": "UserName=HwHiAiUser\nDriver_Install_Path_Param=/opt/Ascend\n",
        "opt/Ascend/driver/version.info": "Version=24.1.rc2.2\npackage_version=9.9\n",
    }
    assert probe(make_host(files, tools=smi("910b3_24.1"))).driver == "24.1.rc2.2"


def test_the_tool_is_found_outside_path(make_host: Any) -> None:
    host = make_host({"usr/local/sbin/npu-smi": f"#!/bin/sh\ncat '{RECORDED}/910b4_26.0.txt'\n"})
    (host.root / "usr/local/sbin/npu-smi").chmod(0o755)
    assert len(probe(host).devices) == 1


def test_no_ascend_is_silent(make_host: Any) -> None:
    report = Npu(make_host(), lambda _: False).probe()
    assert (report.devices, report.driver, report.notes) == ((), "", ())


def test_devices_without_torch_npu_are_told(make_host: Any) -> None:
    (note,) = Npu(make_host(tools=smi("910b3_24.1")), lambda _: False).probe().notes
    assert NOT_INSTALLED in note


def test_torch_npu_without_cann_is_told_unless_autoload_is_off(make_host: Any) -> None:
    (note,) = probe(make_host()).notes
    assert "set_env.sh" in note
    assert probe(make_host(TORCH_DEVICE_BACKEND_AUTOLOAD="0")).notes == ()
    assert probe(make_host(ASCEND_HOME_PATH="/cann")).notes == ()
