"""Operators whose backward has no low precision."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

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
