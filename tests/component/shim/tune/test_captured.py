"""Which calls are captured, and with what; and random numbers of another precision."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttrain.shim.tune.captured import MOST_CALLS, Capture, CapturedCall
from fasttrain.shim.tune.double import InDouble, Rounded, SameDraws


class Rig:
    """A root whose calls go through listeners."""

    def __init__(self) -> None:
        self.module, self.undo = nn.Linear(3, 3), ExitStack()
        self.root: Any = SimpleNamespace(ref=lambda: self.module)
        self.roots: Any = SimpleNamespace(on_call=[], on_return=[])
        self.capture = Capture(self.roots, self.undo)

    def call(self, x: Tensor) -> Tensor:
        for listen in self.roots.on_call:
            listen(self.root, (x,), {})
        output: Tensor = self.module(x)
        for listen in self.roots.on_return:
            listen(self.root, output)
        return output


def test_training_calls_with_gradients_are_captured() -> None:
    rig, x = Rig(), torch.randn(2, 3)
    with torch.no_grad():
        rig.call(x)
    rig.module.eval()
    rig.call(x).sum().backward()
    rig.module.train()
    rig.call(x)
    assert rig.capture.calls() == []
    rig.call(x).sum().backward()
    [call] = rig.capture.calls()
    assert torch.equal(call.args[0], x)
    assert call.gradients[0] is not None
    assert torch.equal(call.gradients[0], torch.ones(2, 3))


def test_listeners_and_hooks_are_removed() -> None:
    rig = Rig()
    output = rig.call(torch.randn(2, 3))
    rig.undo.close()
    output.sum().backward()
    assert (rig.roots.on_call, rig.roots.on_return) == ([], [])
    assert rig.capture.calls() == []


def test_a_loop_of_calls_is_not_kept_whole() -> None:
    rig = Rig()
    for _ in range(MOST_CALLS + 3):
        rig.call(torch.randn(2, 3)).sum().backward()
    assert len(rig.capture.calls()) == MOST_CALLS


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # jvp uses it
@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_calls_in_a_transform_are_left_alone(transform: str) -> None:
    rig, x = Rig(), torch.randn(4, 2, 3)

    def call(x: Tensor) -> Tensor:
        return rig.call(x).sum()

    made = {
        "grad": lambda: torch.func.grad(call)(x[0]),
        "jvp": lambda: torch.func.jvp(call, (x[0],), (x[1],))[1],
        "vmap": lambda: torch.func.vmap(call)(x),
    }[transform]()
    assert made.isfinite().all()
    rig.call(x[0]).sum().backward()
    [captured] = rig.capture.calls()
    assert torch.equal(captured.args[0], x[0])


def test_arguments_are_kept_as_they_were() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    call = CapturedCall(nn.Linear(3, 3), (x, [x]), {"mask": None, "y": torch.zeros(2)})
    with torch.no_grad():
        before = x.clone()
        x.zero_()
    assert torch.equal(call.args[0], before)
    assert call.args[0] is call.args[1][0]
    assert call.args[0].requires_grad
    assert not call.kwargs["y"].requires_grad


def test_gradients_of_several_backward_passes_are_added() -> None:
    module, x = nn.Linear(3, 3), torch.randn(2, 3)
    call = CapturedCall(module, (x,), {})
    output = module(x)
    call.watch((output, output, output.detach()))
    output.sum().backward(retain_graph=True)
    (2 * output).sum().backward()
    first, twice, detached = call.gradients
    assert first is not None
    assert torch.equal(first, torch.full((2, 3), 3.0))
    assert twice is detached is None


# Random numbers in another precision.


def drawn(operation: Any, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    result: Tensor = operation(torch.ones(64, 64, dtype=dtype))
    return result.double()


OPERATIONS = {
    "randn_like": torch.randn_like,
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "rand of a shape": lambda x: torch.rand(x.shape, dtype=x.dtype),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli": lambda x: torch.bernoulli(x * 0.25),
    "dropout": lambda x: functional.dropout(x, 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "multinomial": lambda x: torch.multinomial(x, 5),
    "randperm": lambda x: torch.randperm(9),
    "randint_like": lambda x: torch.randint_like(x, 9),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_same_numbers_are_drawn_in_any_precision(name: str) -> None:
    operation = OPERATIONS[name]
    plain = drawn(operation, torch.float32)
    with InDouble(torch.float32):
        assert torch.allclose(drawn(operation, torch.float64), plain, rtol=1e-7)
    with SameDraws(torch.float32):
        assert torch.equal(drawn(operation, torch.float32), plain)
        assert torch.allclose(drawn(operation, torch.bfloat16), plain, rtol=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_real_and_complex_results_are_rounded_at_random(dtype: torch.dtype) -> None:
    ones = torch.full((999,), 1 + 1j if dtype.is_complex else 1.0, dtype=dtype)
    with Rounded(torch.float32, 2**-8, (), 0):
        rounded = ones.conj() * ones / ones
    for part, one in (
        [(rounded.real, ones.real), (rounded.imag, -ones.imag)]
        if dtype.is_complex
        else [(rounded, ones)]
    ):
        off = (part - one).abs()
        assert 2**-9 < off.max() < 2**-5
        assert (off > 0).float().mean() > 0.9


def test_without_that_other_numbers_are_drawn() -> None:
    plain = drawn(torch.randn_like, torch.float32)
    assert not torch.allclose(drawn(torch.randn_like, torch.float64), plain, rtol=0.1)


def test_what_a_model_asks_for_in_fp32_is_computed_in_fp64() -> None:
    x = torch.rand(8, dtype=torch.float64)
    with InDouble(torch.float32):
        assert torch.equal(x.float(), x)
        assert x.softmax(0, dtype=torch.float32).dtype is torch.float64
        assert torch.zeros(3).dtype is torch.float64
        assert (torch.arange(3) / 3).dtype is torch.float64
        assert torch.equal(x.view(torch.int64), x.clone().view(torch.int64))
        held = torch.zeros(8, dtype=torch.float64)
        held += x.float()
        assert torch.equal(held, x)
