"""All probes together: never raising, never importing torch, quick."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, ClassVar

from fasttrain.hardware.host import VendorReport
from fasttrain.hardware.machine_file import NO_GPU, describe
from fasttrain.hardware.probe import probe_host, probe_machine, vendors
from fasttrain.model.codec import dumps, loads
from fasttrain.model.machine import Cpu, Device, Machine, Torch
from fasttrain.model.vendors import ACCELERATORS, DeviceKind


class Found:
    kind: ClassVar[DeviceKind] = "cuda"

    def __init__(self, driver: str, *names: str) -> None:
        self.report = VendorReport(
            tuple(Device("cuda", i, name) for i, name in enumerate(names)), driver, ("a note",)
        )

    def probe(self) -> VendorReport:
        return self.report


class Broken:
    kind: ClassVar[DeviceKind] = "xpu"

    def probe(self) -> VendorReport:
        raise ZeroDivisionError("of the probe's own")


def test_a_probe_that_fails_is_a_note_and_hides_no_other(make_host: Any) -> None:
    machine = probe_host(make_host(), (Broken(), Found("", "A"), Found("570", "B", "B")))
    assert [device.name for device in machine.devices] == ["A", "B", "B"]
    assert machine.driver == "570"
    assert machine.notes[:2] == ("a note", "a note")
    (failure,) = machine.notes[2:]
    assert "xpu" in failure
    assert "of the probe's own" in failure


def test_a_broken_processor_probe_still_gives_a_core(make_host: Any) -> None:
    machine = probe_host(make_host({"proc/meminfo": "MemTotal: unreadable kB"}), ())
    assert machine.cpu.cores == 1
    (note,) = machine.notes
    assert "cpu" in note


def test_an_empty_tree_has_no_devices_and_no_complaints(make_host: Any) -> None:
    host = make_host()
    machine = probe_host(host, vendors(host))
    assert (machine.devices, machine.driver, machine.notes) == ((), "", ())
    assert machine.cpu.cores == 8


def test_every_device_kind_but_the_processor_has_one_probe(make_host: Any) -> None:
    kinds = [vendor.kind for vendor in vendors(make_host())]
    assert kinds == list(ACCELERATORS)


def test_this_machine_survives_the_codec() -> None:
    machine = probe_machine(os.environ)
    assert machine.cpu.cores >= 1
    assert machine.cpu.memory_bytes > 0
    assert loads(Machine, dumps(machine)) == machine


def test_probing_imports_no_torch_and_starts_nothing_on_a_bare_machine() -> None:
    code = (
        "import sys, subprocess, dataclasses\n"
        "from fasttrain.hardware.probe import probe_host, vendors\n"
        "from fasttrain.hardware.host import Host\n"
        "from pathlib import Path\n"
        "def refuse(*a, **k): raise AssertionError('a process was started')\n"
        "subprocess.Popen = refuse\n"
        "host = Host({}, Path('/nowhere'), 'Linux', 'x86_64', 2)\n"
        "machine = probe_host(host, vendors(host))\n"
        "assert machine.notes == (), machine.notes\n"
        "assert machine.torch.version\n"
        "assert not {'torch', 'pynvml'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def machine_with(cores: int, *names: str) -> Machine:
    devices = tuple(Device("cuda", index, name) for index, name in enumerate(names))
    return Machine("h", "Linux", "3.11.0", Torch(), Cpu("cpu", cores, "r"), devices)


def test_devices_are_described_by_count_and_name() -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    assert describe(machine_with(2, *[h100] * 8)) == f"8 x {h100}"
    assert describe(machine_with(2, "A", "B", "A")) == "2 x A, 1 x B"


def test_a_machine_without_devices_is_described_by_its_cores() -> None:
    assert describe(machine_with(2)) == f"{NO_GPU}, 2 CPU cores"
    assert describe(machine_with(1)) == f"{NO_GPU}, 1 CPU core"
