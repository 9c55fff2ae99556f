"""Moore Threads GPUs, by their device files and ``mthreads-gmi``.

Written from public sources and tested on output of the documented format; it never ran on a card.

Source: github.com/MooreThreads/torch_musa 2.7.1 (commit 8b583b3): README.md, and
docs/markdown/source/04_quick_start.md for the variables. Layout of the table: gpustack/gpustack,
docs/tutorials/running-inference-with-moorethreads-gpus.md (mthreads-gmi 1.14.0); vllm-project/
vllm-omni, pull request 2337 (2.3.2); PaddlePaddle/PaddleFleet, its guide for MUSA (2.4.1).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fasttrain.hardware.host import Host, Vendor, VendorReport
from fasttrain.hardware.runs import RunProcess, as_device_process
from fasttrain.hardware.tool import ToolError, first_line, run_tool
from fasttrain.hardware.vendors.kernel_files import numa_node, pci_folder
from fasttrain.model.machine import Device, DeviceProcess, DeviceState
from fasttrain.model.vendors import DeviceKind

TIMEOUT_S = 10.0
_ADDRESS = len("0000:18:00.0")  # the tool writes the domain with eight digits, the kernel with four
MIB = 2**20

# Native bf16 takes capability 2.2. Source: torch_musa 2.7.1, torch_musa/core/device.py,
# is_bf16_supported; v1.3.0, docker/common/daily/update_daily_math.sh: S80 and S3000 are mp_21,
# S4000 is mp_22. That the S5000, which is later, has it too is taken from its generation.
_BF16 = re.compile(r"MTT S(4000|5000)")
_NO_BF16 = re.compile(r"MTT S(10|30|50|70|80|1000|2000|3000)\w*")
# Source: torch_musa 2.7.1, README.md, "From Source": no MCCL for them.
_NO_MCCL = re.compile(r"MTT S(80|3000)\w*")

_VERSION = re.compile(r"mthreads-gmi:\s*\S+\s+Driver Version:\s*(\S+)")
# Two rows: index, name, bus and memory; then type, link and temperature.
_GPU = re.compile(
    r"^(\d+) +(\S[^|\n]*?) *\|([0-9A-Fa-f:.]+) *\|\d+% +(\d+)MiB\((\d+)MiB\) *\n"
    r"[^|\n]*\|[^|\n]*\|(\d+)C\b",
    re.MULTILINE,
)
_PROCESS = re.compile(r"^(\d+) +(\d+) +(\S.*?) +(\d+)MiB *$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One row of the table."""

    index: int
    name: str
    bus: str
    used_bytes: int
    memory_bytes: int
    temperature_c: int


@dataclass(frozen=True, slots=True)
class Table:
    """What the tool printed; processes are (GPU's index, pid, bytes, command)."""

    driver: str
    gpus: tuple[Gpu, ...]
    processes: tuple[tuple[int, int, int, str], ...] = ()


class Musa:
    """Moore Threads' probe; `installed` tells whether a package could be imported."""

    kind: ClassVar[DeviceKind] = "musa"

    def __init__(
        self, host: Host, installed: Callable[[str], bool], *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._host, self._installed, self._timeout_s = host, installed, timeout_s
        self._tool = host.which("mthreads-gmi", "usr/bin")

    @cached_property
    def _table(self) -> Table:
        text = run_tool([self._tool], timeout_s=self._timeout_s)
        try:
            return parse(text)
        except ValueError as error:
            raise ToolError(f"{self._tool}: {error} ({first_line(text) or 'no output'})") from error

    def probe(self) -> VendorReport:
        """Return GPUs by the tool's ids, which MUSA_VISIBLE_DEVICES is taken to count."""
        nodes = len(self._host.numbered("dev", r"mtgpu\.(\d+)"))
        devices: tuple[Device, ...] = ()
        notes: list[str] = []
        driver = ""
        if self._tool:
            try:
                devices, driver = _devices(self._table.gpus), self._table.driver
            except ToolError as error:
                notes.append(f"a Moore Threads driver is here, but its GPUs can't be used: {error}")
        elif nodes:
            devices = tuple(Device("musa", i, "Moore Threads GPU", fp16=True) for i in range(nodes))
            notes.append(
                f"{nodes} Moore Threads device files are here but no mthreads-gmi, so the boards' "
                "names are unknown and bf16 is not taken for granted"
            )
        return VendorReport(devices, driver, (*notes, *self._device_notes(devices)))

    def _device_notes(self, devices: tuple[Device, ...]) -> Iterable[str]:
        if devices and not self._installed("torch_musa"):
            yield "Moore Threads GPUs are here, but torch_musa is not installed"
        names = sorted({device.name for device in devices})
        for name in names:
            if (
                name.startswith("MTT")
                and not _BF16.fullmatch(name)
                and not _NO_BF16.fullmatch(name)
            ):
                yield f"{name} is unknown to fasttrain, so bf16 is not taken for granted"
            if len(devices) > 1 and _NO_MCCL.fullmatch(name):
                yield f"there is no MCCL for {name}, so several of them can't train one model"

    def states(
        self, devices: Iterable[Device], runs: Mapping[int, RunProcess]
    ) -> tuple[DeviceState, ...]:
        """Return how its GPUs are, by the answer that `probe` was given."""
        ours = {device.index: device for device in devices if device.kind == self.kind}
        if not ours or not self._tool:
            return ()
        return tuple(
            DeviceState(
                kind="musa",
                index=gpu.index,
                memory_used_bytes=gpu.used_bytes,
                processes=tuple(self._processes_on(gpu, runs)),
                temperature_c=float(gpu.temperature_c),
                numa_node=numa_node(self._host, pci_folder(gpu.bus[-_ADDRESS:])),
            )
            for gpu in self._table.gpus
            if gpu.index in ours
        )

    def _processes_on(self, gpu: Gpu, runs: Mapping[int, RunProcess]) -> Iterable[DeviceProcess]:
        for index, pid, held_bytes, command in self._table.processes:
            if index == gpu.index:
                yield as_device_process(pid, held_bytes, runs, command)


def vendor(host: Host, installed: Callable[[str], bool]) -> Vendor:
    """Return the probe."""
    return Musa(host, installed)


def parse(text: str) -> Table:
    """Read what ``mthreads-gmi`` printed.

    Raises:
        ValueError: The text is no such table, or it is cut off.
    """
    driver = _VERSION.search(text)
    if driver is None:
        raise ValueError("not the table of mthreads-gmi")
    table, _, below = text.partition("Processes:")
    gpus = tuple(
        Gpu(int(index), name, bus, int(used) * MIB, int(total) * MIB, int(celsius))
        for index, name, bus, used, total, celsius in _GPU.findall(table)
    )
    if not gpus or len(gpus) != len(re.findall(r"MiB\(\d", text)):
        raise ValueError("its rows are cut off or of an unknown layout")
    processes = tuple(
        (int(index), int(pid), int(held) * MIB, command)
        for index, pid, command, held in _PROCESS.findall(below)
    )
    return Table(driver[1], gpus, processes)


def _devices(gpus: tuple[Gpu, ...]) -> tuple[Device, ...]:
    return tuple(
        Device(
            kind="musa",
            index=gpu.index,
            name=gpu.name,
            memory_bytes=gpu.memory_bytes,
            bf16=bool(_BF16.fullmatch(gpu.name)),
            fp16=True,
        )
        for gpu in gpus
    )
