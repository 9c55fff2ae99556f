"""Large outputs whose rows are gathered when they are needed: as the whole tensor, and no more."""

from __future__ import annotations

import copy
import ctypes
import functools
import io
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.shim.data_parallel.split import lazy_rows, row_operators
from fasttrain.shim.data_parallel.split.lazy_rows import (
    LazyRows,
    gather_for_functions,
    gather_in,
    gather_lazily,
    linked,
)
from fasttrain.shim.data_parallel.split.rows import Rows
from support.fake_ranks import on_ranks

TOKENS, WORDS, FEATURES = 4, 7, 5
AGAIN = True  # differentiate twice
Loss = Callable[[Tensor, Tensor], Tensor]


def flat(logits: Tensor) -> Tensor:
    return logits.view(-1, WORDS)


def shifted(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, WORDS), y[:, 1:].reshape(-1))


def padded(y: Tensor) -> Tensor:
    return y.reshape(-1).where(y.reshape(-1) > 2, -100)


# Computed from each rank's rows
BY_ROWS: dict[str, Loss] = {
    "flat": lambda o, y: F.cross_entropy(flat(o), y.view(-1)),
    "shifted": shifted,
    "sum": lambda o, y: F.cross_entropy(flat(o), y.view(-1), reduction="sum") / 3,
    "each": lambda o, y: F.cross_entropy(flat(o), y.view(-1), reduction="none").square().mean(),
    "padded": lambda o, y: F.cross_entropy(flat(o), padded(y)),
    "weighted": lambda o, y: F.cross_entropy(
        flat(o), y.view(-1), weight=torch.arange(7.0).double()
    ),
    "smoothed": lambda o, y: F.cross_entropy(flat(o), y.view(-1), label_smoothing=0.1),
    "transposed": lambda o, y: F.cross_entropy(o.transpose(1, 2), y),
    "permuted": lambda o, y: F.cross_entropy(o.permute(0, 2, 1), y, reduction="sum"),
    "images": lambda o, y: F.cross_entropy(o.permute(0, 2, 1).unsqueeze(3), y.unsqueeze(2)),
    "log_softmax": lambda o, y: F.nll_loss(flat(o.log_softmax(-1)), y.view(-1)),
    "temperature": lambda o, y: F.cross_entropy(flat(o / 0.7).float(), y.view(-1)),
    "last": lambda o, y: F.cross_entropy(o[:, -1], y[:, -1]),
    "mse": lambda o, y: F.mse_loss(o, F.one_hot(y, WORDS).double()),
    "mse sum": lambda o, y: F.mse_loss(F.one_hot(y, WORDS).double(), o, reduction="sum"),
    "bce": lambda o, y: F.binary_cross_entropy_with_logits(o, F.one_hot(y, WORDS).double()),
    "bce weighted": lambda o, y: F.binary_cross_entropy_with_logits(
        o, F.one_hot(y, WORDS).double(), pos_weight=torch.arange(7.0).double()
    ),
    "penalty": lambda o, y: shifted(o, y) + 0.1 * o.square().mean() + o.abs().sum(),
    "entropy": lambda o, _: -(o.softmax(-1) * o.log_softmax(-1)).sum(-1).mean(),
    "twice": lambda o, y: shifted(o, y) * F.cross_entropy(flat(o), y.view(-1)),
    "masked": lambda o, y: F.cross_entropy(
        flat(o.masked_fill(y.unsqueeze(2) > 5, -9.0)), padded(y)
    ),
    "exp": lambda o, _: torch.logsumexp(o, 2).square().sum(),
    "biased": lambda o, y: shifted(o + torch.arange(7.0).double() * 2 - o * 0.5, y),
    "detached": lambda o, y: shifted(o - o.detach().mean(-1, keepdim=True), y),
}


def in_place(logits: Tensor, y: Tensor) -> Tensor:
    before = flat(logits)
    logits[:, 0] = -1.0
    logits.mul_(2.0)
    return before.square().mean() + shifted(logits, y)


def through_data(logits: Tensor, y: Tensor) -> Tensor:
    logits.data[0, 0] = 3.0
    return F.cross_entropy(flat(logits), y.view(-1))


def in_view(logits: Tensor, y: Tensor) -> Tensor:
    last = logits[:, -1]
    last[:, 0] = 0.0
    last += 1.0
    return shifted(logits, y) + last.sum()


def other_shapes(logits: Tensor, y: Tensor) -> Tensor:
    rows, last = logits.detach()[1:3], logits.detach()[:, -1]
    logits.unsqueeze_(1)
    logits[:, 0, 0] = 2.0
    assert logits.shape == (y.size(0), 1, TOKENS, WORDS)
    logits.squeeze_(1).transpose_(0, 1)
    assert logits.stride() == (WORDS, TOKENS * WORDS, 1)
    logits.mul_(2.0)
    return shifted(logits.transpose(0, 1), y) + rows.sum() + last.square().mean()


# Computed from the rows of all ranks
WHOLE: dict[str, Loss] = {
    "in place": in_place,
    "in a view": in_view,
    "shapes in place": other_shapes,
    "through .data": through_data,
    "first rows": lambda o, y: shifted(o[:2], y[:2]),
    "sorted": lambda o, y: o.reshape(-1).sort().values[::3].square().sum() + shifted(o, y),
    "over the batch": lambda o, _: o.softmax(0).square().sum(),
    "norm": lambda o, _: o.norm(),
    "einsum": lambda o, _: torch.einsum("btv,ctv->bc", o, o).logsumexp(1).mean(),
    "indexed": lambda o, y: o[torch.arange(o.size(0)), 0, y[:, 0]].mean(),
    "gathered": lambda o, y: -o.log_softmax(-1).gather(2, y.unsqueeze(2)).mean(),
    "stacked": lambda o, y: shifted(torch.stack([o, o * 2]).mean(0), y),
    "joined": lambda o, y: F.cross_entropy(flat(torch.cat([o, o])), y.repeat(2, 1).view(-1)),
    "split": lambda o, y: sum(
        (F.cross_entropy(a, b) for a, b in zip(o.unbind(1), y.unbind(1), strict=True)),
        torch.zeros(()),
    ),
    "other shape": lambda o, _: o.reshape(-1).view(2, -1).softmax(1).square().sum(),
    "numbers": lambda o, y: shifted(o * float(o.detach().numpy().max()), y),
    "lists": lambda o, y: shifted(o, y) * len(o.tolist()),
    "expanded": lambda o, _: (o.unsqueeze(0) - o.unsqueeze(1)).square().mean(),
}


@pytest.fixture(autouse=True)
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_operators, "LARGE", 1)


def problem(size: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(size)
    weight = torch.randn(FEATURES, WORDS, dtype=torch.float64, generator=random)
    x = torch.randn(size, TOKENS, FEATURES, dtype=torch.float64, generator=random)
    return weight, x, torch.randint(0, WORDS, (size, TOKENS), generator=random)


def logits_of(ranks: Any, weight: Tensor, x: Tensor, meet: Any = lambda: None) -> Tensor:
    rows = Rows(ranks, x.size(0))
    gather = functools.partial(gather_lazily, rows=rows, meet=meet)
    return rows.give(rows.take(x, 0) @ weight, 0, gather)


def check(loss: Loss, size: int, ranks: int, *, gathers: bool) -> None:
    weight, x, y = problem(size)
    alone = weight.clone().requires_grad_()
    expected = loss(x @ alone, y)
    expected.backward()

    def act(rank: Any) -> Any:
        own = weight.clone().requires_grad_()
        logits = logits_of(rank, own, x)
        assert type(logits) is LazyRows
        found = loss(logits, y)
        found.backward()
        assert type(found) is Tensor
        assert own.grad is not None
        gathered = logits.part is None  # type: ignore[attr-defined]
        return found.detach(), rank.sum(own.grad / rank.world_size), gathered

    for found, gradient, gathered in on_ranks(ranks, act):
        torch.testing.assert_close(found.double(), expected.detach().double(), rtol=1e-6, atol=0.0)
        assert alone.grad is not None
        torch.testing.assert_close(gradient, alone.grad, rtol=1e-6, atol=1e-7)
        assert gathered is gathers


@pytest.mark.parametrize("name", BY_ROWS)
@pytest.mark.parametrize(("size", "ranks"), [(6, 2), (7, 3)])
def test_losses_by_rows_are_those_of_the_whole(name: str, size: int, ranks: int) -> None:
    check(BY_ROWS[name], size, ranks, gathers=False)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(("size", "ranks"), [(6, 2), (7, 3)])
def test_whatever_else_is_done_is_done_with_the_whole(name: str, size: int, ranks: int) -> None:
    check(WHOLE[name], size, ranks, gathers=name != "gathered")


def views_before(logits: Tensor, _: Tensor) -> Tensor:
    last = logits[:, -1]
    logits.unsqueeze_(1).transpose_(0, 2)
    return torch.cat([last.reshape(-1), logits.reshape(-1)])


METRICS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "accuracy": lambda o, y: (o.argmax(-1) == y).double().mean(),
    "maximum": lambda o, y: (o.max(2)[1] == y).sum(),
    "top": lambda o, y: (o.topk(2, 2).indices == y.unsqueeze(2)).any(2).double().mean(),
    "confidence": lambda o, _: o.softmax(-1).max(-1).values,
    "finite": lambda o, _: o.isnan().any() | o.isinf().any(),
    "shape": lambda o, _: torch.tensor([*o.shape, *o.stride(), o.is_contiguous(), len(o)]),
    "text": lambda o, _: torch.tensor([ord(c) for c in repr(o)]),
    "pickled": lambda o, _: pickle.loads(pickle.dumps(o)),
    "copied": lambda o, _: copy.deepcopy(o),
    "iterated": lambda o, _: torch.stack([row.sum() for row in o]),
    "equal": lambda o, _: torch.tensor(torch.equal(o, o.clone())),
    "written": lambda o, _: o.new_zeros(o.shape).copy_(o),
    "shape in place": lambda o, _: o.t_() if o.dim() == 2 else o.swapaxes_(0, 2).unsqueeze_(-1),
    "shape of detached": lambda o, _: torch.cat([o.detach().squeeze_(), o]),
    "views before": views_before,
    "resized": lambda o, _: o.resize_(3, 2) * 2,
    "memory": lambda o, _: torch.tensor(o.untyped_storage().nbytes() + (o.data_ptr() == 0)),
}


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("inference", [False, True])
def test_metrics_are_those_of_the_whole(name: str, inference: bool) -> None:
    weight, x, y = problem(7)
    context = torch.inference_mode if inference else torch.no_grad
    with context():
        expected = METRICS[name](x @ weight, y)

    def act(rank: Any) -> Any:
        with context():
            return linked(METRICS[name](logits_of(rank, weight, x), y))

    for found in on_ranks(3, act):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def by_time(ranks: Any, x: Tensor, meet: Any = lambda: None) -> Tensor:
    """Return an output of (rows, time, features) that lies in memory by time, as of a GRU."""
    rows = Rows(ranks, x.size(0))
    gather = functools.partial(gather_lazily, rows=rows, meet=meet)
    part = rows.take(x, 0).transpose(0, 1).contiguous().transpose(0, 1)
    return rows.give(part, 0, gather, (1, 0, 2) if rows.own == 1 else None)


@pytest.mark.parametrize("size", [6, 7, 3])  # in the last one each rank has a single row
def test_an_output_lies_in_memory_as_the_model_has_made_it(size: int) -> None:
    _, x, _ = problem(size)
    whole = x.transpose(0, 1).contiguous().transpose(0, 1)

    def act(rank: Any) -> list[Tensor]:
        logits = by_time(rank, x.clone().requires_grad_())
        assert type(logits) is LazyRows
        assert logits.stride() == whole.stride()
        assert logits.part is not None
        more = logits.exp().detach()
        again = more.transpose(0, 1).neg().transpose(0, 1)
        flat = logits.transpose(0, 1).view(-1, FEATURES)
        with pytest.raises(RuntimeError, match="view"):
            logits.view(-1, FEATURES)  # as of the whole tensor
        found = [flat, more.transpose(0, 1).view(-1), again.transpose(0, 1).view(-1)]
        assert linked(logits).stride() == whole.stride()
        return [linked(tensor).detach() for tensor in found]

    by_rows = whole.transpose(0, 1).reshape(-1)
    expected = [by_rows.view(-1, FEATURES), by_rows.exp(), -by_rows.exp()]
    for found in on_ranks(3, act):
        torch.testing.assert_close(found, expected)


def test_rows_of_images_with_channels_last_are_not_gathered() -> None:
    torch.manual_seed(0)
    images, y = torch.randn(4, 3, 5, 5), torch.randint(0, 3, (4, 5, 5))
    images = images.to(memory_format=torch.channels_last)
    expected = F.cross_entropy(images, y)

    def act(rank: Any) -> Any:
        rows = Rows(rank, 4)
        gather = functools.partial(gather_lazily, rows=rows, meet=lambda: None)
        given = rows.give(rows.take(images, 0), 0, gather)
        assert given.is_contiguous(memory_format=torch.channels_last)
        loss = F.cross_entropy(given, y)
        kept = given.part is not None  # type: ignore[attr-defined]
        flat = F.cross_entropy(given.permute(0, 2, 3, 1).view(-1, 3), y.view(-1))
        return kept, loss, flat, type(linked(given)), linked(given)

    for kept, loss, flat, kind, whole in on_ranks(2, act):
        assert kept
        assert kind is Tensor
        assert whole.stride() == images.stride()
        torch.testing.assert_close([loss, flat], [expected, expected])


def test_what_is_not_used_is_not_gathered_and_what_is_used_is_met_for_once() -> None:
    weight, x, y = problem(6)

    def act(rank: Any) -> list[int]:
        met: list[int] = []
        logits = logits_of(rank, weight.requires_grad_(), x, lambda: met.append(1))
        counts = [len(met)]
        logits.detach().clone().transpose(0, 1)
        counts.append(len(met))
        for _ in range(3):
            logits.norm()
        return [*counts, len(met)]

    assert on_ranks(2, act) == [[0, 0, 1]] * 2
    del y


@pytest.mark.parametrize("name", BY_ROWS)
def test_gradients_of_gradients_are_those_of_the_whole(name: str) -> None:
    weight, x, y = problem(6)

    def penalty(own: Tensor, logits: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        loss = BY_ROWS[name](logits, y)
        (gradient,) = torch.autograd.grad(loss, own, create_graph=AGAIN)
        return mean(gradient).square().sum()

    alone = weight.clone().requires_grad_()
    expected = penalty(alone, x @ alone, lambda g: g)
    expected.backward()

    def act(rank: Any) -> Any:
        from fasttrain.shim.data_parallel.split.rows import mean_gradient

        own = weight.clone().requires_grad_()
        found = penalty(own, logits_of(rank, own, x), lambda g: mean_gradient(g, rank))
        found.backward()
        assert own.grad is not None
        return found.detach(), rank.sum(own.grad / rank.world_size)

    for found, gradient in on_ranks(2, act):
        torch.testing.assert_close(found, expected.detach())
        torch.testing.assert_close(gradient, alone.grad)


def test_rows_go_from_one_split_call_to_the_next() -> None:
    weight, x, _ = problem(7)

    def act(rank: Any) -> bool:
        logits = logits_of(rank, weight.requires_grad_(), x)
        part = Rows(rank, 7).take(logits.relu(), 0)
        part.square().sum().backward()
        return logits.part is not None and part.size(0) in (3, 4)  # type: ignore[attr-defined]

    assert on_ranks(2, act) == [True, True]


def test_small_outputs_and_results_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, _ = problem(6)

    def act(rank: Any) -> list[type]:
        logits = logits_of(rank, weight, x)
        return [type(logits), type(logits.argmax(-1)), type(logits[:, -1]), type(logits.exp())]

    monkeypatch.setattr(row_operators, "LARGE", 6 * TOKENS * WORDS)
    assert on_ranks(2, act) == [[LazyRows, Tensor, LazyRows, LazyRows]] * 2
    monkeypatch.setattr(row_operators, "LARGE", 6 * TOKENS * WORDS + 1)
    assert on_ranks(2, act) == [[Tensor] * 4] * 2


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = [{"it": tensor}]


def test_what_rank_0_saves_alone_is_gathered_before() -> None:
    weight, x, _ = problem(6)

    def act(rank: Any) -> list[bool]:
        first, second, other = (logits_of(rank, weight, x) for _ in range(3))
        gather_in((Holder(first), {"s": second.detach()}, lambda: None))
        return [t.part is None for t in (first, second, other)]  # type: ignore[attr-defined]

    assert on_ranks(2, act) == [[True, True, False]] * 2


def test_nothing_is_kept_of_those_that_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_rows, "_UNGATHERED", known := {})
    weight, x, _ = problem(8)

    def run(ranks: Any) -> list[int]:
        kept = logits_of(ranks, weight, x)
        for _ in range(5):
            logits_of(ranks, weight, x)
        return [key for key in known if key != id(kept)]

    assert on_ranks(1, run) == [[]]


def test_it_is_saved_as_a_plain_tensor() -> None:
    weight, x, _ = problem(6)

    def act(rank: Any) -> Tensor:
        file = io.BytesIO()
        torch.save({"logits": logits_of(rank, weight, x)}, file)
        file.seek(0)
        found: Tensor = torch.load(file, weights_only=True)["logits"]
        return found

    for found in on_ranks(2, act):
        torch.testing.assert_close(found, x @ weight)


class Alike:
    """Ranks that all have what this one has."""

    rank, world_size = 0, 2

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(self.world_size)


class Large(TorchDispatchMode):
    """Notes the operators that compute with a large tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(arg, Tensor) and arg.numel() > TOKENS * WORDS for arg in args):
            self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_gradient_is_as_large_as_a_split_call_wants_it_from_the_beginning() -> None:
    weight, x, y = problem(6)
    loss = F.cross_entropy(flat(logits_of(Alike(), weight.requires_grad_(), x)), y.view(-1))
    with Large() as large:
        loss.backward()
    assert "_log_softmax_backward_data" in large.seen
    assert not {"mul", "div", "add"} & set(large.seen)


def read_memory(tensor: Tensor) -> Tensor:
    """Return the sum of each row, read from memory as an extension in C++ does.

    A stand-in for one: by the object of C++ alone, which none of Python's classes sees.
    """
    place = torch._C.TensorBase.data_ptr(tensor)
    assert place, "a null pointer, of which a process dies"
    numbers = (ctypes.c_double * tensor.numel()).from_address(place)
    return torch.tensor(list(numbers), dtype=torch.float64).view(tensor.size(0), -1).sum(1)


class RowSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.sizes = x.shape
        return read_memory(x.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view(-1, 1, 1).expand(ctx.sizes).contiguous()


def test_a_function_of_the_scripts_gets_the_memory_of_all_rows() -> None:
    with ExitStack() as undo:
        gather_for_functions(undo)
        check(lambda o, _: RowSums.apply(o.tanh()).square().mean(), 6, 2, gathers=False)
        check(lambda o, _: RowSums.apply(o).square().mean(), 7, 3, gathers=True)


def test_what_reads_its_memory_all_the_same_gets_an_error() -> None:
    weight, x, _ = problem(6)

    def act(rank: Any) -> Tensor:
        logits = logits_of(rank, weight, x)
        with pytest.raises(RuntimeError, match="Cannot access data pointer of Tensor"):
            read_memory(logits)
        return read_memory(torch.empty_like(logits).copy_(logits))  # as the crash card advises

    for found in on_ranks(2, act):
        torch.testing.assert_close(found, (x @ weight).flatten(1).sum(1))
