"""The script's hooks inside of a root that runs in low precision."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from fasttrain.shim.levers.amp.script_hooks import CustomFunctions

X = torch.linspace(-1, 1, 12).reshape(3, 4)
W = torch.linspace(-2, 2, 16).reshape(4, 4)
KEPT: list[Any] = []


def keep(module: Any, inputs: Any, output: Any) -> None:
    KEPT.append(output)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    KEPT.clear()
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def close(found: Any, expected: Any) -> bool:
    return torch.allclose(found, expected, rtol=0.05, atol=0.05)


def by_output_of_a_module(model: nn.Sequential) -> None:
    def hook(_: Any, __: Any, output: Any) -> None:
        output.register_hook(lambda gradient: gradient @ W)

    model[1].register_forward_hook(hook)


def in_a_forward(model: nn.Sequential) -> None:
    class Hooked(nn.Module):
        def forward(self, x: Any) -> Any:
            middle = x.tanh()
            middle.register_hook(lambda gradient: gradient @ W)
            return middle

    model[1] = Hooked()


def in_place(model: nn.Sequential) -> None:
    def change(gradient: Any) -> None:
        gradient.copy_(gradient @ W)

    class Hooked(nn.Module):
        def forward(self, x: Any) -> Any:
            middle = x.tanh()
            middle.register_hook(change)
            return middle

    model[1] = Hooked()


def of_a_module(model: nn.Sequential) -> None:
    model[1].register_full_backward_hook(lambda _, inputs, outputs: (outputs[0] @ W,))


def before_a_module(model: nn.Sequential) -> None:
    model[1].register_full_backward_pre_hook(lambda _, outputs: (outputs[0] @ W,))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "hook", [by_output_of_a_module, in_a_forward, in_place, of_a_module, before_a_module]
)
def test_a_hook_that_mixes_gradients_with_fp32_changes_them_as_alone(
    rig: Any, hook: Any, precision: str
) -> None:
    def gradient() -> Any:
        model = network()
        hook(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(X).square().mean().backward()
        optimizer.step()
        return model[0].weight.grad

    alone = gradient()
    with rig(amp=precision) as runtime:
        assert close(gradient(), alone)
        outcome = runtime.outcomes()["amp"]
    assert outcome.counts["forwards"] == 1
    told = [note for note in outcome.notes if "test_amp_hooks.py:" in note]
    assert len(told) == (0 if hook is by_output_of_a_module else 1)  # which is fp32 already


def test_an_error_of_a_hook_itself_is_raised_once(amp: Any) -> None:
    calls = []

    def hook(gradient: Any) -> None:
        calls.append(gradient.dtype)
        raise ValueError("no")

    class Hooked(nn.Module):
        def forward(self, x: Any) -> Any:
            middle = x @ W
            middle.register_hook(hook)
            return middle

    with pytest.raises(ValueError, match="no"):
        nn.Sequential(nn.Linear(4, 4), Hooked())(X).sum().backward()
    assert calls == [torch.bfloat16]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("with_kwargs", [False, True])
def test_what_a_hook_keeps_is_fp32_and_lies_in_the_graph(
    amp: Any, before: bool, with_kwargs: bool
) -> None:
    model = network()
    if before:
        model[2].register_forward_pre_hook(
            lambda _, inputs, *__: KEPT.append(inputs[0]), with_kwargs=with_kwargs
        )
    else:
        model[1].register_forward_hook(
            lambda *given: KEPT.append(given[-1]), with_kwargs=with_kwargs
        )
    loss = model(X).square().mean()
    (kept,) = KEPT
    assert amp().counts["forwards"] == 1
    loss = loss + (kept @ W).mean()  # mixes with fp32
    (found,) = torch.autograd.grad(loss, kept)
    leaf = kept.detach().requires_grad_()
    (model[2](leaf).square().mean() + (leaf @ W).mean()).backward()
    assert leaf.grad is not None
    assert close(found, leaf.grad)
    assert found.dtype is torch.float32


def test_a_model_is_copied_and_saved_with_the_hooks_that_it_was_given(amp: Any) -> None:
    model = network()
    handle = model[1].register_forward_hook(keep)
    assert b"fasttrain" not in pickle.dumps(model)
    copied = copy.deepcopy(model)
    copied(X)
    assert KEPT.pop().dtype is torch.float32
    handle.remove()
    model(X)
    assert KEPT == []
    (hook,) = pickle.loads(pickle.dumps(copied))[1]._forward_hooks.values()
    assert hook is keep


class Halve(prune.BasePruningMethod):
    """A pruning method of the script's."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: Any, default_mask: Any) -> Any:
        mask = default_mask.clone()
        mask.view(-1)[::2] = 0
        return mask


def test_pruning_finds_its_own_methods(amp: Any) -> None:
    model = network()
    for _ in range(2):
        Halve.apply(model[0], "weight")
    assert prune.is_pruned(model)
    model(X)
    assert amp().counts == {"forwards": 1}
    prune.remove(model[0], "weight")
    assert not prune.is_pruned(model)
    assert (model[0].weight == 0).sum() == 12


def add_one(self: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    return output + 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torch_jit_script_reads_the_scripts_hooks(amp: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    expected = model[0](X)
    model[0].register_forward_hook(add_one)
    before = list(model[0]._forward_hooks.values())
    scripted = torch.jit.script(model)
    assert close(scripted(X), expected + 1)
    assert all(a is b for a, b in zip(before, model[0]._forward_hooks.values(), strict=True))


class Counting:
    calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


def test_a_script_finds_its_hooks_by_class_equality_and_attributes(amp: Any) -> None:
    model, counting = network(), Counting()
    model[0].register_forward_hook(counting)
    model[0].register_forward_hook(keep)
    model(X)
    first, second = model[0]._forward_hooks.values()
    assert isinstance(first, Counting)
    assert (first.calls, second.__name__) == (1, "keep")
    assert keep in model[0]._forward_hooks.values()
    assert {first, second} == {counting, keep}
    assert isinstance(copy.deepcopy(model)[0]._forward_hooks.popitem(last=False)[1], Counting)


def test_an_output_that_a_hook_returns_is_the_modules(amp: Any) -> None:
    def fill(_: Any, __: Any, output: Any) -> None:
        with torch.no_grad():
            output.fill_(3.0)

    model = network()
    model[2].register_forward_hook(fill)
    model[2].register_forward_hook(lambda _, __, output: output + 1.0)
    assert model(X).tolist() == [[4.0] * 4] * 3


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_what_a_hook_gets_is_the_same_where_a_checkpoint_repeats_its_module(
    amp: Any, use_reentrant: bool, before: bool
) -> None:
    class Thrifty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = network()

        def forward(self, x: Any) -> Any:
            return checkpoint(self.block, x, use_reentrant=use_reentrant)

    seen = []
    model = Thrifty()
    if before:
        model.block[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    else:
        model.block[0].register_forward_hook(lambda *given: seen.append(given[-1].dtype))
    model(X.clone().requires_grad_()).square().mean().backward()
    assert seen == [torch.float32] * 2
    assert model.block[0].weight.grad is not None
    assert amp().counts == {"forwards": 1}


def test_a_hook_in_a_backward_pass_of_fp32_sees_what_it_would(amp: Any) -> None:
    """A model that the lever has left is under a checkpoint, and another one is in bf16."""
    network()(X)
    part = network().bfloat16()
    part[0].register_forward_hook(keep)
    checkpoint(part, X.bfloat16().requires_grad_(), use_reentrant=False).sum().backward()
    assert [kept.dtype for kept in KEPT] == [torch.bfloat16] * 2


def test_hooks_outside_of_low_precision_see_what_they_would(amp: Any) -> None:
    model = network().bfloat16()
    model[1].register_forward_hook(keep)
    model(X.bfloat16())
    assert KEPT.pop().dtype is torch.bfloat16


def test_an_apply_that_c_has_made_is_replaced_as_well() -> None:
    """Since torch 2.14 ``Function.apply`` is one, which has no ``__func__``."""
    functions = CustomFunctions(torch.bfloat16, lambda _: nullcontext())
    made = vars(torch._C._FunctionBase)["apply"]
    assert not hasattr(made, "__func__")

    class Product(torch.autograd.Function):
        apply = functions._applied(made)

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            assert not torch.is_autocast_enabled("cpu")
            return x @ W

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            assert ctx.saved_tensors[0].dtype is torch.float32
            return gradient @ W.T

    x = X.bfloat16().requires_grad_()
    functions.region.enter("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out: Any = Product.apply(x)
    out.sum().backward()
    assert out.dtype is torch.float32
    assert close(x.grad.float(), W.sum(1).expand(3, 4))
