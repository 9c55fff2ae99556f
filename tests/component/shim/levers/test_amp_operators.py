"""Operators that run in fp32: without a backward in low precision, recurrent layers, softmax."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions.constraints import simplex
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fasttrain.shim.hooks.containers import tensors_in
from fasttrain.shim.levers.amp.operators import OPERATORS

X = torch.linspace(-1, 1, 24).reshape(6, 4)
MATRIX = torch.eye(6).to_sparse_coo()
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "sparse.mm": lambda h: torch.sparse.mm(MATRIX, h),
    "sparse.addmm": lambda h: torch.sparse.addmm(torch.zeros(6, 4), MATRIX, h),
    "pdist": lambda h: torch.pdist(h),
    "functional.pdist": lambda h: functional.pdist(h),
    "addr": lambda h: torch.addr(torch.zeros(4, 4), h[0], h[1]),
    "addr by keyword": lambda h: torch.addr(torch.zeros(4, 4), vec1=h[0], vec2=h[1]),
    "i1": lambda h: torch.special.i1(h),
    "i1e": lambda h: torch.special.i1e(h),
}


class Model(nn.Module):
    def __init__(self, operation: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.operation = operation
        self.seen: list[torch.dtype] = []

    def forward(self, x: Any) -> Any:
        h = self.linear(x)
        self.seen.append(h.dtype)
        return self.operation(h)


def gradient(model: Model) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(X).mean().backward()
    optimizer.step()  # fp16 unscales before
    return model.linear.weight.grad


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_its_backward_is_that_of_fp32(rig: Any, name: str, precision: str) -> None:
    alone = gradient(Model(OPERATIONS[name]))
    with rig(amp=precision):
        model = Model(OPERATIONS[name])
        assert torch.allclose(gradient(model), alone, rtol=0.02, atol=0.002)
    assert model.seen == [getattr(torch, precision)]  # no call was repeated


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_repeats_it_in_fp32(amp: Any, use_reentrant: bool) -> None:
    class Thrifty(Model):
        def forward(self, x: Any) -> Any:
            return checkpoint(super().forward, x, use_reentrant=use_reentrant)

    model = Thrifty(lambda h: torch.sparse.mm(MATRIX, h).exp())  # which saves its result
    model(X.clone().requires_grad_()).mean().backward()
    assert model.seen == [torch.bfloat16] * 2
    assert model.linear.weight.grad is not None
    assert amp().counts == {"forwards": 1}


def test_they_are_torchs_own_again_and_pickled_by_name(rig: Any) -> None:
    before = [getattr(owner, name) for owner, name, _ in OPERATORS]
    with rig(amp="bfloat16"):
        for (owner, name, _), original in zip(OPERATORS, before, strict=True):
            replacement = getattr(owner, name)
            assert replacement is not original
            stored = pickle.dumps(replacement)
            assert b"fasttrain" not in stored
            assert pickle.loads(stored) is replacement
    assert [getattr(owner, name) for owner, name, _ in OPERATORS] == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_they_can_be_scripted(amp: Any) -> None:
    class Scripted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.addr(x, torch.special.i1(x[0]), x[1])

    assert torch.equal(torch.jit.script(Scripted())(X[:4]), Scripted()(X[:4]))


class Dual:
    """Has a rule for each function that it knows, as torch's notes on extending have it."""

    rules: dict[Any, Callable[..., Any]] = {}  # noqa: RUF012

    def __init__(self, value: Any) -> None:
        self.value = value

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.rules[func](*args, **kwargs or {}) if func in cls.rules else NotImplemented


@pytest.mark.parametrize(
    "name", ["sigmoid", "Tensor.sigmoid", "addr", "special.i1", "sparse.mm", "nn.functional.pdist"]
)
def test_rules_for_functions_are_found_by_their_public_names(amp: Any, name: str) -> None:
    function: Any = torch
    for part in name.split("."):
        function = getattr(function, part)
    Dual.rules = {function: lambda *given: Dual(given)}
    given = (X, Dual(X)) if name == "sparse.mm" else (Dual(X),)
    assert function(*given).value == given


def test_subclasses_and_modes_see_each_function_once(amp: Any) -> None:
    class Told(torch.Tensor):
        pass

    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **kwargs or {})

    assert type(torch.sigmoid(X.as_subclass(Told))) is Told
    with Mode():
        found = torch.sigmoid(X)
    assert seen == [torch.sigmoid]
    assert torch.equal(found, X.sigmoid())


class Policy(nn.Module):
    """Ends in probabilities, by whatever way a script takes."""

    def __init__(self, softmax: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.softmax = nn.Linear(4, 32), softmax
        self.seen: list[torch.dtype] = []

    def forward(self, x: Any) -> Any:
        logits = self.linear(x)
        self.seen.append(logits.dtype)
        return self.softmax(logits)


SOFTMAX: dict[str, Callable[[Any], Any]] = {
    "module": nn.Softmax(dim=-1),
    "functional": lambda h: functional.softmax(h, dim=-1),
    "function": lambda h: torch.softmax(h, -1),
    "method": lambda h: h.softmax(-1),
    "special": lambda h: torch.special.softmax(h, -1),
    "softmin": lambda h: functional.softmin(h, dim=-1),
    "in a container": lambda h: {"probabilities": h.softmax(-1), "value": h.sum(-1)},
    "several": lambda h: (h.softmax(-1), (h * 2).softmax(-1)),
    "view": lambda h: h.softmax(-1).unsqueeze(1).squeeze(1),
    "logarithms": lambda h: functional.log_softmax(h, dim=-1),
    "a module of them": nn.LogSoftmax(dim=-1),
}


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("way", SOFTMAX)
def test_probabilities_sum_to_one(rig: Any, way: str, precision: str) -> None:
    expected = Policy(SOFTMAX[way])(X)
    with rig(amp=precision):
        model = Policy(SOFTMAX[way])
        found = model(X)
    assert model.seen == [getattr(torch, precision)]
    for one, other in zip(tensors_in(found), tensors_in(expected), strict=True):
        assert one.dtype is torch.float32
        assert torch.allclose(one, other, rtol=0.05, atol=0.05)
        if one.dim() == 2:
            assert simplex.check(one.exp() if one.min() < 0 else one).all()


def under_vmap(model: nn.Module) -> Any:
    return lambda x: torch.func.vmap(model)(x.unsqueeze(1)).squeeze(1)


def under_a_checkpoint(model: nn.Module) -> Any:
    return lambda x: checkpoint(model, x, use_reentrant=False)


@pytest.mark.parametrize("how", [lambda model: model, under_vmap, under_a_checkpoint])
def test_what_is_trained_by_probabilities_is_so_by_their_gradients(amp: Any, how: Any) -> None:
    def gradient(model: Policy) -> Any:
        probabilities = how(model)(X)
        assert simplex.check(probabilities).all()
        probabilities[:, 0].log().sum().backward()
        return model.linear.weight.grad

    found = gradient(Policy(SOFTMAX["method"]))
    model = Policy(SOFTMAX["method"])
    model.linear(X).softmax(-1)[:, 0].log().sum().backward()  # its layer alone has been called
    assert torch.allclose(found, model.linear.weight.grad, rtol=0.05, atol=0.05)  # type: ignore[arg-type]


def test_gradients_by_probabilities_are_those_of_all_their_uses(amp: Any) -> None:
    class Attention(Policy):
        def forward(self, x: Any) -> Any:
            weights = super().forward(x)
            return weights, weights.sum() * 2

    weights, total = Attention(SOFTMAX["method"])(X)
    (found,) = torch.autograd.grad(weights.sum() + total, weights)
    assert torch.equal(found, torch.full((6, 32), 3.0))


def test_under_inference_mode_they_sum_to_one(amp: Any) -> None:
    with torch.inference_mode():
        assert simplex.check(Policy(SOFTMAX["method"])(X)).all()


def test_softmax_elsewhere_is_torchs_own(amp: Any) -> None:
    class Island(Policy):
        def forward(self, x: Any) -> Any:
            logits = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                self.seen.append(logits.softmax(-1).dtype)
            self.seen.append(logits.softmax(-1, dtype=torch.float64).dtype)
            self.seen.append(logits.long().softmax(-1, dtype=torch.bfloat16).dtype)
            return logits

    model = Island(nn.Identity())
    model(X)
    assert model.seen == [torch.bfloat16, torch.float64, torch.bfloat16]
    assert X.bfloat16().softmax(-1).dtype is torch.bfloat16


def test_the_scripts_own_autocast_has_torchs_softmax(amp: Any) -> None:
    low = X.bfloat16()
    alone = low.log_softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        assert low.softmax(-1).dtype is torch.bfloat16
        assert torch.equal(low.log_softmax(-1), alone)


def test_no_rule_is_left(rig: Any) -> None:
    for _ in range(2):
        with rig(amp="bfloat16"):
            assert has_rule()
        assert not has_rule()


def has_rule() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::softmax.int", "AutocastCPU")
