"""The state of Ascend's chips, from recorded tables of `npu-smi info` and broken ones."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from fasttrain.hardware.runs import RunProcess
from fasttrain.hardware.vendors.npu import NpuSmi, npu_states, parse_states
from fasttrain.model.machine import Device

RECORDED = Path(__file__).parents[2] / "data" / "npu_smi"
MIB = 2**20

# Read off the recorded tables by eye: NPU, chip on the card, health, bus, MiB in use.
CHIPS = {
    "910b3_24.1": [(0, 0, "OK", "0000:C1:00.0", 3525), (1, 0, "OK", "0000:01:00.0", 29356)],
    "910b4_26.0": [(2, 0, "OK", "0000:C1:00.0", 2871)],
    "910a_24.1": [(0, 0, "OK", "0000:C1:00.0", 18), (1, 0, "OK", "0000:81:00.0", 4)],
    "310p3_25.2": [(2, 0, "OK", "0000:01:00.0", 1529), (2, 1, "OK", "0000:01:00.0", 1412)],
    "a3_25.5": [
        (0, 0, "OK", "0000:9D:00.0", 3416),
        (0, 1, "OK", "0000:9F:00.0", 3195),
        (1, 0, "Warning", "0000:99:00.0", 3415),
        (1, 1, "OK", "0000:9B:00.0", 3195),
    ],
    "950_a5": [(0, 0, "OK", "NA", 1024), (3, 0, "Alarm", "NA", 2048)],
}
PROCESSES = {
    "910b3_24.1": [(1, 0, 632268, "python", 25890)],
    "910b4_26.0": [(2, 0, 485946, "pytest", 5175)],
    "950_a5": [(0, 0, 1001, "python", 256)],
}


def npus(count: int) -> list[Device]:
    return [Device("npu", index, "Ascend910B3") for index in range(count)]


def recorded(name: str, code: int = 0) -> dict[str, str]:
    """Return an npu-smi that prints a recorded file, and only for the sub-command `info`."""
    return {"npu-smi": f'[ "$*" = info ] || exit 64\ncat "{RECORDED / name}.txt"; exit {code}'}


@pytest.mark.parametrize("layout", CHIPS)
def test_every_recorded_layout_is_read(layout: str) -> None:
    chips, processes = parse_states((RECORDED / f"{layout}.txt").read_text())
    assert [(c.npu, c.chip, c.health, c.bus, (c.used_bytes or 0) // MIB) for c in chips] == CHIPS[
        layout
    ]
    assert [
        (p.npu, p.chip, p.pid, p.command, p.memory_bytes // MIB) for p in processes
    ] == PROCESSES.get(layout, [])


def test_every_recorded_table_is_tested() -> None:
    assert {path.stem for path in RECORDED.glob("*.txt")} == {*CHIPS, "fail_dcmi"}


def test_states_follow_the_devices(make_host: Any) -> None:
    files = {"sys/bus/pci/devices/0000:01:00.0/numa_node": "3\n"}
    files["sys/bus/pci/devices/0000:c1:00.0/numa_node"] = "-1\n"  # the firmware names none
    first, second = npu_states(make_host(files, tools=recorded("910b3_24.1")), npus(2), {})
    assert (first.kind, first.index, first.memory_used_bytes) == ("npu", 0, 3525 * MIB)
    assert (first.health, first.numa_node, first.processes) == ("OK", None, ())
    assert (second.index, second.memory_used_bytes, second.numa_node) == (1, 29356 * MIB, 3)
    (process,) = second.processes
    assert process.memory_bytes == 25890 * MIB


def test_ill_health_is_told(make_host: Any) -> None:
    states = npu_states(make_host(tools=recorded("a3_25.5")), npus(4), {})
    assert [state.health for state in states] == ["OK", "OK", "Warning", "OK"]


def test_processes_go_to_their_chip_and_their_run(make_host: Any, tmp_path: Path) -> None:
    text = (RECORDED / "310p3_25.2.txt").read_text()
    row = f"| 2       1                 | {os.getpid()} | other   | 12 |"
    table = tmp_path / "table.txt"
    table.write_text(text.replace("| No running", f"{row}\n| No running"))
    runs = {os.getpid(): RunProcess("/runs/a", orphan=False)}
    tools = {"npu-smi": f"cat {table}"}
    first, second = npu_states(make_host(tools=tools), npus(2), runs)
    assert first.processes == ()
    (process,) = second.processes
    assert (process.pid, process.memory_bytes, process.run) == (os.getpid(), 12 * MIB, "/runs/a")
    assert "python" in process.command


def test_in_a_container_its_own_number_counts() -> None:
    text = (RECORDED / "910b4_26.0.txt").read_text()
    _, (process,) = parse_states(text.replace("| NA                      |", "| 77 |"))
    assert process.pid == 77


@pytest.mark.parametrize(
    "tools",
    [
        {},
        {"npu-smi": "echo 'dcmi module initialize failed. ret is -8005'; exit 1"},
        recorded("fail_dcmi", 1),
        recorded("910b3_24.1", 1),
        {"npu-smi": "head -c 200 /dev/urandom"},
        {"npu-smi": "true"},
        recorded("910b4_26.0"),  # one chip, where the probe saw two
    ],
)
def test_a_tool_that_does_not_tell_gives_no_states(make_host: Any, tools: dict[str, str]) -> None:
    assert npu_states(make_host(tools=tools), npus(2), {}) == ()


def test_a_hanging_tool_is_cut_off(make_host: Any) -> None:
    started_s = time.monotonic()
    host = make_host(tools={"npu-smi": "exec sleep 60"})
    assert npu_states(host, npus(2), {}, NpuSmi(host, timeout_s=0.1)) == ()
    assert time.monotonic() - started_s < 30


def test_without_npus_nothing_is_started(make_host: Any, tmp_path: Path) -> None:
    host = make_host(tools={"npu-smi": f"touch {tmp_path}/started"})
    assert npu_states(host, [Device("cuda", 0, "a GPU")], {}) == ()
    assert not (tmp_path / "started").exists()


def test_a_row_without_figures_is_refused() -> None:
    text = (RECORDED / "910b3_24.1.txt").read_text()
    with pytest.raises(ValueError, match=r"NPU .0 +910B3"):
        parse_states(text.replace("0    / 0          3525", "-"))


def test_a_chip_without_memory_of_its_own_tells_none() -> None:
    text = (RECORDED / "910b3_24.1.txt").read_text()
    chips, _ = parse_states(text.replace("3525 / 65536", "0    / 0    "))
    assert [chip.used_bytes for chip in chips] == [None, 29356 * MIB]
