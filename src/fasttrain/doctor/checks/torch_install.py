"""Checks of the torch that is installed: its build, and whether it can use the devices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from fasttrain.doctor.check import check, is_on, most_visible, named, one_line, present, visible
from fasttrain.hardware.probe import TORCH_UNREAD
from fasttrain.model.machine import Device, Examination, Finding, Severity, TorchTrial, Trial
from fasttrain.model.vendors import VENDORS, DeviceKind
from fasttrain.planning.describe import device_names, kind_noun
from fasttrain.planning.gpus import build_fix, unusable_kinds, wrong_build

# Source: CUDA Runtime API 12.8, cudaError: 802 cudaErrorSystemNotReady, 803
# cudaErrorSystemDriverMismatch, 804 cudaErrorCompatNotSupportedOnDevice.
_INIT_FIXES = (
    ("driver.* is too old", "update the driver, or install a torch built for an older CUDA"),
    ("Error 802", "start the service nvidia-fabricmanager, which GPUs on an NVSwitch wait for"),
    ("Error 80[34]", "restart the machine, or remove CUDA's compat folder from LD_LIBRARY_PATH"),
)

_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)(a?)f?")


def answered(seen: Examination) -> TorchTrial | None:
    """Return torch's answers; None if it was not tried or could not be imported."""
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
        # An AMD GPU may be part of the processor, and not meant for training.
        alone: Severity = "error" if kind == "cuda" else "warning"
        devices = device_names(device for device in machine.devices if device.kind == kind)
        yield _build.finding(
            "hint" if others else alone,
            f"torch {machine.torch.version} is the {machine.torch.build} build, and can't use "
            f"{devices}",
            why="scripts that name the device fail (Torch not compiled with CUDA enabled), others "
            "train on the CPU",
            fix=build_fix(kind),
        )


@check("torch-extension", "whether torch can load the extension for its devices")
def _extension(seen: Examination) -> Iterator[Finding]:
    if seen.torch and (error := seen.torch.autoload_error):
        extended = [vendor for vendor in VENDORS.values() if vendor.extension]
        vendor = next((v for v in extended if v.extension in error), extended[0])
        needs, repair = vendor.extension_needs
        yield _extension.finding(
            "error",
            f"`import torch` fails: {one_line(error)}",
            why=f"torch loads {vendor.extension} automatically, and that needs {needs}",
            fix=f"{repair}, or train without {vendor.noun}s: TORCH_DEVICE_BACKEND_AUTOLOAD=0",
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
            what = f"torch can't initialise the {VENDORS[kind].noun}s"
            why = "a run fails at their first use"
        said = f": {one_line(trial.init_error)}" if trial.init_error else ""
        fix = _init_fix(kind, trial.init_error)
        yield _devices.finding("error", what + said, why=why, fix=fix)


def _init_fix(kind: DeviceKind, message: str) -> str:
    if extension := VENDORS[kind].extension:
        _, repair = VENDORS[kind].extension_needs
        return f"install the {extension} that matches this torch, and {repair}"
    found = (fix for pattern, fix in _INIT_FIXES if re.search(pattern, message, re.DOTALL))
    return next(found, 'see the whole message: python -c "import torch; torch.cuda.init()"')


@check("torch-architecture", "whether torch has kernels for these GPUs")
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
            fix="install an older or newer build of torch from pytorch.org/get-started",
        )


def _runs(device: Device, built: Iterable[re.Match[str]]) -> bool:
    """True if a device can run one of the kernels: of its major version, or older PTX.

    Source: torch 2.13.0, torch/cuda/__init__.py, ``_check_cubins``; CUDA C++ Programming Guide
    12.8, "Binary Compatibility" and "PTX Compatibility"; ``sm_90a`` runs on 9.0 only.
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


@check("collectives", "whether torch has the collectives of several devices")
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
            why=f"ranks on {kind_noun(kind, len(visible(seen, kind)))} average their gradients "
            "with it",
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


_INSTALL = (
    _missing,
    _build,
    _extension,
    _devices,
    _architecture,
    _collectives,
    _cudnn_v8,
)


# Checks of trials: importing torch, compiling a function, summing over two processes.


_Fixes = tuple[tuple[str, str], ...]

REINSTALL = "install torch again with its dependencies"
UNREADABLE = "answers with something unreadable"

_IMPORT_FIXES: _Fixes = (
    (r"lib\S+\.so", f"{REINSTALL}; one of its libraries is missing"),
    (r"No module named", REINSTALL),
)

_NO_COMPILER = r"No working C\+\+ compiler|InvalidCxxCompiler|Compiler: .* is not found"

# Source: torch 2.13.0, torch/_inductor/exc.py; pytorch#97146 and #129351 for Python.h.
_COMPILE_FIXES: _Fixes = (
    (r"Python\.h", "install Python's headers: apt-get install python{python}-dev"),
    (_NO_COMPILER, "install g++: apt-get install g++, or name another compiler in CXX"),
    ("Failed to find C compiler", "install gcc: apt-get install gcc, or name another one in CC"),
    ("TritonMissing|working triton|named 'triton'", "install the triton that this torch requires"),
    (
        r"-lcuda|libcuda\.so",
        "add the folder of libcuda.so to LIBRARY_PATH, where the linker looks",
    ),
    (
        "Permission denied|Read-only file system|failed to map segment|No space left",
        "set TORCHINDUCTOR_CACHE_DIR to a writable folder that is not mounted noexec",
    ),
)

_REDUCE_FIXES: _Fixes = (
    ("shared memory|dev/shm", "check that /dev/shm has free space"),
    (r"resolve|Name or service|getaddrinfo", "make this machine's own name resolve to an address"),
)


@check("torch-import", "whether torch can be imported and its devices listed")
def _imported(seen: Examination) -> Iterator[Finding]:
    trial = seen.torch.imported if seen.torch else Trial()
    missing = not seen.machine.torch.version and "No module named 'torch'" in trial.message
    if not _went_wrong(trial) or missing:  # torch-missing reports that
        return
    hung = trial.state == "hung" and seen.machine.devices
    otherwise = 'see the whole message: python -c "import torch"'
    if hung:
        otherwise = "look at the driver's messages (dmesg, nvidia-smi), and restart the machine"
    yield _imported.finding(
        "error",
        _became("`import torch`", trial),
        why="initialising the devices hangs in the driver" if hung else "every run fails there",
        fix=_fix_for(trial.message, _IMPORT_FIXES, otherwise),
    )


@check("compile-trial", "whether torch.compile can compile a small function")
def _compiled(seen: Examination) -> Iterator[Finding]:
    trial = seen.torch.compiled if seen.torch else Trial()
    no_compiler = not seen.machine.cxx_compiler and re.search(_NO_COMPILER, trial.message)
    if not _went_wrong(trial) or no_compiler:  # cxx-compiler reports that
        return
    python = ".".join(seen.machine.python.split(".")[:2])
    otherwise = "see the whole message with TORCH_LOGS=+inductor, or use --compile off"
    yield _compiled.finding(
        "warning",
        _became("torch.compile", trial),
        why="with --compile a model would run uncompiled",
        fix=_fix_for(trial.message, _COMPILE_FIXES, otherwise).format(python=python),
    )


@check("all-reduce-trial", "whether two processes of this machine can sum a tensor")
def _all_reduced(seen: Examination) -> Iterator[Finding]:
    trial = seen.torch.all_reduced if seen.torch else Trial()
    if not _went_wrong(trial):
        return
    yield _all_reduced.finding(
        "error" if most_visible(seen) > 1 else "warning",
        _became("a sum over two processes", trial),
        why="a run of several processes averages its gradients this way",
        fix=_fix_for(
            trial.message,
            _REDUCE_FIXES,
            "check that the loopback interface is up and no firewall blocks it (ip addr show lo); "
            "NCCL_DEBUG=INFO shows more about NCCL",
        ),
    )


@check("triton", "whether triton is installed for the devices")
def _triton(seen: Examination) -> Iterator[Finding]:
    trial = answered(seen)
    for kind in present(seen):
        usable = VENDORS[kind].torch_type == "cuda" and not wrong_build(seen.machine, kind)
        if trial is None or trial.triton or not usable:
            continue
        yield _triton.finding(
            "warning",
            "triton is not installed",
            why="torch.compile writes its GPU kernels in triton",
            fix="install torch again with its dependencies; `pip show torch` lists triton",
        )
    torch = seen.machine.torch
    for vendor in (VENDORS[kind] for kind in present(seen)):
        if vendor.compiles_by and torch.version and not torch.triton_ascend:
            yield _triton.finding(
                "hint",
                f"{vendor.compiles_by} is not installed",
                why=f"torch.compile needs it for kernels of {vendor.noun}s, and without it"
                " nothing is compiled",
                fix=f"pip install {vendor.compiles_by}, or use --compile off",
            )


@check("triton-capability", "whether the GPUs are new enough for triton")
def _capability(seen: Examination) -> Iterator[Finding]:
    # Source: torch 2.13.0, torch/_inductor/exc.py, GPUTooOldForTriton: "CUDA Capability >= 7.0".
    old = [
        slot.device
        for slot in visible(seen, "cuda")
        if slot.device.capability.partition(".")[0] in {"1", "2", "3", "5", "6"}
    ]
    if old:
        yield _capability.finding(
            "hint",
            f"torch.compile can't compile for {named(old)} ({old[0].name})",
            why=f"triton needs compute capability 7.0; this has {old[0].capability}",
            fix="use --compile off on it",
        )


@check("cxx-compiler", "whether torch.compile's C++ compiler is installed")
def _cxx_compiler(seen: Examination) -> Iterator[Finding]:
    if seen.machine.cxx_compiler:
        return
    why = "torch.compile builds its CPU code with it; without it a model runs uncompiled"
    usual, package = "g++", "apt-get install g++"
    if seen.machine.system == "Darwin":
        usual, package = "clang++", "xcode-select --install"
    if chosen := seen.environ.get("CXX"):
        fix = f"set CXX to one program, without options, or unset it to use {usual}"
        yield _cxx_compiler.finding("warning", f"CXX={chosen} names no program", why=why, fix=fix)
    else:
        fix = f"install it: {package}"
        yield _cxx_compiler.finding("hint", f"there is no {usual}", why=why, fix=fix)


def _went_wrong(trial: Trial) -> bool:
    return trial.state not in ("ok", "not tried")


def _became(what: str, trial: Trial) -> str:
    said = f": {one_line(trial.message)}" if trial.message else ""
    if trial.state == "hung":
        return f"{what} gave no answer in {trial.took_s:.0f} s"
    verb = {"crashed": "crashes", "unreadable": UNREADABLE}
    return f"{what} {verb.get(trial.state, 'fails')}{said}"


def _fix_for(message: str, fixes: _Fixes, otherwise: str) -> str:
    return next((fix for pattern, fix in fixes if re.search(pattern, message)), otherwise)


_TRIALS = (_imported, _compiled, _all_reduced, _triton, _capability, _cxx_compiler)

CHECKS = (*_INSTALL, *_TRIALS)
