"""The state of Intel's GPUs, from files as the kernel's documentation has them."""

from __future__ import annotations

import os
from typing import Any

import pytest

from fasttrain.hardware.runs import RunProcess
from fasttrain.hardware.vendors.xpu import Xpu, xpu_states
from fasttrain.model.machine import Device, DeviceProcess, DeviceState

MIB = 2**20
CARD = "sys/class/drm/card1"
HWMON = f"{CARD}/device/hwmon/hwmon4"
BOARD = {
    f"{CARD}/device/vendor": "0x8086\n",
    f"{CARD}/device/device": "0xe20b\n",
    f"{CARD}/device/numa_node": "1\n",
    f"{CARD}/device/uevent": "DRIVER=xe\nPCI_CLASS=30000\nPCI_SLOT_NAME=0000:03:00.0\n",
    "dev/dri/renderD128": "",
}
PID = os.getpid()


def fdinfo(client: int, region: str, *lines: str, address: str = "0000:03:00.0") -> str:
    head = ("pos:\t0", "drm-driver:\txe", f"drm-client-id:\t{client}", f"drm-pdev:\t{address}")
    return "\n".join((*head, f"drm-resident-{region}", *lines)) + "\n"


def only(host: Any, runs: Any = None) -> DeviceState:
    state: DeviceState
    (state,) = xpu_states(host, Xpu(host).probe().devices, runs or {})
    return state


def test_a_board_of_xe_is_told(make_host: Any) -> None:
    files = {
        f"{HWMON}/power1_max": "150000000\n",
        f"{HWMON}/power1_rated_max": "190000000\n",
        f"{HWMON}/temp2_input": "71500\n",
        f"{CARD}/device/tile0/gt0/freq0/throttle/reason_pl1": "1\n",
        f"{CARD}/device/tile0/gt1/freq0/throttle/reason_vr_thermalert": "1\n",
        f"{CARD}/device/tile0/gt1/freq0/throttle/reason_prochot": "0\n",
    }
    assert only(make_host({**BOARD, **files})) == DeviceState(
        kind="xpu",
        index=0,
        throttled=("power", "thermal"),
        power_limit_w=150.0,
        power_default_w=190.0,
        temperature_c=71.5,
        numa_node=1,
    )


def test_a_board_of_i915_is_told(make_host: Any) -> None:
    files = {
        f"{CARD}/device/hwmon/hwmon2/energy1_input": "5\n",  # of a GT, without limits
        f"{HWMON}/power1_max": "0\n",  # switched off
        f"{HWMON}/power1_rated_max": "190000000\n",
        f"{CARD}/gt/gt0/throttle_reason_prochot": "1\n",
        f"{CARD}/gt/gt0/throttle_reason_pl2": "0\n",
    }
    state = only(make_host({**BOARD, **files}))
    assert (state.throttled, state.power_limit_w, state.power_default_w) == (
        ("hardware",), None, 190.0,
    )  # fmt: skip


def test_a_kernel_that_tells_nothing_leaves_it_unknown(make_host: Any) -> None:
    files = {path: text for path, text in BOARD.items() if path.endswith(("vendor", "/device"))}
    host = make_host({**files, "dev/dri/renderD128": ""})
    assert only(host) == DeviceState("xpu", 0)


def test_processes_are_known_by_the_files_that_they_hold_open(make_host: Any) -> None:
    mine = fdinfo(7, "vram0:\t1 MiB", "drm-cycles-ccs:\t99", "drm-resident-gtt:\t512 MiB")
    files = {
        f"proc/{PID}/fdinfo/0": "pos:\t0\nflags:\t02\n",
        f"proc/{PID}/fdinfo/3": mine,
        f"proc/{PID}/fdinfo/4": mine,  # the same client by another file
        f"proc/{PID}/fdinfo/5": fdinfo(8, "vram0:\t2048 KiB"),
        f"proc/{PID}/fdinfo/6": fdinfo(8, "vram0:\t64 MiB", address="0000:04:00.0"),
    }
    state = only(make_host({**BOARD, **files}), {PID: RunProcess("/runs/a", orphan=True)})
    (process,) = state.processes
    assert (process.pid, process.memory_bytes, process.run) == (PID, 3 * MIB, "/runs/a")
    assert (process.orphan, process.display) == (True, False)


@pytest.mark.parametrize(
    ("lines", "display"),
    [
        (("drm-cycles-rcs:\t5", "drm-cycles-ccs:\t0"), True),
        (("drm-engine-render:\t5 ns", "drm-engine-compute:\t0 ns"), True),
        (("drm-engine-render:\t5 ns", "drm-engine-compute:\t7 ns"), False),
    ],
)
def test_who_never_computed_draws(make_host: Any, lines: Any, display: bool) -> None:
    files = {f"proc/{PID}/fdinfo/9": fdinfo(1, "local0:\t4096", *lines)}
    process: DeviceProcess
    (process,) = only(make_host({**BOARD, **files})).processes
    assert (process.memory_bytes, process.display) == (4096, display)


def test_who_holds_none_of_its_memory_is_not_told(make_host: Any) -> None:
    files = {f"proc/{PID}/fdinfo/9": fdinfo(1, "vram0:\t0", "drm-resident-system:\t9 MiB")}
    assert only(make_host({**BOARD, **files})).processes == ()


def test_other_gpus_than_those_probed_are_not_guessed(make_host: Any) -> None:
    two = [Device("xpu", index, "a GPU") for index in range(2)]
    assert xpu_states(make_host(BOARD), two, {}) == ()
    assert xpu_states(make_host(BOARD), [Device("cuda", 0, "a GPU")], {}) == ()
