"""Checks of what was tried: importing torch, compiling a function, a sum over two processes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fasttrain.doctor.checks.torch_install import answered
from fasttrain.doctor.checks.words import check, most_visible, named, one_line, present, visible
from fasttrain.model.examination import Examination, Finding, Trial
from fasttrain.model.vendors import VENDORS
from fasttrain.planning.device import wrong_build

_Fixes = tuple[tuple[str, str], ...]

REINSTALL = "install torch again with its dependencies"
UNREADABLE = "answers with something unreadable"

_IMPORT_FIXES: _Fixes = (
    (r"lib\S+\.so", f"{REINSTALL}; a library of it is missing"),
    (r"No module named", REINSTALL),
)

_NO_COMPILER = r"No working C\+\+ compiler|InvalidCxxCompiler|Compiler: .* is not found"

# Source: torch 2.13.0, torch/_inductor/exc.py; pytorch#97146 and #129351 for Python.h.
_COMPILE_FIXES: _Fixes = (
    (r"Python\.h", "install Python's headers: apt-get install python{python}-dev"),
    (_NO_COMPILER, "install g++: apt-get install g++, or name another compiler by CXX"),
    ("Failed to find C compiler", "install gcc: apt-get install gcc, or name another one by CC"),
    ("TritonMissing|working triton|named 'triton'", "install the triton that this torch names"),
    (
        r"-lcuda|libcuda\.so",
        "put the folder of libcuda.so into LIBRARY_PATH, where the linker looks",
    ),
    (
        "Permission denied|Read-only file system|failed to map segment|No space left",
        "set TORCHINDUCTOR_CACHE_DIR to a folder that may be written to and run from",
    ),
)

_REDUCE_FIXES: _Fixes = (
    ("shared memory|dev/shm", "see that /dev/shm has room"),
    (r"resolve|Name or service|getaddrinfo", "give this machine's own name an address"),
)


@check("torch-import", "whether torch can be imported and asked")
def _imported(seen: Examination) -> Iterator[Finding]:
    trial = seen.torch.imported if seen.torch else Trial()
    missing = not seen.machine.torch.version and "No module named 'torch'" in trial.message
    if not _went_wrong(trial) or missing:  # which has a check of its own
        return
    hung = trial.state == "hung" and seen.machine.devices
    otherwise = 'see the whole message: python -c "import torch"'
    if hung:
        otherwise = "see what the driver says (dmesg, nvidia-smi), and restart the machine"
    yield _imported.finding(
        "error",
        _became("`import torch`", trial),
        why="initialising the devices hangs in the driver" if hung else "every run meets the same",
        fix=_fix_for(trial.message, _IMPORT_FIXES, otherwise),
    )


@check("compile-trial", "whether torch.compile can compile a small function")
def _compiled(seen: Examination) -> Iterator[Finding]:
    trial = seen.torch.compiled if seen.torch else Trial()
    no_compiler = not seen.machine.cxx_compiler and re.search(_NO_COMPILER, trial.message)
    if not _went_wrong(trial) or no_compiler:  # which has a check of its own
        return
    python = ".".join(seen.machine.python.split(".")[:2])
    otherwise = "see the whole message with TORCH_LOGS=+inductor, or leave --compile off"
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
            "see that the loopback interface is up and no firewall closes it (ip addr show lo); "
            "NCCL_DEBUG=INFO tells more of NCCL",
        ),
    )


@check("triton", "whether triton is there to compile for the devices")
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
            fix="install torch again with its dependencies; `pip show torch` names triton",
        )
    torch = seen.machine.torch
    for vendor in (VENDORS[kind] for kind in present(seen)):
        if vendor.compiles_by and torch.version and not torch.triton_ascend:
            yield _triton.finding(
                "hint",
                f"{vendor.compiles_by} is not installed",
                why=f"torch.compile writes the kernels of {vendor.noun}s by it, and --compile is"
                " refused there",
                fix=f"pip install {vendor.compiles_by}, or leave --compile off",
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
            fix="leave --compile off there",
        )


@check("cxx-compiler", "whether there is the C++ compiler that torch.compile calls")
def _cxx_compiler(seen: Examination) -> Iterator[Finding]:
    if seen.machine.cxx_compiler:
        return
    why = "torch.compile builds its CPU code with it; a model would run uncompiled"
    usual, package = "g++", "apt-get install g++"
    if seen.machine.system == "Darwin":
        usual, package = "clang++", "xcode-select --install"
    if chosen := seen.environ.get("CXX"):
        fix = f"set CXX to one program, without options, or unset it to take {usual}"
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


CHECKS = (_imported, _compiled, _all_reduced, _triton, _capability, _cxx_compiler)
