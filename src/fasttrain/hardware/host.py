"""What every probe looks through: a file system, an environment, a system and its tools."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from fasttrain.hardware.runs import RunProcess
from fasttrain.hardware.tool import run_tool
from fasttrain.model.examination import DeviceState
from fasttrain.model.machine import Device
from fasttrain.model.vendors import DeviceKind

SYSCTL_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class VendorReport:
    """What one vendor's probe found; `notes` are sentences for the user."""

    devices: tuple[Device, ...] = ()
    driver: str = ""
    notes: tuple[str, ...] = ()


class Vendor(Protocol):
    """One family of accelerators."""

    kind: ClassVar[DeviceKind]

    def probe(self) -> VendorReport:
        """Return this vendor's devices, cheaply and without starting their runtime."""

    def states(
        self, devices: Iterable[Device], runs: Mapping[int, RunProcess]
    ) -> tuple[DeviceState, ...]:
        """Return how those of a machine's devices that are this vendor's are, in their order.

        Args:
            devices: All devices of the machine.
            runs: Processes of fasttrain's runs.
        """


def granted_cpus() -> int:
    """Return the number of logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Host:
    """The machine as the probes see it; tests put a recorded tree under `root`.

    Attributes:
        environ: The user's environment.
        root: Where ``/`` is.
        system: ``Linux``, ``Darwin`` or ``Windows``.
        architecture: ``x86_64``, ``aarch64``, ``arm64``, ...
        affinity: Logical CPUs that this process may run on.
    """

    environ: Mapping[str, str]
    root: Path = Path("/")
    system: str = field(default_factory=platform.system)
    architecture: str = field(default_factory=platform.machine)
    affinity: int = field(default_factory=granted_cpus)

    def read(self, path: str) -> str:
        """Return text of a file relative to the root; empty when it is absent or closed to us."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return ""

    def exists(self, path: str) -> bool:
        """Return whether a path relative to the root is there."""
        return (self.root / path).exists()

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, ``mlx5_2`` before ``mlx5_10``; none where it is closed."""
        try:
            names = [entry.name for entry in (self.root / folder).iterdir()]
        except OSError:
            return []
        return sorted(names, key=lambda name: (len(name), name))

    def number(self, path: str) -> int | None:
        """Return the number that a file holds; None when it is absent or holds something else."""
        text = self.read(path).strip()
        return int(text) if text.isdecimal() else None

    def numbered(self, folder: str, pattern: str) -> list[str]:
        """Return a folder's entries that match `pattern`, in the order of its one number group."""
        found = [match for name in self.names(folder) if (match := re.fullmatch(pattern, name))]
        return [f"{folder}/{match[0]}" for match in sorted(found, key=lambda m: int(m[1]))]

    def which(self, tool: str, *extra: str) -> str:
        """Return the path of a tool on PATH or in `extra` folders under the root; empty if none."""
        folders = [self.environ.get("PATH", os.defpath), *(str(self.root / item) for item in extra)]
        return shutil.which(tool, path=os.pathsep.join(folders)) or ""

    def sysctl(self, *names: str) -> dict[str, str]:
        """Return values of macOS kernel variables; those that this Mac doesn't know are left out.

        Raises:
            ToolError: ``sysctl`` is missing, fails or hangs.
        """
        tool = self.which("sysctl", "usr/sbin") or "sysctl"
        lines = run_tool([tool, "-i", *names], timeout_s=SYSCTL_TIMEOUT_S).splitlines()
        return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
