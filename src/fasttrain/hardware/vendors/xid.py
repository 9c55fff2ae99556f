"""NVIDIA's Xid errors, as the kernel logged them since it was booted."""

from __future__ import annotations

import re

from fasttrain.hardware.host import Host
from fasttrain.hardware.tool import ToolError, run_tool

DMESG_TIMEOUT_S = 1.0

# Source: NVIDIA, "Xid Errors", r570: "NVRM: Xid (PCI:0000:03:00): 79, ..."; older drivers leave
# the "PCI:" out.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-f:]+)(?:\.0)?\): (\d+)", re.IGNORECASE)


def read_xids(host: Host) -> dict[str, tuple[int, ...]]:
    """Give the numbers logged for each PCI address, such as ``0000:c1:00``, each once.

    Only the kernel's own buffer is read, since files below /var/log hold errors of boots long
    past. It is closed to users on many machines; nothing is known of any Xid there.
    """
    tool = host.which("dmesg", "usr/bin", "bin")
    try:
        log = run_tool([tool], timeout_s=DMESG_TIMEOUT_S) if tool else ""
    except ToolError:
        log = ""
    return parse_xids(log)


def parse_xids(log: str) -> dict[str, tuple[int, ...]]:
    """Give the Xids in a kernel log by PCI address, in the order of their first appearance."""
    found: dict[str, dict[int, None]] = {}
    for address, number in _XID.findall(log):
        found.setdefault(address.lower(), {})[int(number)] = None
    return {address: tuple(numbers) for address, numbers in found.items()}
