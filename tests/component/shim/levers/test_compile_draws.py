"""Compiled models draw the random numbers that they draw without compilation."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

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
