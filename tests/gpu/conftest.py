"""Tests for a machine with a CUDA GPU: ``pytest -m gpu tests/gpu``.

With GPU_TESTS_DEVICE=cpu in the environment, those that mean something without a GPU run on the
CPU, to see that they can be executed at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import support.rig

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
NO_GPU = "needs a CUDA GPU: none is visible to torch"
NO_BF16 = "needs a GPU with native bf16, of compute capability 8.0 or later"


@pytest.fixture(scope="session", autouse=True)
def _cuda_is_up() -> Iterator[None]:
    """Start CUDA ahead of all tests, as torch sets an environment variable when it does."""
    with pytest.MonkeyPatch.context() as patch:
        # Asked for by cuBLAS before its first call, for equal bits in every run.
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if DEVICE == "cuda" and torch.cuda.is_available():
            torch.cuda.init()
        yield


@pytest.fixture
def device() -> str:
    """Return the device to test on."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    return DEVICE


@pytest.fixture
def cuda(device: str) -> Iterator[str]:
    """Provide CUDA to a test that means nothing elsewhere, with its memory empty."""
    if device != "cuda":
        pytest.skip(NO_GPU)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield device
    torch.cuda.empty_cache()


@pytest.fixture
def bf16(device: str) -> None:
    """Skip a test that asks for bf16 by name, which a run on an older GPU refuses."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip(NO_BF16)


@pytest.fixture
def rig(device: str) -> Any:
    """Install levers for the device."""
    return partial(support.rig.rig, device=device)


@pytest.fixture
def read_report() -> Any:
    return support.rig.read_report


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Let torch refuse kernels whose bits differ from run to run."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
