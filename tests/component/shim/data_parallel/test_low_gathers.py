"""Sharded parameters that are gathered in bf16, on real ranks: the results of gathering fp32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fasttrain.model.errors import ExitCode
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.shards import low_gathers
from fasttrain.shim.data_parallel.shards.replica import ShardedReplica
from support.forked_ranks import on_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.second(self.first(x).relu())


class Model(nn.Module):
    """Two blocks, with parameters of each use."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.mixed = nn.Conv1d(8, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.full((8,), 1.001))
        self.product = nn.Parameter(torch.randn(8, 8) / 3)
        self.penalised = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.late = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.mixed(self.tokens(x).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            h = block(h)
        h = self.penalised(h * self.scale @ self.product)
        penalty = self.penalised.weight.square().sum()
        if self.late:
            penalty = penalty + self.head.weight.square().sum()
        return self.head(self.head(h) @ self.head.weight), penalty


LOWERED = {
    "mixed.weight", "mixed.bias", "product", "penalised.bias", "head.weight",
    *(f"blocks.{at}.{name}" for at in range(2) for name in (
        "attention.in_proj_weight", "attention.in_proj_bias",
        "attention.out_proj.weight", "attention.out_proj.bias",
        "first.weight", "first.bias", "second.weight", "second.bias",
    )),
}  # fmt: skip
# Those of them that a forward pass keeps for the backward pass; the sizes of all weights.
MATRICES = 2 * 4 + 3
PLAIN = 4  # calls, of which two are watched
SIZES = {64, 128, 160, 192}


@dataclass
class Trained:
    """What a training has left."""

    losses: list[float]  # of training and validation calls
    weights: dict[str, Tensor]
    lowered: list[set[str]]  # the names of the parameters that are lowered, after each step
    gathered: dict[str, int]  # bytes that FSDP has for each parameter
    rounded_copies: list[int]  # matrices that a forward pass leaves for its backward pass
    told: list[str]


class Loop:
    """A loop whose calls autocast to bf16."""

    steps = 7

    def begin_step(self, step: int, model: Model) -> Any:
        """Return the context of the step's training call."""
        return torch.autocast("cpu", dtype=torch.bfloat16)


def trained(ranks: Ranks, loop: Loop, *, low: bool = True) -> Trained:
    """Train and validate."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    left = Trained([], {}, [], {}, [], [])
    replica = ShardedReplica(model, ranks, [optimizer], left.told.append)
    gathers = replica._low
    known = list(gathers._candidates)
    if not low:
        gathers._candidates = []
    of: Any = dict(model.named_parameters())
    names = {id(p): name for name, p in of.items()}
    for step in range(loop.steps):
        context = loop.begin_step(step, model)
        x = torch.randint(20, (4, 5), generator=torch.Generator().manual_seed(step + ranks.rank))
        saved: list[Tensor] = []
        keep = saved_tensors_hooks(lambda t, kept=saved: kept.append(t) or t, lambda t: t)
        with context, keep:
            out, penalty = replica.call(model, (x,), {})
        left.rounded_copies.append(_matrices(saved))
        loss = functional.cross_entropy(out.float().flatten(0, 1), x.flatten()) + 0.01 * penalty
        optimizer.zero_grad()
        loss.backward()
        replica.after_backward()
        with context, torch.no_grad():
            out, penalty = replica.evaluate(model, x)
        left.losses += [loss.item(), out.float().sum().item(), penalty.item()]
        optimizer.step()
        left.lowered.append({names[id(one.sharded_param)] for one in gathers._other})
    left.weights = {name: p.detach().full_tensor() for name, p in of.items()}
    left.gathered = {
        names[id(one.sharded_param)]: sum(
            t.numel() * t.element_size() for t in one.all_gather_outputs
        )
        for one in known
    }
    return left


def _matrices(saved: list[Tensor]) -> int:
    """Count the distinct low-precision matrices of a weight's size that have memory."""
    kept = {
        t.untyped_storage().data_ptr()
        for t in saved
        if t.dtype is torch.bfloat16 and t.numel() in SIZES and t.untyped_storage().nbytes()
    }
    return len(kept)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[Ranks], Any]], Any]:
    """Return what both ranks return, which is the same."""

    def both(act: Callable[[Ranks], Any]) -> Any:
        def joined(ranks: Ranks) -> Any:
            ranks.join()
            return act(ranks)

        ended = on_ranks(tmp_path_factory.mktemp("ranks"), joined)
        first, second = (one.good for one in ended)
        assert first == second
        return first

    return both


def test_bf16_gathers_train_the_same_bits_with_half_of_the_bytes(run: Any) -> None:
    def act(ranks: Ranks) -> Any:
        plain, low = trained(ranks, Loop(), low=False), trained(ranks, Loop())
        other = [k for k in plain.weights if not torch.equal(plain.weights[k], low.weights[k])]
        shares = {k: low.gathered[k] / plain.gathered[k] for k in low.gathered}
        lowered = [sorted(names) for names in low.lowered]
        losses = plain.losses == low.losses
        return losses, other, lowered, shares, low.told, plain.rounded_copies, low.rounded_copies

    same_losses, other, lowered, shares, told, copies, fewer = run(act)
    assert lowered == [[]] * PLAIN + [sorted(LOWERED)] * (Loop.steps - PLAIN)
    assert {name for name, share in shares.items() if share == 0.5} == LOWERED
    assert {share for name, share in shares.items() if name not in LOWERED} == {1.0}
    assert other == []
    assert same_losses
    assert len(told) == 1
    assert "21 of 28 parameters are gathered in bfloat16" in told[0]
    assert copies == [copies[0]] * Loop.steps
    assert fewer == [copies[0]] * PLAIN + [copies[0] - MATRICES] * (Loop.steps - PLAIN)


class LateUse(Loop):
    """Uses a weight otherwise later on."""

    steps, lasts = 8, 6

    def begin_step(self, step: int, model: Model) -> Any:
        model.late = step >= 5
        return super().begin_step(step, model)


class LeavesAutocast(Loop):
    """Calls the model without autocast later on."""

    lasts = 6

    def begin_step(self, step: int, model: Model) -> Any:
        return super().begin_step(step, model) if step < 6 else nullcontext()


@pytest.mark.parametrize(
    ("loop", "until", "why"),
    [
        (LateUse(), 5, "head.weight is used otherwise than in a product of matrices"),
        (LeavesAutocast(), 6, "it is also called without autocast"),
    ],
)
def test_parameters_are_gathered_in_fp32_again(loop: Loop, until: int, why: str, run: Any) -> None:
    def act(ranks: Ranks) -> Any:
        plain, low = trained(ranks, loop, low=False), trained(ranks, loop)
        shares = {low.gathered[k] / plain.gathered[k] for k in low.gathered}
        same = plain.losses[: 3 * until] == low.losses[: 3 * until]
        # What one call has rounded that uses a weight otherwise is all that differs.
        close = low.losses == pytest.approx(plain.losses, rel=0.02)
        return same, close, [len(names) for names in low.lowered], sorted(shares), low.told

    same, close, lowered, shares, told = run(act)
    lows = [len(LOWERED)] * (loop.lasts - PLAIN)
    assert lowered == [0] * PLAIN + lows + [0] * (loop.steps - loop.lasts)
    assert shares == [1.0]
    assert told[1:] == [f"parameters are gathered in fp32 again: {why}"]
    assert (same, close) == (True, True)


def test_nothing_is_lowered_between_a_forward_and_its_backward_pass(run: Any) -> None:
    def act(ranks: Ranks) -> Any:
        torch.manual_seed(0)
        model = Model()
        replica = ShardedReplica(model, ranks, [], lambda _: None)
        x = torch.randint(20, (4, 5))
        lowered = []
        for _ in range(4):
            losses = []
            for _ in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    losses.append(replica.call(model, (x,), {})[0].float().mean())
                lowered.append(len(replica._low._other))
            for loss in losses:
                loss.backward()
                replica.after_backward()
        return lowered

    assert run(act) == [0] * 4 + [len(LOWERED)] * 4


class Own(torch.autograd.Function):
    """A product whose derivative depends on the weight otherwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = (t.float() for t in ctx.saved_tensors)
        return grads[0].float() @ weight, grads[0].float().t() @ x + 0.1 * weight


scripted: Any = torch.jit.CompilationUnit("""
def squares(weight):
    return (weight * weight).sum()
""").squares


class Pair(nn.Module):
    """Two layers, of which the second is used in a way, besides or instead of that of a layer."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.way = way
        self.types: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        weight = self.second.weight
        self.types.append(f"{weight.dtype} {type(weight).__name__} {y.to(weight.dtype).dtype}")
        if self.way == "a derivative of the script's own":
            return Own.apply(y, weight) + self.second(y)  # type: ignore[no-any-return]
        if self.way == "TorchScript":
            return self.second(y) + scripted(weight)
        if self.way == "two checkpoints":
            y = checkpoint(self.second, y, use_reentrant=True)
            return checkpoint(self.second, y, use_reentrant=True)  # type: ignore[no-any-return]
        if self.way == "a transform":
            return self.second(y) + torch.vmap(lambda row: (row * row).sum())(weight)
        kind = torch.float16 if self.way == "another type" else torch.bfloat16
        with torch.autocast("cpu", dtype=kind, enabled=self.way != "fp32"):
            return self.second(y.float() if self.way == "fp32" else y)


WAYS = {
    "a layer": 4, "another type": 2, "a derivative of the script's own": 3, "TorchScript": 3,
    "a transform": 3, "two checkpoints": 4, "two calls": 0, "a call in fp32": 0, "compiled": 0,
}  # fmt: skip


def trained_in(way: str, ranks: Ranks, *, low: bool, steps: int = 7) -> Any:
    """Return losses and weights, the most parameters that were lowered, and what was told."""
    torch.manual_seed(0)
    model = Pair(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    told: list[str] = []
    replica = ShardedReplica(
        model, ranks, [optimizer], told.append, compiles=lambda: way == "compiled"
    )
    if not low:
        replica._low._candidates = []
    left, lowered = [], 0
    for step in range(steps):
        if way == "fp32 later":
            model.way = "fp32" if step == 5 else ""
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step + ranks.rank))
        contexts = [torch.autocast("cpu", dtype=torch.bfloat16)]
        if way == "two calls":
            contexts.append(torch.autocast("cpu", dtype=torch.bfloat16))
        if way == "a call in fp32" or (way == "a call in fp32 later" and step == 5):
            contexts.append(nullcontext())
        loss = torch.zeros(())
        for number, context in enumerate(contexts):
            with context:
                out = replica.call(model, (x + number,), {})
            loss = loss + (out.float() - number).square().mean()
        optimizer.zero_grad()
        loss.backward()
        replica.after_backward()
        optimizer.step()
        left.append(loss.item())
        lowered = max(lowered, len(replica._low._other))
    left += [p.detach().full_tensor().tolist() for p in model.parameters()]  # type: ignore[attr-defined]
    return left, lowered, told, model.types


def test_what_is_used_otherwise_has_the_bits_of_fp32_gathers(run: Any) -> None:
    def act(ranks: Ranks) -> Any:
        results = {}
        for way in WAYS:
            plain, low = (trained_in(way, ranks, low=low) for low in (False, True))
            results[way] = plain[0] == low[0], low[1], plain[3] == low[3]
        return results

    assert run(act) == {way: [True, count, True] for way, count in WAYS.items()}


def test_a_weight_that_is_used_in_fp32_later_is_handed_on_in_fp32(run: Any) -> None:
    """Even in the one call that nobody has foreseen the script gets no error of mixed types."""

    def act(ranks: Ranks) -> Any:
        plain, low = (trained_in("fp32 later", ranks, low=low) for low in (False, True))
        close = low[0][:7] == pytest.approx(plain[0][:7], rel=0.02)
        return plain[0][:5] == low[0][:5], close, low[1:3], plain[3] == low[3]

    same, close, (lowered, told), types = run(act)
    assert (same, close, lowered, types) == (True, True, 4, True)
    assert told[1:] == [
        "parameters are gathered in fp32 again: second.weight is used otherwise than in a product"
        " of matrices"
    ]


def test_a_first_call_in_fp32_before_a_backward_pass_ends_with_words(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        ranks.join()
        return trained_in("a call in fp32 later", ranks, low=True)

    for ended in on_ranks(tmp_path / "ranks", act):
        assert ended.code == ExitCode.CONTRADICTION
        assert "[fsdp-autocast]" in ended.stderr


def test_without_what_a_later_torch_has_nothing_is_lowered(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_gathers, "_NEEDED", (*low_gathers._NEEDED, "of_a_later_torch"))
    assert run(lambda ranks: trained_in("a layer", ranks, low=True)[1]) == 0
