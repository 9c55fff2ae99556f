"""Moore Threads' probe on output of the documented format; none of it was recorded from a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fasttrain.hardware.runs import RunProcess
from fasttrain.hardware.vendors.musa import MIB, Musa, parse

COMPOSED = Path(__file__).parents[2] / "data" / "mthreads_gmi" / "8xs5000_2.4.txt"
SERVER = COMPOSED.read_text()
# The narrower layout of mthreads-gmi 1.14.
DESKTOP = """\
---------------------------------------------------------------
    mthreads-gmi:1.14.0          Driver Version:2.7.0
---------------------------------------------------------------
ID   Name           |PCIe                |%GPU  Mem
     Device Type    |Pcie Lane Width     |Temp  MPC Capable
                                         |      ECC Mode
+-------------------------------------------------------------+
0    MTT S80        |00000000:05:00.0    |7%    12MiB(16384MiB)
     Physical       |16x(16x)            |44C   YES
                                         |      N/A
+-------------------------------------------------------------+
1    MTT S80        |00000000:06:00.0    |0%    2MiB(16384MiB)
     Physical       |16x(16x)            |42C   YES
                                         |      N/A
---------------------------------------------------------------

---------------------------------------------------------------
Processes:
ID   PID       Process name                         GPU Memory
                                                         Usage
+-------------------------------------------------------------+
   No running processes found
---------------------------------------------------------------
"""


def printing(text: str, code: int = 0) -> dict[str, str]:
    """Return an mthreads-gmi that prints a text when it is called without arguments."""
    return {"mthreads-gmi": f"[ $# = 0 ] || exit 64\n/bin/cat <<'END'\n{text}END\nexit {code}"}


def probe(host: Any, *, there: bool = True, **options: Any) -> Any:
    return Musa(host, lambda _: there, **options)


def test_a_server_is_read(make_host: Any) -> None:
    report = probe(make_host(tools=printing(SERVER))).probe()
    assert [(d.index, d.name, d.memory_bytes // MIB) for d in report.devices] == [
        (index, "MTT S5000", 81920) for index in range(8)
    ]
    assert all(d.kind == "musa" and d.bf16 and d.fp16 and not d.tf32 for d in report.devices)
    assert (report.driver, report.notes) == ("5.1.0-server", ())


def test_the_states_of_a_server(make_host: Any) -> None:
    files = {"sys/bus/pci/devices/0000:65:00.0/numa_node": "1\n"}
    musa = probe(make_host(files, tools=printing(SERVER)))
    devices = musa.probe().devices
    states = musa.states(devices, {4_194_000: RunProcess("runs/a", orphan=True)})
    assert [state.index for state in states] == list(range(8))
    assert [state.temperature_c for state in states[:2]] == [41, 42]
    busy = states[3]
    assert (busy.memory_used_bytes, busy.numa_node) == (20_480 * MIB, 1)
    (process,) = busy.processes
    assert process.memory_bytes == 20_470 * MIB
    assert not any(state.processes for state in states if state is not busy)
    assert musa.states((), {}) == ()


def test_boards_without_bf16_and_without_mccl(make_host: Any) -> None:
    report = probe(make_host(tools=printing(DESKTOP))).probe()
    assert [(d.name, d.bf16, d.fp16) for d in report.devices] == [("MTT S80", False, True)] * 2
    (note,) = report.notes
    assert "MCCL" in note


def test_a_board_of_tomorrow_has_no_bf16_for_granted(make_host: Any) -> None:
    text = SERVER.replace("S5000 ", "S9000 ")
    report = probe(make_host(tools=printing(text))).probe()
    assert not any(device.bf16 for device in report.devices)
    (note,) = report.notes
    assert "MTT S9000" in note


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("Error: driver is not loaded\n", 1, "driver is not loaded"),
        ("", 0, "no output"),
        (SERVER[:600], 0, "cut off"),
        (SERVER[: SERVER.index("MTT S5000")], 0, "cut off"),
    ],
)
def test_a_broken_tool_leaves_a_note(make_host: Any, text: str, code: int, said: str) -> None:
    musa = probe(make_host(tools=printing(text, code)))
    report = musa.probe()
    assert (report.devices, report.driver) == ((), "")
    (note,) = report.notes
    assert said in note
    assert musa.states(report.devices, {}) == ()


def test_a_hanging_tool_is_cut_off(make_host: Any) -> None:
    host = make_host(tools={"mthreads-gmi": "exec /bin/sleep 5"})
    (note,) = probe(host, timeout_s=0.05).probe().notes
    assert "no answer" in note


def test_device_files_without_the_tool(make_host: Any) -> None:
    report = probe(make_host({"dev/mtgpu.0": "", "dev/mtgpu.1": ""})).probe()
    assert [(d.index, d.bf16) for d in report.devices] == [(0, False), (1, False)]
    assert len(report.notes) == 1


def test_a_missing_torch_musa_is_told(make_host: Any) -> None:
    (note,) = probe(make_host(tools=printing(SERVER)), there=False).probe().notes
    assert "torch_musa" in note


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(ValueError, match="not the table"):
        parse("+----+")
