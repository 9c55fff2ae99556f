"""Sparse gradients on a device, whose collectives can't sum them: gloo does, on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.replica import PROBES, Replica
from fasttrain.shim.data_parallel.split.rows import mean_gradient
from support.forked_ranks import on_ranks

ROWS = torch.tensor([[0, 3, 3], [3, 5, 1]])  # of each rank
PASSES = PROBES + 3


def have_tensors_on_a_device() -> None:
    """Take all tensors for those of a device but for what was copied to the host.

    A stand-in for CUDA and NCCL in a process that ends. Source of the words: torch 2.13,
    ``ProcessGroupNCCL::allreduce_sparse``.
    """
    to, all_reduce = Tensor.to, dist.all_reduce
    kind: Any = Tensor

    def copied_to_host(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        copy.on_host = True  # type: ignore[attr-defined]
        return copy

    def by_nccl(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_sparse and not tensor.is_cpu:
            raise RuntimeError("NCCL does not support all_reduce with sparse tensors.")
        return all_reduce(tensor, *args, **kwargs)

    kind.is_cpu = property(lambda tensor: getattr(tensor, "on_host", False))
    kind.cpu = copied_to_host
    kind.to = lambda tensor, *args, **kwargs: to(tensor, *args, **kwargs).detach()
    dist.all_reduce = by_nccl


def embedding() -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(6, 2, sparse=True)


def expected() -> Tensor:
    """Return the mean of the ranks' gradients of a sum of squares."""
    module = embedding()
    (module(ROWS).square().sum() / len(ROWS)).backward()  # type: ignore[no-untyped-call]
    assert module.weight.grad is not None
    return module.weight.grad.to_dense()


@pytest.mark.parametrize("hooked", [False, True])
def test_they_are_averaged_and_torchs_object_does_not_take_over(
    tmp_path: Path, hooked: bool
) -> None:
    def act(ranks: Ranks) -> Any:
        ranks.join()
        have_tensors_on_a_device()
        module, seen = embedding(), []
        if hooked:
            module.weight.register_hook(lambda gradient: seen.append(gradient.to_dense().tolist()))
        replica = Replica(module, ranks)
        for _ in range(PASSES):
            module.zero_grad()
            assert not replica.calls_together
            loss = replica.call(module, (ROWS[ranks.rank],), {}).square().sum()
            replica.begin_pass()
            loss.backward()
            replica.after_backward()
            seen.append(module.weight.grad.to_dense().tolist())  # type: ignore[union-attr]
        ranks.leave()
        return seen

    for end in on_ranks(tmp_path, act):
        assert len(end.good) == PASSES * (1 + hooked)
        for found in end.good:
            torch.testing.assert_close(torch.tensor(found), expected())


def test_means_inside_a_pass_are_sparse_too(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        ranks.join()
        have_tensors_on_a_device()
        one = torch.diag(torch.eye(2)[ranks.rank]).to_sparse()
        found = mean_gradient(one.coalesce(), ranks)
        ranks.leave()
        return found.is_sparse, found.to_dense().tolist()

    for end in on_ranks(tmp_path, act):
        assert end.good == [True, [[0.5, 0.0], [0.0, 0.5]]]
