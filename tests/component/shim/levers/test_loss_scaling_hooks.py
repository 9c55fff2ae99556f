"""Gradient hooks of the script see what they would see without loss scaling."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.shim.levers.loss_scaling.lever import LossScaling

X = torch.arange(8.0).reshape(4, 2) / 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)
        with torch.no_grad():  # numbers that fp16 holds exactly
            for p in self.parameters():
                p.copy_(torch.arange(1.0, 1 + p.numel()).reshape(p.shape) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def scaling_of(runtime: Any) -> LossScaling:
    """Return the loss scaling of a worker."""
    return next(lever for lever in runtime._levers if isinstance(lever, LossScaling))


def record(seen: list[Any]) -> Callable[..., None]:
    def hook(*values: Any) -> None:
        seen.append([v for v in values if not isinstance(v, nn.Module)])

    return hook


def clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.125, 0.125)


def clamp_in_place(gradient: Tensor) -> None:
    gradient.clamp_(-0.125, 0.125)


def clamp_accumulated(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.5, 0.5)  # some of them


def clamp_module(_: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if g is None else g.clamp(-0.125, 0.125) for g in inputs)


def clamp_before(_: nn.Module, outputs: Any) -> Any:
    return tuple(g.clamp(-0.125, 0.125) for g in outputs)


def post(net: Net) -> None:
    net.first.weight.register_post_accumulate_grad_hook(clamp_accumulated)


WAYS: dict[str, Callable[[Net], Any]] = {
    "tensor": lambda net: net.first.weight.register_hook(clamp),
    "tensor in place": lambda net: net.second.weight.register_hook(clamp_in_place),
    "accumulated": post,
    "module": lambda net: net.second.register_full_backward_hook(clamp_module),
    "module before": lambda net: net.first.register_full_backward_pre_hook(clamp_before),
}


def gradients(register: Callable[[Net], Any]) -> list[Any]:
    net = Net()
    register(net)
    x = X.clone().requires_grad_()  # module hooks want an input with a gradient
    net(x).sum().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("way", WAYS)
def test_a_hook_that_changes_gradients(rig: Any, way: str) -> None:
    plain, untouched = gradients(WAYS[way]), gradients(lambda net: None)
    with rig(amp="float16") as runtime:
        scaling_of(runtime)._scaler._init_scale = 2.0**8
        assert all(map(torch.equal, gradients(WAYS[way]), plain))
        assert runtime.outcomes()["loss_scaling"].counts["scale"] == 2**8
    assert not all(map(torch.equal, plain, untouched))


def test_hooks_that_only_look(rig: Any) -> None:
    def look() -> list[Any]:
        seen: list[Any] = []
        net = Net()
        net.first.weight.register_hook(record(seen))
        net.second.register_full_backward_hook(record(seen))
        net.first.register_full_backward_pre_hook(record(seen))
        x = X.clone().requires_grad_()
        x.register_hook(record(seen))
        net(x).sum().backward()
        torch.autograd.grad(net(x).sum(), x)
        return seen

    plain = look()
    with rig(amp="float16") as runtime:
        scaling_of(runtime)._scaler._init_scale = 2.0**8
        found = look()
    torch.testing.assert_close(found, plain, check_dtype=False, rtol=0, atol=0)


def test_a_step_inside_the_backward_pass_is_refused(
    rig: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    net = Net()
    sgd = torch.optim.SGD([net.first.weight], lr=0.1)
    with rig(amp="float16"):
        net.first.weight.register_post_accumulate_grad_hook(lambda _: sgd.step())
        with pytest.raises(SystemExit) as left:
            net(X).sum().backward()
    assert left.value.code == 78
    assert "[fp16-step-in-backward]" in capsys.readouterr().err


def test_a_model_with_hooks_pickles(rig: Any) -> None:
    net = Net()
    net.second.register_full_backward_hook(clamp_module)
    with rig(amp="float16"):
        net(X.clone().requires_grad_()).sum().backward()
        pickled = pickle.dumps(net)
    assert b"fasttrain" not in pickled
    (hook,) = pickle.loads(pickled).second._backward_hooks.values()
    assert hook is clamp_module


def test_torch_is_as_before_afterwards(rig: Any) -> None:
    before = (Tensor.register_hook, torch.utils.hooks.BackwardHook.__init__)
    with rig(amp="float16"):
        assert Tensor.register_hook is not before[0]
    assert (Tensor.register_hook, torch.utils.hooks.BackwardHook.__init__) == before
