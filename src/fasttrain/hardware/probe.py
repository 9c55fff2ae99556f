"""All probes together: this machine in one value."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TypeVar

from fasttrain.hardware.cpu import find_cxx_compiler, probe_cpu
from fasttrain.hardware.host import Host, Vendor, VendorReport
from fasttrain.hardware.interpreter import Locate, torch_of
from fasttrain.hardware.torch_install import find_torch
from fasttrain.model.machine import Cpu, Interpreter, Machine, Torch
from fasttrain.model.vendors import ACCELERATORS

T = TypeVar("T")

PROBE_FAILED = "probe failed"
TORCH_UNREAD = f"the torch {PROBE_FAILED}"


def vendors(host: Host, other: Interpreter | None = None) -> tuple[Vendor, ...]:
    """Give every vendor's probe, in the order in which devices are listed."""
    modules = (import_module(f"fasttrain.hardware.vendors.{kind}") for kind in ACCELERATORS)
    return tuple(module.vendor(host, finds(other)) for module in modules)


def finds(other: Interpreter | None) -> Callable[[str], bool]:
    """Return whether a package is there for another Python, or for this one."""
    there = Locate(other) if other else find_spec
    return lambda package: there(package) is not None


def probe_machine(environ: Mapping[str, str], other: Interpreter | None = None) -> Machine:
    """Return this machine as the user's environment shows it; never raises, never imports torch.

    What a probe could not find out is one sentence in the machine's notes.

    Args:
        environ: The user's environment.
        other: The Python that runs the script, where it isn't this one.
    """
    host = Host(environ)
    return probe_host(host, vendors(host, other), other)


def probe_host(host: Host, probes: tuple[Vendor, ...], other: Interpreter | None = None) -> Machine:
    """Return the machine that `host` shows to `probes`."""
    notes: list[str] = []
    reports = [_attempt(vendor.kind, vendor.probe, VendorReport(), notes) for vendor in probes]
    unknown_cpu = Cpu(host.architecture, 1, "the processor could not be probed")
    return Machine(
        hostname=platform.node(),
        system=host.system,
        python=other.version if other else platform.python_version(),
        torch=_attempt("torch", lambda: torch_of(other) if other else find_torch(), Torch(), notes),
        cpu=_attempt("cpu", lambda: probe_cpu(host), unknown_cpu, notes),
        devices=tuple(device for report in reports for device in report.devices),
        cxx_compiler=find_cxx_compiler(host.environ, system=host.system),
        driver=next((report.driver for report in reports if report.driver), ""),
        notes=(*(note for report in reports for note in report.notes), *notes),
    )


def _attempt(what: str, probe: Callable[[], T], fallback: T, notes: list[str]) -> T:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - a plan is wanted on a broken machine too
        notes.append(f"the {what} {PROBE_FAILED}: {type(error).__name__}: {error}")
        return fallback
