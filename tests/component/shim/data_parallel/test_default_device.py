"""What the worker makes for itself is on the CPU, whatever device the script makes tensors on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.utils.data import TensorDataset

from fasttrain.shim.data_parallel.loading import lever as loading
from fasttrain.shim.data_parallel.loading.transport import packed, unpacked
from fasttrain.shim.data_parallel.random_streams import on_cpu
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.replica import average_gradients
from fasttrain.shim.data_parallel.split.surroundings import (
    generator_state,
    put_generator_state,
)
from fasttrain.shim.data_parallel.split.trial import _pulled_back
from fasttrain.shim.snapshots import files
from support.fake_ranks import on_ranks
from support.run_ahead import OnCpu, OnDevice


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    """Have tensors made by default where they have no numbers."""
    with torch.device("meta"):
        yield


def test_numbers_that_ranks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        assert Ranks(0, 1, None, "gloo").sum_numbers([1.0, 2.0]) == [1.0, 2.0]
    finally:
        dist.destroy_process_group()


def test_states_of_generators() -> None:
    generator = torch.Generator()
    state = generator_state(generator)
    generator.manual_seed(3)
    put_generator_state(generator, state)
    assert generator_state(generator) == state
    torchs = on_cpu()[0]
    torchs.set(torchs.decoded(torchs.encoded()))


def test_gradients_of_a_trial() -> None:
    of = torch.ones(3, device="cpu", requires_grad=True)
    (gradient,) = _pulled_back([of * 2], [of])
    assert gradient is not None
    assert gradient.is_cpu


def test_samples_of_a_dataset() -> None:
    data = TensorDataset(torch.arange(6.0, device="cpu"))
    (found,) = loading._fetch(lambda _: pytest.fail("by one"), data.tensors, [], [1, -1])
    assert found.tolist() == [1.0, 5.0]


def test_tensors_that_another_rank_has_read() -> None:
    sent = [torch.arange(6.0, device="cpu"), torch.empty(0, device="cpu")]
    descriptor = packed(sent)
    try:
        found = unpacked(descriptor)
    finally:
        os.close(descriptor)
    assert [tensor.tolist() for tensor in found] == [tensor.tolist() for tensor in sent]


def test_bytes_of_a_snapshot() -> None:
    assert files._bytes(b"").is_cpu


def test_whether_ranks_have_a_gradient_is_not_asked_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each pass waited for it: a copy of numbers to the device, and one back."""
    monkeypatch.setattr(OnDevice, "tolist", lambda _: pytest.fail("waits"), raising=False)

    def act(ranks: Any) -> list[int]:
        with OnCpu():
            parameters = [torch.ones(2, device="cuda:0") for _ in range(2)]
            parameters[0].grad = torch.full((2,), 3.0, device="cuda:0")
            return average_gradients(parameters, ranks)

    assert on_ranks(2, act) == [[2, 0]] * 2
