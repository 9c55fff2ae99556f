"""Attention on a CPU, whose backward in bf16 takes long for few positions."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fasttrain.shim.levers.amp.attention import SHORT

MODE: Any = TorchDispatchMode  # without annotations


class Seen(MODE):  # type: ignore[misc]
    """Notes in which precision attention is computed and differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in str(func):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


class Attends(nn.Module):
    """Attention with learnt queries, masked or not."""

    def __init__(self, mask: Tensor | None = None, *, repeated: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mask, self.repeated = mask, repeated
        self.dtype = torch.float32

    def attended(self, x: Tensor) -> Tensor:
        parts = self.heads(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        found: Tensor = functional.scaled_dot_product_attention(*parts, attn_mask=self.mask)
        self.dtype = found.dtype
        return found.transpose(1, 2).reshape(x.shape)

    def forward(self, x: Tensor) -> Any:
        if self.repeated:
            return self.out(checkpoint(self.attended, x, use_reentrant=False))
        return self.out(self.attended(x))


def stepped(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    loss: Tensor = model(x).float().square().mean()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([g.float().flatten() for g in gradients])


def masks() -> list[Any]:
    causal = torch.full((5, 5), float("-inf")).triu(1)
    return [None, causal, causal.bfloat16(), causal == 0]


@pytest.mark.parametrize("mask", masks(), ids=["none", "float", "bfloat16", "bool"])
def test_short_attention_is_differentiated_in_fp32(rig: Any, mask: Any) -> None:
    x = torch.randn(3, 5, 8)
    alone = None if mask is not None and mask.dtype is torch.bfloat16 else stepped(Attends(mask), x)
    with rig(amp="bfloat16"):
        model = Attends(mask)
        with Seen() as seen:
            found = stepped(model, x)
    assert set(seen.dtypes) == {torch.float32}
    assert len(seen.dtypes) == 2, "forward and backward"
    assert model.dtype is torch.bfloat16, "as autocast has it"
    assert alone is None or torch.allclose(found, alone, rtol=0.05, atol=0.002)


@pytest.mark.parametrize(("positions", "differentiated"), [(SHORT, True), (5, False)])
def test_other_attention_runs_in_low_precision(
    rig: Any, positions: int, differentiated: bool
) -> None:
    x = torch.randn(1, positions, 8)
    with rig(amp="bfloat16"):
        model = Attends()
        with torch.enable_grad() if differentiated else torch.no_grad(), Seen() as seen:
            model(x)
    assert seen.dtypes == [torch.bfloat16]


@pytest.mark.parametrize("inside", [True, False])
def test_the_scripts_own_autocast_is_left_alone(rig: Any, inside: bool) -> None:
    x = torch.randn(3, 2, 5, 4, requires_grad=True)
    own = torch.autocast("cpu", torch.bfloat16) if inside else nullcontext()
    with rig(amp="bfloat16"), own, Seen() as seen:
        functional.scaled_dot_product_attention(x, x, x)
    assert seen.dtypes == [torch.bfloat16 if inside else torch.float32]


def test_a_checkpoint_repeats_it_in_fp32(rig: Any) -> None:
    x = torch.randn(3, 5, 8)
    with rig(amp="bfloat16"):
        once, repeated = stepped(Attends(), x), stepped(Attends(repeated=True), x)
    assert torch.equal(once, repeated)


def test_it_is_torchs_own_again_and_pickled_by_name(rig: Any) -> None:
    original = functional.scaled_dot_product_attention
    with rig(amp="bfloat16"):
        replacement = functional.scaled_dot_product_attention
        assert replacement is not original
        assert pickle.loads(pickle.dumps(replacement)) is replacement
    assert functional.scaled_dot_product_attention is original


def test_a_compiled_graph_has_it_whole(rig: Any) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    x = torch.randn(3, 5, 8)
    with rig(amp="bfloat16"):
        eager = stepped(Attends(), x)
        model = Attends()
        model.compile(backend=backend, fullgraph=True)
        compiled = stepped(model, x)
    assert torch.equal(eager, compiled)
    (graph,) = graphs
    assert [node.target for node in graph.graph.nodes].count("float") == 3, "query, key and value"
