"""Examines this machine for the checks of ``fasttrain doctor``."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from fasttrain.hardware.cluster import find_cluster
from fasttrain.hardware.host import Host, Vendor, VendorReport
from fasttrain.hardware.host_state import host_state
from fasttrain.hardware.probe import probe_host, vendors
from fasttrain.hardware.runs import RunProcess, find_run_processes
from fasttrain.hardware.tool import attempt, within
from fasttrain.hardware.vendors.cuda import Cuda
from fasttrain.model.machine import (
    Cluster,
    Device,
    DeviceState,
    Examination,
    HostState,
    Interpreter,
    Machine,
)
from fasttrain.model.secrets import MASK, mask_value
from fasttrain.model.vendors import VENDORS, DeviceKind

# Without persistence mode the driver has to start every board, which takes seconds each.
NVML_TIMEOUT_S = 30.0

_ENV_OPTION = "FASTTRAIN_ENV"  # NAME=VALUE words, split as a shell would

_PREFIXES = (
    *("FASTTRAIN_", "GOMP_", "KMP_", "MKL_", "OMP_", "PYTORCH_", "SLURM_", "TORCH", "XLA_"),
    *(prefix for vendor in VENDORS.values() for prefix in vendor.prefixes),
)
_NAMES = frozenset(
    {"CXX", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "TMPDIR", "WORLD_SIZE"}
)


@dataclass(frozen=True, slots=True)
class _Patient:
    """NVIDIA's probe with a time limit: a driver that hangs blocks every caller for ever."""

    cuda: Cuda
    timeout_s: float
    kind: ClassVar[DeviceKind] = "cuda"

    def probe(self) -> VendorReport:
        try:
            return within(self.timeout_s, self.cuda.probe)
        except TimeoutError as error:
            note = f"an NVIDIA driver is here, but hangs: {error}; restart the machine"
            return VendorReport(notes=(note,))

    def states(
        self, devices: Iterable[Device], runs: Mapping[int, RunProcess]
    ) -> tuple[DeviceState, ...]:
        return within(self.timeout_s, lambda: self.cuda.states(devices, runs))


def examine(
    environ: Mapping[str, str], *, run_root: Path, other: Interpreter | None = None
) -> Examination:
    """Return this machine and its state, without starting torch; never raise.

    What could not be examined is a sentence in the machine's notes.

    Args:
        environ: The environment that a run would start in.
        run_root: The folder of run directories.
        other: The Python that runs scripts, if it isn't this one.
    """
    return examine_host(Host(environ), run_root=run_root, other=other)


def examine_host(
    host: Host,
    *,
    run_root: Path,
    nvml: Any = None,
    nvml_timeout_s: float = NVML_TIMEOUT_S,
    other: Interpreter | None = None,
) -> Examination:
    """Return the examination of `host`; in tests `nvml` replaces the ``pynvml`` module."""
    notes: list[str] = []
    none: dict[int, RunProcess] = {}
    runs = attempt("processes", lambda: find_run_processes(run_root), none, notes)
    patient = _Patient(Cuda(host, nvml), nvml_timeout_s)
    found = vendors(host, other)
    probes = tuple(patient if vendor.kind == patient.kind else vendor for vendor in found)
    machine = probe_host(host, probes, other)
    devices = tuple(_device_states(probes, machine, runs, notes))
    state = attempt(
        "the host", lambda: host_state(host, run_root=run_root, runs=runs), HostState(), notes
    )
    cluster = attempt("SLURM", lambda: find_cluster(host), Cluster(), notes)
    return Examination(
        machine=replace(machine, notes=(*machine.notes, *notes)),
        devices=devices,
        host=state,
        environ=relevant(host.environ),
        cluster=cluster,
    )


def _device_states(
    probes: tuple[Vendor, ...],
    machine: Machine,
    runs: Mapping[int, RunProcess],
    notes: list[str],
) -> Iterator[DeviceState]:
    """Yield the devices' states, in the order of the machine's devices."""
    none: tuple[DeviceState, ...] = ()
    for vendor in probes:
        row = VENDORS[vendor.kind]
        what = f"the state of {row.maker}'s {row.noun}s"
        yield from attempt(what, partial(vendor.states, machine.devices, runs), none, notes)


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect training, sorted by name, with secrets as ``***``."""
    return {
        name: _masked(name, environ[name])
        for name in sorted(environ)
        if name.startswith(_PREFIXES) or name in _NAMES
    }


def _masked(name: str, value: str) -> str:
    return _masked_words(value) if name == _ENV_OPTION else mask_value(name, value)


def _masked_words(text: str) -> str:
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError:  # an unclosed quote: the end of a secret is unknown
        return MASK
    return shlex.join(f"{name}{sign}{_masked(name, value)}" for name, sign, value in pairs)
