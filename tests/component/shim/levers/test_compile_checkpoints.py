"""What a checkpoint repeats in the backward pass changes buffers again, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from fasttrain.shim.levers.compile.repairs import repair


class Counts(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x.tanh()


class OwnStatistics(nn.Module):
    """Normalizes without a count of its batches, as ports of other frameworks do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.variance: Tensor
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, training=True)


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), block)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return self.head(y)


# Dynamo looks at the gradient of what comes out of a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def _repaired() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with ExitStack() as undo:
        repair(undo)
        yield
    torch._dynamo.reset()


def buffers_after_steps(model: nn.Module) -> list[Tensor]:
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(6, 4) + 1).sum().backward()
    return list(model.buffers())


@pytest.mark.parametrize(
    "block",
    [
        nn.BatchNorm1d(4),
        nn.Sequential(nn.InstanceNorm1d(6, track_running_stats=True), nn.Tanh()),
        OwnStatistics(),
        Counts(),
    ],
)
def test_buffers_are_changed_as_often_as_without_compilation(block: nn.Module) -> None:
    plain = Checkpointed(block)
    compiled = deepcopy(plain)
    compiled.compile(backend="aot_eager")
    expected, found = buffers_after_steps(plain), buffers_after_steps(compiled)
    torch.testing.assert_close(found, expected)
    assert counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("block", [nn.Tanh(), nn.BatchNorm1d(4).eval()])
def test_a_checkpoint_that_changes_nothing_is_in_the_graph(block: nn.Module) -> None:
    model = Checkpointed(block)
    model.compile(backend="aot_eager", fullgraph=True)
    buffers_after_steps(model)
    assert counters["stats"]["unique_graphs"] == 1
