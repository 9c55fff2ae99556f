"""Models without chance: what they compute doesn't depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.shim.data_parallel.split import index_ranges, neutral
from fasttrain.shim.data_parallel.split.neutral import Neutral, NotNeutralError, along_which

LSTM = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)
ATTENTION = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)


def attended(x: Tensor) -> Tensor:
    found: Tensor = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    return found


CHANCES: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "feature dropout": lambda x: functional.dropout1d(x, 0.5),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "in place": lambda x: functional.dropout(x.clone(), 0.5, inplace=True),
    "noise": lambda x: x + torch.randn_like(x) + torch.rand(x.shape) + torch.rand_like(x),
    "normal": lambda x: torch.normal(x, 1.0) + x.new_empty(x.shape).normal_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) + torch.empty_like(x).bernoulli_(0.3),
    "uniform": lambda x: torch.empty_like(x).uniform_(-1, 3) + torch.empty_like(x).exponential_(),
    "integers": lambda x: x + torch.randint(0, 5, x.shape) + torch.randint_like(x, 3),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1)[:, 0], 2).float(),
    "gumbel": lambda x: functional.gumbel_softmax(x, hard=True),
    "lstm": lambda x: LSTM(x)[0],
    "attention": lambda x: ATTENTION(x, x, x)[0],
    "scaled attention": attended,
    "permutation": lambda x: x[:, torch.randperm(3)],
}


@pytest.mark.parametrize("name", CHANCES)
def test_rows_come_out_as_in_the_whole_batch(name: str) -> None:
    x = torch.linspace(-1, 1, 72).view(6, 3, 4)
    act = CHANCES[name]
    with Neutral():
        whole, again, parts = act(x), act(x), torch.cat([act(x[:2]), act(x[2:])])
    assert torch.equal(whole, again)
    torch.testing.assert_close(whole, parts)


@pytest.mark.parametrize("name", ["dropout", "feature dropout", "alpha dropout"])
def test_rows_come_out_so_in_inference_mode(name: str) -> None:
    x = torch.linspace(-1, 1, 72).view(6, 3, 4)
    act = CHANCES[name]
    with torch.inference_mode(), Neutral() as neutral:
        whole, parts = act(x), torch.cat([act(x[:2]), act(x[2:])])
    torch.testing.assert_close(whole, parts)
    assert neutral.drawn


def test_a_dropout_in_evaluation_draws_nothing() -> None:
    with torch.inference_mode(), Neutral() as neutral:
        assert torch.equal(nn.Dropout(0.5).eval()(torch.ones(4)), torch.ones(4))
    assert not neutral.drawn


@pytest.mark.parametrize("name", ["dropout", "lstm", "attention", "noise"])
def test_gradients_flow(name: str) -> None:
    x = torch.linspace(-1, 1, 72).view(6, 3, 4).requires_grad_()
    with Neutral():
        CHANCES[name](x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_a_dropout_keeps_everything() -> None:
    x = torch.ones(1000)
    with Neutral():
        assert (functional.dropout(x, 0.5) != 0).all()


def test_what_has_no_constant_is_told() -> None:
    with Neutral(), pytest.raises(NotNeutralError, match="poisson"):
        torch.poisson(torch.ones(3))


def test_a_loop_that_waits_for_another_number_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neutral, "MOST_DRAWS", 50)

    def wait() -> None:
        while torch.rand(()) < 0.9:
            pass

    with Neutral(), pytest.raises(NotNeutralError, match=r"\b50\b"):
        wait()


@pytest.mark.parametrize("name", sorted(CHANCES.keys() - {"lstm", "attention", "scaled attention"}))
def test_other_constants_show_what_follows_from_draws(name: str) -> None:
    x = torch.linspace(-1, 1, 72).view(6, 3, 4)
    found = []
    for otherwise in (False, True):
        with Neutral(otherwise=otherwise):
            found.append(CHANCES[name](x))
    assert found[0].shape == found[1].shape
    assert not torch.equal(*found)


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda x: x[x[:, 0] > 0], True),
        (lambda x: (x[:, 0] > 0).nonzero(), True),
        (lambda x: x.masked_select(x > 0), True),
        (lambda x: x[torch.tensor([1, 0])], False),
        (lambda x: x[:, 1:].relu() * (x[:, :1] > 0), False),
    ],
)
def test_shapes_that_depend_on_values_are_seen(
    act: Callable[[Tensor], Tensor], expected: bool
) -> None:
    with Neutral() as mode:
        act(torch.linspace(-1, 1, 12).view(4, 3))
    assert mode.by_values == expected


@pytest.mark.parametrize("place", [0.01, 0.99])
@pytest.mark.parametrize("name", CHANCES)
def test_rows_come_out_as_in_the_whole_batch_with_unlikely_numbers(name: str, place: float) -> None:
    x = torch.linspace(-1, 1, 72).view(6, 3, 4)
    act = CHANCES[name]
    with Neutral() as of_whole:
        act(x)
    with Neutral() as of_part:
        act(x[:2])
    along = along_which(of_whole.drawn, of_part.drawn)
    found = []
    for part in (x, x[:1], x[1:]):
        with Neutral(place=place, along=along):
            found.append(act(part))
    torch.testing.assert_close(found[0], torch.cat(found[1:]), equal_nan=True)


BRANCHES: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(4, 1) < 0.1,
    "rand above": lambda: torch.rand(4, 1) > 0.9,
    "uniform": lambda: torch.empty(4, 1).uniform_(-1, 1) < -0.9,
    "bernoulli": lambda: torch.bernoulli(torch.full((4, 1), 0.1)) > 0,
    "not kept": lambda: torch.empty(4, 1).bernoulli_(0.9) == 0,
    "normal": lambda: torch.randn(4, 1) < -1,
    "integers": lambda: torch.randint(0, 10, (4, 1)) == 9,
    "exponential": lambda: torch.empty(4, 1).exponential_() > 3,
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_place_in_the_range_takes_an_unlikely_branch(name: str) -> None:
    taken = []
    for place in (None, 0.01, 0.99):
        with Neutral(place=place):
            taken.append(bool(BRANCHES[name]().all()))
    assert not taken[0]
    assert any(taken[1:])


def test_what_isnt_of_rows_gets_both_kinds_of_numbers() -> None:
    along = along_which([("rand", (6, 4))], [("rand", (3, 4))])
    with Neutral(place=0.01, along=along):
        drawn = torch.rand(6, 4)
    assert drawn[0].tolist() == pytest.approx([0.01, 0.5, 0.01, 0.5])
    assert (drawn == drawn[0]).all()


class Kernels(TorchDispatchMode):
    """Stands in for a device, whose kernels assert where an index is out of range.

    Notes the operators that got one, for which the CPU's own operators raise an error.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.died: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except (IndexError, RuntimeError):
            self.died.append(str(func))
            raise


TABLE, AT = torch.arange(12.0).view(4, 3), torch.tensor([0, 3, 1])
MASK = torch.tensor([True, False, True, True])
# What takes an index: a table whose first dimension is shorter than the indices want, and these.
INDEXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "index": lambda x, at: x[at],
    "index second": lambda x, at: x.t()[:, at],
    "index beside a mask": lambda x, at: x.expand(2, *x.shape)[torch.tensor([True, True]), at[:2]],
    "negative index": lambda x, at: x[-1 - at],
    "index_put": lambda x, at: x.clone().index_put_((at,), torch.zeros(())),
    "set": lambda x, at: x.clone().__setitem__(at, 1.0),
    "index_select": lambda x, at: x.index_select(0, at),
    "index_add": lambda x, at: torch.zeros_like(x).index_add_(0, at, torch.ones(3, 3)),
    "index_copy": lambda x, at: x.index_copy(0, at, torch.ones(3, 3)),
    "index_fill": lambda x, at: x.index_fill(0, at, 0.0),
    "gather": lambda x, at: x.gather(0, at[None]),
    "scatter": lambda x, at: x.scatter(0, at[None], 0.0),
    "scatter_add": lambda x, at: x.clone().scatter_add_(0, at[None], torch.ones(1, 3)),
    "scatter_reduce": lambda x, at: x.scatter_reduce(0, at[None], torch.ones(1, 3), "sum"),
    "take": lambda x, at: x.take(at * 3 + 2),
    "put": lambda x, at: x.clone().put_(at * 3 + 2, torch.ones(3)),
    "embedding": lambda x, at: functional.embedding(at, x),
    "embedding_bag": lambda x, at: functional.embedding_bag(at[None], x),
    "cross_entropy": lambda x, at: functional.cross_entropy(x.t(), at),
    "nll_loss2d": lambda x, at: functional.nll_loss(x.t()[:, :, None, None], at[:, None, None]),
    "masked_scatter": lambda x, at: torch.zeros(4).masked_scatter(MASK, x[:, 0][: at.size(0)]),
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_that_is_out_of_range_does_not_get_to_a_device(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(index_ranges, "is_on_host", lambda _: False)
    act = INDEXED[name]
    with Kernels() as kernels, Neutral():
        expected = act(TABLE, AT)
        with pytest.raises(IndexError, match="out of bounds"):
            act(TABLE[:2], AT)  # the rows of one rank
    assert kernels.died == []
    found = act(TABLE, AT)
    assert found is expected is None or torch.equal(found, expected)


def test_classes_that_are_ignored_and_empty_indices_are_in_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_ranges, "is_on_host", lambda _: False)
    with Neutral():
        loss = functional.cross_entropy(TABLE.t(), torch.tensor([0, -100, 3]))
        assert TABLE[torch.tensor([], dtype=torch.int64)].shape == (0, 3)
    assert loss.isfinite()
