"""A root in bf16 draws the random numbers that it draws in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# dynamo warns while it compiles; here that would be an error inside the compiler
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

OPTIONS = {"fallback_random": True, "fx_graph_cache": False, "compile_threads": 1}
Noise = Callable[[Tensor], Tensor]

NOISE: dict[str, Noise] = {
    "like": torch.randn_like,
    "made": lambda h: torch.randn(h.shape, dtype=h.dtype),
    "filled": lambda h: h.new_empty(h.shape).normal_(),
    "filled with others": lambda h: torch.empty_like(h).normal_(1.0, 2.0),
    "filled across": lambda h: h.new_empty(h.shape[::-1]).normal_().t(),
    "filled in part": lambda h: h.new_zeros(len(h), 32)[:, : h.shape[1]].normal_(),
    "drawn": lambda h: torch.normal(torch.zeros_like(h), torch.ones_like(h)),
    "drawn around numbers": lambda h: torch.normal(torch.ones_like(h), 2.0),
    "drawn with deviations": lambda h: torch.normal(1.0, torch.ones_like(h)),
    "drawn with both": lambda h: torch.normal(torch.zeros(h.shape), torch.ones_like(h)),
    "distribution": lambda h: distributions.Normal(h, h.exp()).rsample(),
    "sample": lambda h: distributions.Normal(h, h.exp()).sample(),
    "uniform": torch.rand_like,
    "exponential": lambda h: torch.empty_like(h).exponential_(),
    "gumbel": lambda h: functional.gumbel_softmax(h, hard=True),
    "dropout": functional.dropout,
}


class Noisy(nn.Module):
    """Adds noise to what it computes."""

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.noise = nn.Linear(4, 10), noise
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if not torch.compiler.is_compiling():
            self.seen.append(hidden.dtype)
        return hidden + self.noise(hidden)


def after(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a model makes, and where the generator is."""
    torch.manual_seed(1)
    return model(x), torch.get_rng_state()


@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("way", NOISE)
def test_a_root_draws_what_it_draws_in_fp32(rig: Any, way: str, rows: int) -> None:
    x = torch.rand(rows, 4, generator=torch.Generator().manual_seed(2))
    expected, state = after(Noisy(NOISE[way]), x)
    with rig(amp="bfloat16"):
        model = Noisy(NOISE[way])
        found, place = after(model, x)
    assert model.seen == [torch.bfloat16]
    assert torch.equal(place, state)
    assert torch.allclose(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("way", ["like", "filled across", "distribution"])
def test_so_does_a_compiled_one(rig: Any, way: str) -> None:
    x = torch.rand(5, 4, generator=torch.Generator().manual_seed(2))
    expected, state = after(Noisy(NOISE[way]), x)
    torch.compiler.reset()
    with rig(amp="bfloat16"):
        model = Noisy(NOISE[way])
        model.compile(options=OPTIONS)
        found, place = after(model, x)
    assert torch.equal(place, state)
    assert torch.allclose(found, expected, rtol=0.02, atol=0.02)


def test_a_checkpoint_draws_them_again(rig: Any) -> None:
    x = torch.rand(5, 4)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Noisy(lambda h: h * torch.randn_like(h))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.part, x, use_reentrant=False)

    def gradient() -> Any:
        model = Twice()
        torch.manual_seed(1)
        model(x).square().sum().backward()
        return model.part.linear.weight.grad

    expected = gradient()
    with rig(amp="bfloat16"):
        found = gradient()
    assert torch.allclose(found, expected, rtol=0.05, atol=0.05)


def test_a_generator_of_its_own_is_drawn_from_alike(rig: Any) -> None:
    def draw() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(3)
        noise = Noisy(lambda h: torch.empty_like(h).normal_(generator=generator))
        return noise(torch.ones(5, 4)), generator.get_state()

    expected, state = draw()
    with rig(amp="bfloat16"):
        found, place = draw()
    assert torch.equal(place, state)
    assert torch.allclose(found, expected, rtol=0.02, atol=0.02)


def test_other_types_and_what_is_around_a_root_stay(rig: Any) -> None:
    def draw() -> Any:
        torch.manual_seed(4)
        return torch.randn(50, dtype=torch.bfloat16), torch.get_rng_state()

    drawn: list[Any] = []

    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 10)

        def forward(self, x: Tensor) -> Any:
            torch.manual_seed(4)
            drawn.append((torch.randn(50, dtype=torch.float64), torch.randn(50)))
            return self.linear(x)

    x, expected = torch.ones(5, 4), draw()
    Others()(x)
    with rig(amp="bfloat16"):
        found = draw()
        Others()(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(draw()[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
    assert torch.equal(draw()[0], expected[0])
