"""Compiled models draw the random numbers that they draw without compilation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.utils.checkpoint import checkpoint

from fasttrain.shim.levers.compile.repairs import repair

# dynamo warns while it compiles; here that would be an error inside the compiler
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

# Without threads that wait for the next compilation.
OPTIONS = {"fallback_random": True, "fx_graph_cache": False, "compile_threads": 1}
CONV, X = nn.Conv2d(3, 8, 3, padding=1), torch.linspace(-1, 1, 384).view(2, 3, 8, 8)


@torch.no_grad()
def noisy() -> Tensor:
    features = CONV(X)  # which inductor computes in another memory order
    return features + torch.randn_like(features)


def test_noise_like_a_convolution_is_drawn_in_its_eager_order() -> None:
    torch.manual_seed(0)
    expected = noisy(), torch.rand(())
    with ExitStack() as undo:
        repair(undo)
        torch.manual_seed(0)
        found = torch.compile(noisy, options=OPTIONS)(), torch.rand(())
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected)


WIDE, NARROW = torch.linspace(-1, 1, 512).view(16, 32), torch.linspace(-1, 1, 256).view(16, 16)
FIRST, SECOND = torch.ones(32, 8) / 9, torch.ones(16, 32) / 9


def two_branches(drop: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function whose second branch is added to what the first one begins with."""

    def compute(x: Tensor, z: Tensor) -> Tensor:
        h = x.relu()
        a = drop(h)  # the first draw
        b = drop(z @ SECOND)  # the second one
        return (a @ FIRST).sum(1) + (h + b).sum(1)

    return compute


def drop_path(x: Tensor) -> Tensor:
    return x * x.new_empty(len(x), 1).bernoulli_(0.5)


BRANCHES = {
    "dropout": two_branches(lambda x: F.dropout(x, 0.3)),
    "drop path": two_branches(drop_path),
    "noise": two_branches(lambda x: x + torch.randn_like(x)),
}


def checkpointed(x: Tensor, z: Tensor) -> Tensor:
    y: Tensor = checkpoint(BRANCHES["dropout"], x, z, use_reentrant=False)
    return y


def drawn(call: Callable[[Tensor, Tensor], Tensor], wants_gradients: bool) -> list[Tensor]:
    x, z = (value.clone().requires_grad_(wants_gradients) for value in (WIDE, NARROW))
    torch.manual_seed(0)
    result = call(x, z)
    if wants_gradients:
        result.square().sum().backward()
        return [result.detach(), x.grad, z.grad, torch.rand(())]  # type: ignore[list-item]
    return [result, torch.rand(())]


@pytest.mark.parametrize(
    ("call", "wants_gradients"),
    [
        *((call, wants) for call in BRANCHES.values() for wants in (True, False)),
        (checkpointed, True),
    ],
)
def test_branches_draw_in_the_scripts_order(
    call: Callable[[Tensor, Tensor], Tensor], wants_gradients: bool
) -> None:
    with ExitStack() as undo:
        repair(undo)
        found = drawn(torch.compile(call, options=OPTIONS), wants_gradients)
    torch._dynamo.reset()
    torch.testing.assert_close(found, drawn(call, wants_gradients))
