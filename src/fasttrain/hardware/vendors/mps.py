"""The GPU of Apple silicon, read from kernel variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fasttrain.hardware.host import Host, Vendor, VendorReport
from fasttrain.hardware.runs import RunProcess
from fasttrain.model.machine import Device, DeviceState
from fasttrain.model.vendors import DeviceKind

# Metal emulates bf16 in fp32 on these. Source: huggingface/transformers pull request 40458.
_EMULATES_BF16 = re.compile(r"Apple M[12]\b")


@dataclass(frozen=True, slots=True)
class Mps:
    """Apple's probe."""

    host: Host
    kind: ClassVar[DeviceKind] = "mps"

    def probe(self) -> VendorReport:
        """Return the one GPU; its memory is the machine's, shared with the processor."""
        if (self.host.system, self.host.architecture) != ("Darwin", "arm64"):
            return VendorReport()
        values = self.host.sysctl("machdep.cpu.brand_string", "hw.memsize")
        chip = values.get("machdep.cpu.brand_string", "Apple GPU")
        device = Device(
            kind="mps",
            index=0,
            name=chip,
            memory_bytes=int(values.get("hw.memsize", 0)),
            bf16=chip.startswith("Apple M") and not _EMULATES_BF16.match(chip),
            fp16=True,
        )
        return VendorReport((device,))

    def states(
        self, _devices: Iterable[Device], _runs: Mapping[int, RunProcess]
    ) -> tuple[DeviceState, ...]:
        """Return nothing: macOS reports no state of its GPU."""
        return ()


def vendor(host: Host, _installed: Callable[[str], bool]) -> Vendor:
    """Return the probe."""
    return Mps(host)
