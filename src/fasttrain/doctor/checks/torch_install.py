"""Checks of the torch that is installed: its build, and what it makes of the devices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from fasttrain.doctor.checks.words import check, is_on, named, one_line, present, visible
from fasttrain.hardware.probe import TORCH_UNREAD
from fasttrain.model.examination import Examination, Finding, Severity, TorchTrial
from fasttrain.model.machine import Device
from fasttrain.model.vendors import VENDORS, DeviceKind
from fasttrain.planning.describe import device_names, kind_noun
from fasttrain.planning.device import build_fix, unusable_kinds, wrong_build

# Source: CUDA Runtime API 12.8, cudaError: 802 cudaErrorSystemNotReady, 803
# cudaErrorSystemDriverMismatch, 804 cudaErrorCompatNotSupportedOnDevice.
_INIT_FIXES = (
    ("driver.* is too old", "update the driver, or install a torch built for an older CUDA"),
    ("Error 802", "start the service nvidia-fabricmanager, which GPUs behind NVSwitch wait for"),
    ("Error 80[34]", "restart the machine, or take CUDA's compat folder out of LD_LIBRARY_PATH"),
)

_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)(a?)f?")


def answered(seen: Examination) -> TorchTrial | None:
    """Return what torch said of itself; None where it was not asked or could not be imported."""
    return seen.torch if seen.torch and seen.torch.imported.state == "ok" else None


@check("torch-missing", "whether torch is installed")
def _missing(seen: Examination) -> Iterator[Finding]:
    unread = any(note.startswith(TORCH_UNREAD) for note in seen.machine.notes)
    if seen.machine.torch.version or answered(seen) or unread:
        return
    yield _missing.finding(
        "error",
        f"torch is not installed for Python {seen.machine.python}",
        why="a training script can't import it",
        fix="install the build that pytorch.org/get-started names for this machine",
    )


@check("torch-build", "whether torch was built for the devices that are here")
def _build(seen: Examination) -> Iterator[Finding]:
    machine = seen.machine
    others = any(not wrong_build(machine, kind) for kind in present(seen))
    for kind in unusable_kinds(machine):
        # An AMD GPU may be a part of the processor, which nobody means to train on.
        alone: Severity = "error" if kind == "cuda" else "warning"
        devices = device_names(device for device in machine.devices if device.kind == kind)
        yield _build.finding(
            "hint" if others else alone,
            f"torch {machine.torch.version} is the {machine.torch.build} build, and can't use "
            f"{devices}",
            why="scripts that name the device fail (Torch not compiled with CUDA enabled), others "
            "train without it",
            fix=build_fix(kind),
        )


@check("torch-extension", "whether torch can load the extension for its devices")
def _extension(seen: Examination) -> Iterator[Finding]:
    if seen.torch and (error := seen.torch.autoload_error):
        extended = [vendor for vendor in VENDORS.values() if vendor.extension]
        vendor = next((v for v in extended if v.extension in error), extended[0])
        needs, mend = vendor.extension_needs
        yield _extension.finding(
            "error",
            f"`import torch` fails: {one_line(error)}",
            why=f"torch loads {vendor.extension} by itself, which needs {needs}",
            fix=f"{mend}, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to do without",
        )


@check("torch-devices", "whether torch sees every device that the driver lists")
def _devices(seen: Examination) -> Iterator[Finding]:
    trial = answered(seen)
    for kind in (kind for kind in present(seen) if VENDORS[kind].counted):
        if trial is None or trial.autoload_error or wrong_build(seen.machine, kind):
            continue
        expected = len(visible(seen, kind))
        found = trial.device_counts.get(VENDORS[kind].torch_type, 0)
        if not expected or (found >= expected and not trial.init_error):
            continue
        what = f"torch sees {found} of {kind_noun(kind, expected)}"
        why = f"the driver lists more than torch {trial.version} can use"
        if found >= expected:
            what = f"torch can't start the {VENDORS[kind].noun}s"
            why = "a run fails when it first uses one"
        said = f": {one_line(trial.init_error)}" if trial.init_error else ""
        fix = _init_fix(kind, trial.init_error)
        yield _devices.finding("error", what + said, why=why, fix=fix)


def _init_fix(kind: DeviceKind, message: str) -> str:
    if extension := VENDORS[kind].extension:
        _, mend = VENDORS[kind].extension_needs
        return f"install the {extension} that belongs to this torch, and {mend}"
    found = (fix for pattern, fix in _INIT_FIXES if re.search(pattern, message, re.DOTALL))
    return next(found, 'see the whole message: python -c "import torch; torch.cuda.init()"')


@check("torch-architecture", "whether torch holds kernels for these GPUs")
def _architecture(seen: Examination) -> Iterator[Finding]:
    trial = answered(seen)
    if trial is None or seen.machine.torch.build != "cuda":
        return
    built = [found for name in trial.architectures if (found := _ARCHITECTURE.fullmatch(name))]
    slots = visible(seen, "cuda") if built else ()
    lacking = [slot.device for slot in slots if not _runs(slot.device, built)]
    if lacking:
        yield _architecture.finding(
            "error",
            f"torch {trial.version} has no kernels for {named(lacking)} ({device_names(lacking)})",
            why=f"of compute capability {lacking[0].capability}; it was built for "
            f"{', '.join(trial.architectures)}",
            fix="install a build of torch for it, older or newer, from pytorch.org/get-started",
        )


def _runs(device: Device, built: Iterable[re.Match[str]]) -> bool:
    """Return whether any of the kernels runs: one of its own major version, or PTX of any before.

    Source: torch 2.13.0, torch/cuda/__init__.py, ``_check_cubins``; CUDA C++ Programming Guide
    12.8, "Binary Compatibility" and "PTX Compatibility"; ``sm_90a`` runs on 9.0 alone.
    """
    major, _, minor = device.capability.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        return True
    own = (int(major), int(minor))
    for form, built_major, built_minor, exact in (match.groups() for match in built):
        made_for = (int(built_major), int(built_minor))
        near = made_for <= own and (form == "compute" or made_for[0] == own[0])
        if made_for == own or (near and not exact):
            return True
    return False


@check("collectives", "whether torch has the library that joins several devices")
def _collectives(seen: Examination) -> Iterator[Finding]:
    trial = answered(seen)
    for kind in present(seen):
        backend = VENDORS[kind].collectives
        if trial is None or not trial.backends or not backend or backend in trial.backends:
            continue
        if wrong_build(seen.machine, kind) or trial.autoload_error or len(visible(seen, kind)) < 2:
            continue
        yield _collectives.finding(
            "error",
            f"torch {trial.version} has no {backend}",
            why=f"ranks on {kind_noun(kind, len(visible(seen, kind)))} average their gradients by "
            "it",
            fix="install a build of torch that has it, from pytorch.org/get-started",
        )


@check("cudnn-v8", "whether old torch can run bf16 convolutions")
def _cudnn_v8(seen: Examination) -> Iterator[Finding]:
    capable = [slot.device for slot in visible(seen, "cuda") if slot.device.bf16]
    old = (0, 0) < seen.machine.torch.release <= (1, 13)
    if capable and old and not is_on(seen, "TORCH_CUDNN_V8_API_ENABLED"):
        yield _cudnn_v8.finding(
            "hint",
            "TORCH_CUDNN_V8_API_ENABLED is not set",
            why=f"up to torch 1.13 bf16 convolutions need it on {named(capable)}",
            fix="fasttrain run sets it; for python alone: export TORCH_CUDNN_V8_API_ENABLED=1",
        )


CHECKS = (
    _missing,
    _build,
    _extension,
    _devices,
    _architecture,
    _collectives,
    _cudnn_v8,
)
