"""Scripts that get at low-precision tensors in other ways than by the output of their model."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from fasttrain.model.outcome import State

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_numpy_inside_of_forward_and_in_hooks(amp: Any) -> None:
    class Told(nn.Linear):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            return y, y.data.softmax(1).numpy()

    model, seen = Told(4, 4), []
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    inner[0].register_forward_hook(lambda *all: seen.append(all[2].detach().numpy().dtype))
    output, array = model(X)
    inner(X)
    assert torch.equal(output, output.bfloat16().float())
    assert [array.dtype, *seen] == ["float32", "float32"]
    assert amp().counts == {"forwards": 2}
    with pytest.raises(RuntimeError, match=r"Use tensor\.detach\(\)\.numpy\(\)"):
        output.bfloat16().numpy()


def test_numpy_has_no_bf16_without_the_lever(rig: Any) -> None:
    with rig(amp="bfloat16"):
        pass
    with pytest.raises(TypeError, match="BFloat16"):
        X.bfloat16().numpy()


class Keeping(nn.Module):
    """Keeps what it computed, as an attribute, in a list and in the place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(3, 4))
        self.features: Any = None
        self.all: Any = None
        self.graph: Any = None

    def forward(self, x: Any) -> Any:
        self.graph = y = self.linear(x)
        self.features = self.last = y.detach()
        self.all = [y.detach()]
        return y


def test_what_forward_keeps_is_fp32_outside(amp: Any) -> None:
    model = Keeping()
    for _ in range(5):  # more than are watched
        model(X).sum().backward()
        assert model.features.dtype is model.last.dtype is model.all[0].dtype is torch.float32
        torch.zeros(3, 4).lerp_(model.features, 0.5)
    # Its gradient may be asked for: it is still the tensor on the way to the loss.
    loss = model(X).sum()
    assert torch.autograd.grad(loss, model.graph)[0].shape == (3, 4)
    assert amp().counts == {"forwards": 6}


class Product(torch.autograd.Function):
    """A matrix product by hand."""

    seen: list[torch.dtype] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        Product.seen.append(x.dtype)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.seen: list[torch.dtype] = []


class ByHand(Inner):
    def forward(self, x: Any) -> Any:
        return Product.apply(self.first(x), self.second.weight)


class Plain(Inner):
    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


def test_a_matrix_product_in_a_function_of_the_scripts(amp: Any) -> None:
    Product.seen.clear()
    model, plain = ByHand(), Plain()
    model(X).square().sum().backward()
    plain(X).square().sum().backward()
    assert Product.seen == [torch.float32]
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, other.grad, rtol=0.05, atol=0.02)
    assert amp().state is State.APPLIED


class Repeating(torch.autograd.Function):
    """A checkpoint by hand."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Any) -> Any:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


class Thrifty(Inner):
    def forward(self, x: Any) -> Any:
        return Repeating.apply(self.last, self.first(x))

    def last(self, x: Any) -> Any:
        y = self.second(x)
        self.seen.append(y.dtype)
        return y


def test_a_checkpoint_by_hand_repeats_in_low_precision(amp: Any) -> None:
    model, plain = Thrifty(), Plain()
    model(X).square().sum().backward()
    plain(X).square().sum().backward()
    assert model.seen == [torch.bfloat16, torch.bfloat16]
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert not torch.is_autocast_enabled("cpu")
    assert amp().counts == {"forwards": 2}


def test_functions_are_torchs_own_again(rig: Any) -> None:
    before = vars(torch.autograd.Function)["apply"], torch.autograd.function.BackwardCFunction.apply
    with rig(amp="bfloat16"):
        assert vars(torch.autograd.Function)["apply"] is not before[0]
    after = vars(torch.autograd.Function)["apply"], torch.autograd.function.BackwardCFunction.apply
    assert after == before


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_functions_inside_of_compiled_code(rig: Any, backend: Any) -> None:
    with backend("eager"), rig(amp="bfloat16", compile="default") as runtime:
        for model in (Thrifty(), ByHand()):
            model(X).square().sum().backward()
            assert model.first.weight.grad is not None
        outcomes = runtime.outcomes()
    assert outcomes["amp"].counts == {"forwards": 2}
    assert outcomes["compile"].counts["graphs"] > 0


def test_a_model_with_a_way_back_to_itself_is_freed(amp: Any) -> None:
    model = Keeping()
    model.linear.parent = [model]
    model(X)
    gone = weakref.ref(model), weakref.ref(model.linear)
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_store_that_is_shared_with_the_script_stays_shared(amp: Any) -> None:
    class Storing(nn.Linear):
        store: Any = None

        def forward(self, x: Any) -> Any:
            self.store = self.store if self.store is not None else shared
            y = super().forward(x)
            self.store["y"] = y.detach()
            return y

    shared: dict[str, Any] = {}
    model = Storing(4, 4)
    for scale in (1, 2):
        y = model(scale * X)
        assert model.store is shared
        assert shared["y"].dtype is torch.float32
        assert torch.equal(shared["y"], y)


def test_a_function_that_changes_its_input_in_place(amp: Any) -> None:
    class Negate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.mark_dirty(x)
            return x.mul_(-1)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return -gradient

    class Negative(nn.Linear):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            Negate.apply(y)
            return y

    model = Negative(4, 4)
    assert torch.equal(model(X), -nn.Linear.forward(model.bfloat16(), X.bfloat16()).float())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_torchs_checkpoint_around_a_function_of_the_script(amp: Any, use_reentrant: bool) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x @ x.t() @ x

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * ctx.saved_tensors[0]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def part(self, x: Any) -> Any:
            return self.second(Square.apply(self.first(x)))

        def forward(self, x: Any) -> Any:
            return checkpoint(self.part, x, use_reentrant=use_reentrant)

    model = Net()
    model(X.clone().requires_grad_()).sum().backward()
    assert model.first.weight.grad is not None
    assert amp().missed == ()


def test_a_buffer_that_is_deleted_stays_deleted(amp: Any) -> None:
    class Caching(nn.Linear):
        def forward(self, x: Any) -> Any:
            if "cache" in self._buffers:
                del self.cache
            else:
                self.register_buffer("cache", x.clone())
            return super().forward(x)

    model = Caching(4, 4)
    for held in (True, False, True):
        model(X)
        assert ("cache" in model._buffers) is held


def test_an_attribute_that_holds_itself_is_left_as_it_is(amp: Any) -> None:
    @dataclass
    class Node:
        value: Any
        parent: Any = None

    class Growing(nn.Linear):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            self.tree = Node(y.detach())
            self.tree.parent = self.tree
            return y

    model = Growing(4, 4)
    model(X)
    assert model.tree.parent is model.tree


def test_a_cached_parametrization_is_read_in_fp32(amp: Any) -> None:
    class Halve(nn.Module):
        def forward(self, weight: Any) -> Any:
            return weight @ torch.eye(4) / 2

    model = nn.Linear(4, 4)
    parametrize.register_parametrization(model, "weight", Halve())
    with parametrize.cached():
        model(X)
        assert model.weight.dtype is torch.float32
