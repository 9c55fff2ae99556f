"""Checks of environment variables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fasttrain.doctor.checks.environment import ONE_OF_SEVERAL
from fasttrain.doctor.diagnosis import diagnose
from fasttrain.model.machine import Torch
from support.examinations import H100, NPU, container, fires, node, quiet, verify

OLD_TORCH = {"torch": Torch("2.1.2+cu121", "cuda", "12.1")}
TORCH_2_2 = {"torch": Torch("2.2.0+cu121", "cuda", "12.1")}
XPU = replace(H100, kind="xpu", name="Intel Max 1550")
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"


def env(count: int = 8, **environ: str) -> Any:
    return node(count, environ=environ)


def cpu(**environ: str) -> Any:
    return container(environ=environ)


def cuda(value: str, **parts: Any) -> Any:
    return node(environ={"CUDA_VISIBLE_DEVICES": value}, **parts)


def ascend(value: str) -> Any:
    return node(device=NPU, environ={"ASCEND_RT_VISIBLE_DEVICES": value})


CASES = [
    fires("visible-ascending", "error", "ASCEND_RT_VISIBLE_DEVICES=1,0", ascend("1,0")),
    fires("visible-ascending", "error", "=0,0", ascend("0,0")),
    fires("visible-ascending", "error", "=1, 2", ascend("1, 2")),
    quiet("visible-ascending", ascend("0,2,3")),
    quiet("visible-ascending", ascend("")),
    quiet("visible-ascending", cuda("1,0")),
    fires("visible-repeated", "error", "CUDA_VISIBLE_DEVICES=0,1,0", cuda("0,1,0")),
    quiet("visible-repeated", cuda("0,1")),
    quiet("visible-repeated", ascend("0,0")),
    fires("visible-unknown", "warning", "CUDA_VISIBLE_DEVICES … 8", cuda("0,8,1")),
    fires("visible-unknown", "error", "CUDA_VISIBLE_DEVICES … GPU-f00", cuda("GPU-f00")),
    fires("visible-unknown", "warning", "ASCEND_RT_VISIBLE_DEVICES … 8", ascend("1,3,8")),
    quiet("visible-unknown", cuda("0,GPU-1")),
    quiet("visible-unknown", ascend("9,1")),
    quiet("visible-unknown", cuda("-1")),
    quiet("visible-unknown", cuda("0,0")),
    fires("visible-hidden", "warning", "CUDA_VISIBLE_DEVICES … 8 GPUs", cuda("")),
    fires("visible-hidden", "warning", "CUDA_VISIBLE_DEVICES … 8 GPUs", cuda("-1")),
    fires("visible-hidden", "hint", "CUDA_VISIBLE_DEVICES=0,2 … 6 … 8 GPUs", cuda("0,2")),
    quiet("visible-hidden", cuda("0,1,2,3,4,5,6,7")),
    quiet("visible-hidden", cuda("0,2", cluster={"job": "7"})),
    quiet("visible-hidden", cuda("0,9")),
    quiet("visible-hidden", ascend("1,0")),
    quiet("visible-hidden", cuda("MIG-1", devices={1: {"uuid": "MIG-1", "parent_uuid": "GPU-1"}})),
    quiet("visible-hidden", cpu(CUDA_VISIBLE_DEVICES="")),
    fires("thread-count", "warning", "OMP_NUM_THREADS … 64 … 4 cores", cpu(OMP_NUM_THREADS="64")),
    fires("thread-count", "warning", "MKL_NUM_THREADS … 8", cpu(MKL_NUM_THREADS="8")),
    quiet("thread-count", cpu(OMP_NUM_THREADS="4,64")),
    quiet("thread-count", cpu(OMP_NUM_THREADS="many")),
    fires(
        "thread-binding",
        "warning",
        "OMP_PROC_BIND=close … 2 devices",
        env(2, OMP_PROC_BIND="close"),
    ),
    fires(
        "thread-binding",
        "warning",
        "GOMP_CPU_AFFINITY=0-3 … KMP_AFFINITY=compact",
        env(GOMP_CPU_AFFINITY="0-3", KMP_AFFINITY="compact"),
    ),
    quiet("thread-binding", env(OMP_PROC_BIND="FALSE", KMP_AFFINITY="disabled")),
    quiet("thread-binding", env(1, OMP_PROC_BIND="close")),
    fires("blocking-launches", "warning", "CUDA_LAUNCH_BLOCKING=1", env(CUDA_LAUNCH_BLOCKING="1")),
    fires(
        "blocking-launches",
        "warning",
        "ASCEND_LAUNCH_BLOCKING=1",
        node(device=NPU, environ={"ASCEND_LAUNCH_BLOCKING": "1"}),
    ),
    quiet("blocking-launches", node(device=XPU, environ={"CUDA_LAUNCH_BLOCKING": "1"})),
    quiet("blocking-launches", env(CUDA_LAUNCH_BLOCKING="0")),
    quiet("blocking-launches", cpu(CUDA_LAUNCH_BLOCKING="1")),
    fires("memory-caching", "warning", NO_CACHING, node(environ={NO_CACHING: "0"})),
    quiet("memory-caching", container(environ={NO_CACHING: "1"})),
    quiet("memory-caching", node()),
    fires(
        "allocator-settings",
        "warning",
        "PYTORCH_CUDA_ALLOC_CONF … PYTORCH_ALLOC_CONF",
        env(PYTORCH_CUDA_ALLOC_CONF="a:1", PYTORCH_ALLOC_CONF="b:1"),
    ),
    quiet("allocator-settings", env(PYTORCH_CUDA_ALLOC_CONF="a:1", PYTORCH_ALLOC_CONF="a:1")),
    quiet("allocator-settings", env(PYTORCH_CUDA_ALLOC_CONF="a:1")),
    quiet("allocator-settings", env(PYTORCH_ALLOC_CONF="a:1")),
    quiet("allocator-settings", cpu(PYTORCH_CUDA_ALLOC_CONF="a:1", PYTORCH_ALLOC_CONF="b:1")),
    fires(
        "renamed-variables",
        "hint",
        "NCCL_BLOCKING_WAIT",
        env(NCCL_BLOCKING_WAIT="1"),
    ),
    quiet("renamed-variables", node(machine=OLD_TORCH, environ={"NCCL_BLOCKING_WAIT": "1"})),
    fires(
        "renamed-variables",
        "hint",
        "NCCL_BLOCKING_WAIT … NCCL_DESYNC_DEBUG",
        node(machine=TORCH_2_2, environ={"NCCL_BLOCKING_WAIT": "1", "NCCL_DESYNC_DEBUG": "1"}),
    ),
    quiet("renamed-variables", env(TORCH_NCCL_BLOCKING_WAIT="1", NCCL_DEBUG="INFO")),
    fires("stray-ranks", "warning", "RANK=0 … WORLD_SIZE=8", env(RANK="0", WORLD_SIZE="8")),
    fires("stray-ranks", "hint", "MASTER_ADDR=10.0.0.1", env(MASTER_ADDR="10.0.0.1")),
    quiet("stray-ranks", env(RANK="0", TORCHELASTIC_RUN_ID="none")),
    quiet("stray-ranks", env(RANK="0", FASTTRAIN_RUN_ID="r1")),
    quiet("stray-ranks", env(SLURM_PROCID="0")),
    fires("compile-disabled", "warning", "TORCHDYNAMO_DISABLE=1", env(TORCHDYNAMO_DISABLE="1")),
    fires("compile-disabled", "warning", "TORCH_COMPILE_DISABLE=1", env(TORCH_COMPILE_DISABLE="1")),
    quiet("compile-disabled", env(TORCHDYNAMO_DISABLE="true", TORCH_COMPILE_DISABLE="0")),
    fires("nccl-switches", "warning", "NCCL_P2P_DISABLE=1", env(2, NCCL_P2P_DISABLE="1")),
    fires("nccl-switches", "hint", "NCCL_IB_DISABLE=1", env(NCCL_IB_DISABLE="1")),
    quiet("nccl-switches", env(NCCL_P2P_DISABLE="0")),
    quiet("nccl-switches", env(1, NCCL_P2P_DISABLE="1")),
    fires(
        "distributed-debug",
        "hint",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL",
        env(TORCH_DISTRIBUTED_DEBUG="DETAIL"),
    ),
    quiet("distributed-debug", env(TORCH_DISTRIBUTED_DEBUG="INFO")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.slug)
def test_a_check_of_the_environment(case: Any) -> None:
    verify(case)


@pytest.mark.parametrize(
    ("slug", "seen", "fix"),
    [
        ("visible-ascending", ascend("3, 1,1"), "export ASCEND_RT_VISIBLE_DEVICES=1,3"),
        ("visible-ascending", ascend("npu0"), "export ASCEND_RT_VISIBLE_DEVICES=0"),
        ("visible-repeated", cuda("2,0,2"), "export CUDA_VISIBLE_DEVICES=2,0"),
        ("visible-unknown", cuda("1,0,8,2"), "export CUDA_VISIBLE_DEVICES=1,0"),
        ("visible-unknown", cuda("8"), "unset CUDA_VISIBLE_DEVICES"),
        ("stray-ranks", env(RANK="0", MASTER_PORT="29500"), "unset RANK MASTER_PORT"),
        ("renamed-variables", env(NCCL_DESYNC_DEBUG="1"), "TORCH_NCCL_DESYNC_DEBUG"),
    ],
)
def test_the_fix_can_be_typed(slug: str, seen: Any, fix: str) -> None:
    (finding,) = diagnose(seen, only=[slug])
    assert finding.fix.removeprefix("write ") == fix


def test_a_rocm_device_has_variables_of_its_own() -> None:
    rocm = replace(H100, kind="rocm", name="AMD Instinct MI300X")
    seen = node(device=rocm, environ={"HIP_VISIBLE_DEVICES": "0,0", "AMD_SERIALIZE_KERNEL": "3"})
    found = diagnose(seen, only=["visible-repeated", "blocking-launches"])
    assert [finding.check for finding in found] == ["visible-repeated", "blocking-launches"]


def test_the_reason_says_what_is_left() -> None:
    (unknown,) = diagnose(cuda("0,8"), only=["visible-unknown"])
    assert "1 of 8 GPUs" in unknown.why
    (nothing,) = diagnose(cuda(""), only=["visible-hidden"])
    assert "CPU" in nothing.why
    (some,) = diagnose(cuda("1"), only=["visible-hidden"])
    assert "CPU" not in some.why


def test_the_reason_tells_a_rank_from_a_meeting_place() -> None:
    reasons = [
        diagnose(env(**{name: "1"}), only=["stray-ranks"])[0].why
        for name in ("RANK", "MASTER_PORT")
    ]
    assert [reason == ONE_OF_SEVERAL for reason in reasons] == [True, False]
