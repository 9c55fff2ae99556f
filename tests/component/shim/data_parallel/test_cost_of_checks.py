"""What the ranks' checks of each other cost a device: few operators, and no wide copies."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fasttrain.shim.data_parallel.rank_consistency import RankConsistency
from fasttrain.shim.data_parallel.split.agreement import check_equal
from fasttrain.shim.data_parallel.split.changes import Changes
from fasttrain.shim.data_parallel.tensor_sums import sums_of

NUMBERS = 1000  # of each tensor
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


class Seen(TorchDispatchMode):
    """Counts operators, and finds the largest of the tensors in fp64, and of all that are made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = self.wide = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.count += 1
        if not func.is_view and func is not torch.ops.aten.detach.default:
            sizes = [(t.numel(), t.dtype) for t in tree_leaves(made) if isinstance(t, Tensor)]
            self.most = max([self.most, *(size for size, _ in sizes)])
            self.wide = max([self.wide, *(s for s, dtype in sizes if dtype is torch.float64)])
        return made


def optimizer_of(dtype: torch.dtype) -> Any:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(NUMBERS, dtype=dtype))], lr=0.1)


@pytest.fixture
def consistency(monkeypatch: pytest.MonkeyPatch) -> RankConsistency:
    """Return what compares two ranks that are alike."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    ranks: Any = SimpleNamespace(rank=0, world_size=2, waits=nullcontext)
    return RankConsistency(ranks)


@every_dtype
def test_weights_are_compared_without_copies(consistency: Any, dtype: torch.dtype) -> None:
    with Seen() as seen:
        consistency.after_step(1, optimizer_of(dtype), sharded=False)
    assert 0 < seen.wide <= 2, "the sums"


def test_steps_between_those_at_which_weights_are_compared_cost_nothing(consistency: Any) -> None:
    optimizer = optimizer_of(torch.float32)
    with Seen() as seen:
        for step in (3, 5, 6, 7, 9, 1000):
            consistency.after_step(step, optimizer, sharded=False)
    assert seen.count == 0


@pytest.mark.parametrize("step", [1, 2])
def test_weights_in_another_order_are_the_same(
    consistency: Any, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    parameters = [nn.Parameter(torch.tensor([x], dtype=torch.float64)) for x in (1e16, 1, -1e16)]
    found = []
    monkeypatch.setattr(dist, "all_reduce", lambda spread, _: found.append(spread[0].item()))
    for order in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        ordered = torch.optim.SGD([parameters[at] for at in order], lr=0.1)
        consistency.after_step(step, ordered, sharded=False)
    assert len(found) == 3
    assert len(set(found)) == 1


@every_dtype
def test_checksums_of_parameters_take_no_copies(dtype: torch.dtype) -> None:
    parameters = [torch.ones(NUMBERS, dtype=dtype) for _ in range(3)]
    with Seen() as seen:
        sums_of(parameters)
    assert 0 < seen.most <= 2 * len(parameters)


@every_dtype
def test_outputs_are_compared_in_fp32(dtype: torch.dtype) -> None:
    whole = torch.linspace(-1, 1, NUMBERS, dtype=dtype)
    with Seen() as seen:
        check_equal([whole], [whole.clone()], "outputs")
    assert (seen.most, seen.wide) == (NUMBERS, 0)


class Net(nn.Module):
    """A model of the script's own, whose parts are torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x)  # type: ignore[no-any-return]


def test_what_a_split_call_changes_is_looked_at_without_operators() -> None:
    net = Net()
    changes = Changes(net, [(0, "calls")])
    with Seen() as seen:
        held = changes.hold()
    net(torch.ones(2, 4))
    with seen:
        assert (held.is_foreseen(), held.has_lost(), held.buffers()) == (True, False, [])
    assert seen.count == 0
