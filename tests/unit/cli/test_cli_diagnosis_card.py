"""The state of a device in the table of ``fasttrain doctor``."""

from __future__ import annotations

from typing import Any

import pytest

from fasttrain.cli.cards.diagnosis import device_rows
from fasttrain.model.machine import (
    Cpu,
    Device,
    DeviceProcess,
    DeviceState,
    Examination,
    Machine,
    Torch,
)

PYTHON = DeviceProcess(7, 2**30, "python")
XORG = DeviceProcess(8, 2**20, "Xorg", display=True)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "free"),
        ({"processes": (PYTHON, PYTHON)}, "2 processes"),
        ({"processes": (PYTHON, XORG)}, "1 process, display"),
        ({"processes": (XORG, XORG)}, "display"),
        ({"throttled": ("power",), "temperature_c": 60.0}, "throttled: power"),
        ({"throttled": ("thermal",)}, "throttled: thermal"),
        ({"throttled": ("thermal",), "temperature_c": 91.4}, "throttled: thermal (91 °C)"),
        ({"health": "Alarm", "temperature_c": 50.0}, "Alarm"),
    ],
)
def test_a_devices_state_in_a_few_words(fields: dict[str, Any], told: str) -> None:
    cpu = Cpu("a processor", 4, "all of them")
    machine = Machine("node", "Linux", "3.11.9", Torch(), cpu, (Device("cuda", 0, "a GPU"),))
    device, _ = device_rows(Examination(machine, (DeviceState("cuda", 0, **fields),)))
    assert device[-1] == told
