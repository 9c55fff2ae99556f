"""Models without chance: what they compute doesn't depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttrain.shim.data_parallel.split import neutral
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


def test_valid_arguments_of_a_distribution_are_not_read() -> None:
    mean, scale = torch.zeros(4), torch.ones(4)
    with Neutral() as neutral:
        found = torch.distributions.Normal(mean, scale, validate_args=True)
        found.log_prob(mean)
    assert not neutral.reads
    with Neutral() as neutral:
        assert torch.distributions.Normal(mean, scale).mean.sum() == 0  # one of the test's
    assert neutral.reads


def test_invalid_arguments_of_a_distribution_are() -> None:
    neutral = Neutral()
    with pytest.raises(ValueError, match="Expected parameter scale"), neutral:
        torch.distributions.Normal(torch.zeros(4), -torch.ones(4), validate_args=True)
    assert neutral.reads


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
