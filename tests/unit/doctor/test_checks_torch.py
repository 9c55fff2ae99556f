"""Checks of torch: its build, what it sees, and what was tried with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fasttrain.doctor.checks.torch_install import REINSTALL, UNREADABLE
from fasttrain.doctor.diagnosis import diagnose
from fasttrain.hardware.probe import TORCH_UNREAD
from fasttrain.model.machine import Torch, Trial
from support.examinations import H100, NPU, container, fires, node, quiet, verify

CPU_BUILD = Torch("2.13.0+cpu", "cpu")
FAILED_IMPORT = Trial("failed", 1.0, "ImportError: libcudnn.so.9: cannot open shared object file")
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)."
MPS = replace(H100, kind="mps", name="Apple M3 Max")
MI300 = replace(H100, kind="rocm", name="AMD Instinct MI300X")
ROCM_BUILD = {"torch": Torch("2.13.0+rocm6.4", "rocm", "6.4")}
APU = replace(H100, kind="rocm", name="AMD Radeon 780M", uuid="", capability="")


def gpus(capability: str, **trial: Any) -> Any:
    return node(1, device=replace(H100, capability=capability), trial=trial)


def tried(**trial: Any) -> Any:
    return node(trial=trial)


def with_torch(version: str, **parts: Any) -> Any:
    return node(machine={"torch": Torch(version, "cuda", "11.7")}, **parts)


def compiled(state: str, message: str = "", **machine: Any) -> Any:
    return container(trial={"compiled": Trial(state, 20.0, message)}, machine=machine)


NO_TORCH = {"torch": Torch()}
NO_MODULE = Trial("failed", 0.1, "No module named 'torch'")
NOT_INSTALLED = node(machine=NO_TORCH, trial={"imported": NO_MODULE})

CASES = [
    fires("torch-missing", "error", "Python 3.11.9", NOT_INSTALLED),
    quiet("torch-missing", container()),
    quiet("torch-missing", node(machine=NO_TORCH)),  # it was imported all the same
    quiet(
        "torch-missing",
        replace(
            node(machine={"torch": Torch(), "notes": (f"{TORCH_UNREAD}: OSError: …",)}),
            torch=None,
        ),
    ),
    fires("torch-build", "error", "2.13.0+cpu … H100", node(machine={"torch": CPU_BUILD})),
    fires("torch-build", "warning", "AMD Radeon 780M", container(machine={"devices": (APU,)})),
    fires("torch-build", "hint", "AMD Radeon 780M", node(machine={"devices": (H100, APU)})),
    quiet("torch-build", container()),
    fires(
        "torch-extension",
        "error",
        "libhccl.so",
        node(device=NPU, trial={"autoload_error": "ImportError: libhccl.so"}),
    ),
    quiet("torch-extension", node(device=NPU)),
    fires("torch-devices", "error", "6 … 8 GPUs", tried(device_counts={"cuda": 6})),
    fires(
        "torch-devices",
        "error",
        "0 … 8 GPUs … The NVIDIA driver",
        tried(device_counts={}, init_error=TOO_OLD),
    ),
    fires(
        "torch-devices",
        "error",
        "GPUs … Error 802",
        tried(init_error="Error 802: system not yet initialized"),
    ),
    fires("torch-devices", "error", "0 … 8 NPUs", node(device=NPU, trial={"device_counts": {}})),
    quiet("torch-devices", node()),
    quiet("torch-devices", node(device=MI300, machine=ROCM_BUILD)),
    quiet(
        "torch-devices",
        node(device=NPU, trial={"device_counts": {}, "autoload_error": "libhccl.so"}),
    ),
    quiet(
        "torch-devices",
        node(environ={"CUDA_VISIBLE_DEVICES": "4,5"}, trial={"device_counts": {"cuda": 2}}),
    ),
    quiet(
        "torch-devices",
        node(
            environ={"CUDA_VISIBLE_DEVICES": ""},
            trial={"device_counts": {"cuda": 0}, "init_error": "No CUDA GPUs are available"},
        ),
    ),
    quiet("torch-devices", node(machine={"torch": CPU_BUILD}, trial={"device_counts": {}})),
    quiet(
        "torch-devices", container(trial={"init_error": "Found no NVIDIA driver on your system"})
    ),
    fires("torch-architecture", "error", "GPU 0", gpus("6.1")),
    fires("torch-architecture", "error", "GPU 0", gpus("12.0", architectures=("sm_80", "sm_90"))),
    fires("torch-architecture", "error", "GPU 0", gpus("8.0", architectures=("sm_86",))),
    fires(
        "torch-architecture", "error", "GPU 0", gpus("10.0", architectures=("sm_90", "compute_90a"))
    ),
    quiet("torch-architecture", gpus("8.9", architectures=("sm_80", "sm_90"))),  # as 8.0, one major
    quiet("torch-architecture", gpus("12.0", architectures=("sm_80", "compute_90"))),  # from PTX
    quiet("torch-architecture", gpus("9.0", architectures=("sm_90a",))),
    quiet("torch-architecture", gpus("6.1", architectures=())),
    quiet("torch-architecture", gpus("")),
    quiet(
        "torch-architecture",
        node(machine={"torch": CPU_BUILD}, device=replace(H100, capability="6.1")),
    ),
    quiet("torch-architecture", gpus("6.1", architectures=("gfx942",))),
    fires("collectives", "error", "nccl", tried(backends=("gloo",))),
    fires("collectives", "error", "hccl", node(device=NPU, trial={"backends": ("gloo",)})),
    quiet("collectives", node(1, trial={"backends": ("gloo",)})),
    quiet("collectives", tried(backends=())),
    fires("collectives", "error", "nccl", node(2, trial={"backends": ("gloo",)})),
    quiet("collectives", node(2, device=MPS, trial={"backends": ("gloo",)})),
    quiet("collectives", node(machine={"torch": CPU_BUILD}, trial={"backends": ("gloo",)})),
    quiet(
        "collectives",
        node(device=NPU, trial={"backends": ("gloo",), "autoload_error": "libhccl.so"}),
    ),
    quiet("collectives", node()),
    fires("cudnn-v8", "hint", "TORCH_CUDNN_V8_API_ENABLED", with_torch("1.13.1")),
    quiet("cudnn-v8", with_torch("1.13.1", environ={"TORCH_CUDNN_V8_API_ENABLED": "1"})),
    quiet("cudnn-v8", with_torch("2.0.0")),
    quiet("cudnn-v8", with_torch("1.13.1", device=replace(H100, bf16=False))),
    fires(
        "torch-import",
        "error",
        "`import torch` … ImportError: libcudnn",
        tried(imported=FAILED_IMPORT),
    ),
    fires("torch-import", "error", "`import torch` … 20 s", tried(imported=Trial("hung", 20.0))),
    fires(
        "torch-import",
        "error",
        "`import torch` … SIGSEGV",
        tried(imported=Trial("crashed", 1.0, "SIGSEGV")),
    ),
    fires("torch-import", "error", UNREADABLE, tried(imported=Trial("unreadable", 1.0))),
    fires(
        "torch-import",
        "error",
        "No module named 'numpy'",
        node(machine=NO_TORCH, trial={"imported": Trial("failed", 0.1, "No module named 'numpy'")}),
    ),
    quiet("torch-import", NOT_INSTALLED),
    quiet("torch-import", tried(imported=Trial())),
    quiet("torch-import", replace(node(), torch=None)),
    fires(
        "compile-trial",
        "warning",
        "torch.compile … Python.h",
        compiled("failed", "Python.h: No such file or directory"),
    ),
    fires("compile-trial", "warning", "torch.compile … 20 s", compiled("hung")),
    fires(
        "compile-trial",
        "warning",
        "No space left",
        compiled("failed", "No space left", cxx_compiler=""),
    ),
    quiet("compile-trial", compiled("not tried")),
    quiet(
        "compile-trial",
        compiled("failed", "InvalidCxxCompiler: No working C++ compiler found", cxx_compiler=""),
    ),
    fires(
        "all-reduce-trial",
        "error",
        "Connection refused",
        tried(all_reduced=Trial("failed", 3.0, "Connection refused")),
    ),
    fires(
        "all-reduce-trial",
        "warning",
        "15 s",
        container(trial={"all_reduced": Trial("hung", 15.0)}),
    ),
    fires(
        "all-reduce-trial",
        "warning",
        "15 s",
        node(1, trial={"all_reduced": Trial("hung", 15.0)}),
    ),
    quiet("all-reduce-trial", node()),
    fires("triton", "warning", "triton", tried(triton="")),
    fires(
        "triton", "warning", "triton", node(device=MI300, machine=ROCM_BUILD, trial={"triton": ""})
    ),
    fires("triton", "hint", "triton-ascend", node(device=NPU, machine={"torch": CPU_BUILD})),
    quiet(
        "triton",
        node(device=NPU, machine={"torch": Torch("2.13.0+cpu", "cpu", triton_ascend="3.2.0")}),
    ),
    quiet("triton", container()),
    quiet("triton", container(machine={"torch": Torch("2.13.0+cu128", "cuda", "12.8")})),
    quiet("triton", node(machine={"torch": CPU_BUILD}, trial={"triton": ""})),
    fires("triton-capability", "hint", "GPU 0", gpus("6.1")),
    quiet("triton-capability", gpus("7.0")),
    quiet("triton-capability", gpus("10.0")),
    fires("cxx-compiler", "hint", "g++", container(machine={"cxx_compiler": ""})),
    fires(
        "cxx-compiler",
        "hint",
        "clang++",
        container(machine={"cxx_compiler": "", "system": "Darwin"}),
    ),
    fires(
        "cxx-compiler",
        "warning",
        "CXX=ccache g++",
        container(machine={"cxx_compiler": ""}, environ={"CXX": "ccache g++"}),
    ),
    quiet("cxx-compiler", container(environ={"CXX": "clang++"})),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.slug)
def test_a_check_of_torch(case: Any) -> None:
    verify(case)


@pytest.mark.parametrize(
    ("slug", "seen", "fix"),
    [
        ("compile-trial", compiled("failed", "Python.h: No such file"), "python3.11-dev"),
        ("compile-trial", compiled("failed", "Compiler: g++-7 is not found."), "CXX"),
        ("compile-trial", compiled("failed", "Cannot find a working triton"), "triton"),
        ("compile-trial", compiled("failed", "failed to map segment"), "TORCHINDUCTOR_CACHE_DIR"),
        ("compile-trial", compiled("failed", "RuntimeError: {'a': 1}"), "TORCH_LOGS"),
        ("torch-import", tried(imported=FAILED_IMPORT), REINSTALL),
        ("torch-import", tried(imported=Trial("hung", 20.0)), "nvidia-smi"),
        ("torch-import", container(trial={"imported": Trial("hung", 20.0)}), "python -c"),
        ("torch-import", tried(imported=Trial("crashed", 1.0)), "python -c"),
        ("torch-devices", tried(init_error=TOO_OLD), "older CUDA"),
        ("torch-devices", tried(init_error="Error 802: …"), "nvidia-fabricmanager"),
        ("torch-devices", node(device=NPU, trial={"device_counts": {}}), "torch_npu"),
    ],
)
def test_the_message_decides_the_fix(slug: str, seen: Any, fix: str) -> None:
    (finding,) = diagnose(seen, only=[slug])
    assert fix in finding.fix
    assert "{" not in finding.fix
