"""The access of all probes to this machine: its files, environment and tools."""

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
from fasttrain.model.machine import Device, DeviceState
from fasttrain.model.vendors import DeviceKind

SYSCTL_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class VendorReport:
    """The result of one vendor's probe; `notes` are sentences for the user."""

    devices: tuple[Device, ...] = ()
    driver: str = ""
    notes: tuple[str, ...] = ()


class Vendor(Protocol):
    """One family of accelerators."""

    kind: ClassVar[DeviceKind]

    def probe(self) -> VendorReport:
        """Return this vendor's devices without starting their runtime, which can take seconds."""

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
    """The machine that the probes read; in tests `root` holds a recorded tree of files.

    Attributes:
        environ: The user's environment.
        root: The folder that stands for ``/``.
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
        """Return the text of a file relative to the root; empty if it can't be read."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return ""

    def exists(self, path: str) -> bool:
        """True if a path relative to the root exists."""
        return (self.root / path).exists()

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, ``mlx5_2`` before ``mlx5_10``; empty if it is closed."""
        try:
            names = [entry.name for entry in (self.root / folder).iterdir()]
        except OSError:
            return []
        return sorted(names, key=lambda name: (len(name), name))

    def number(self, path: str) -> int | None:
        """Return the number that a file holds; None if it is absent or holds something else."""
        text = self.read(path).strip()
        return int(text) if text.isdecimal() else None

    def counted(self, path: str, name: str) -> int | None:
        """Return the number after `name` in a file of lines such as ``MemTotal: 65536 kB``."""
        for line in self.read(path).splitlines():
            words = line.split()
            if words[:1] == [name] and words[1:] and words[1].isdecimal():
                return int(words[1])
        return None

    def numbered(self, folder: str, pattern: str) -> list[str]:
        """Return the paths in a folder that match `pattern`, sorted by the number in its group."""
        found = [match for name in self.names(folder) if (match := re.fullmatch(pattern, name))]
        return [f"{folder}/{match[0]}" for match in sorted(found, key=lambda m: int(m[1]))]

    def which(self, tool: str, *extra: str) -> str:
        """Return the path of a tool on PATH or in `extra` folders of the root; empty if absent."""
        folders = [self.environ.get("PATH", os.defpath), *(str(self.root / item) for item in extra)]
        return shutil.which(tool, path=os.pathsep.join(folders)) or ""

    def sysctl(self, *names: str) -> dict[str, str]:
        """Return macOS kernel variables by name; unknown ones are left out.

        Raises:
            ToolError: If ``sysctl`` is missing, fails or hangs.
        """
        tool = self.which("sysctl", "usr/sbin") or "sysctl"
        lines = run_tool([tool, "-i", *names], timeout_s=SYSCTL_TIMEOUT_S).splitlines()
        return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
