"""In fp64 a model computes by its own weights, whatever keeps them and whatever uses them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

from fasttrain.model.tuning import REORDERED
from fasttrain.shim.tune.captured import CapturedCall
from fasttrain.shim.tune.parity import Finding, compare
from fasttrain.shim.tune.repetition import Repeater

BF16 = 2.0**-8


class Net(nn.Module):
    """Calls two layers by what it keeps of them."""

    def __init__(self, keep: Callable[[Any], Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.kept = keep(self)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept
        return kept["it"](x) if isinstance(kept, dict) else kept(x)  # type: ignore[no-any-return]


def in_a_closure(net: Any) -> Any:
    up, down = net.up, net.down
    return lambda x: down(functional.gelu(up(x)))


def in_a_default(net: Any) -> Any:
    return lambda x, *, net=net: net.down(functional.gelu(net.up(x)))


def in_a_closure_of_a_closure(net: Any) -> Any:
    inner = in_a_closure(net)
    return lambda x: inner(x)


def in_a_container(net: Any) -> Any:
    return {"it": in_a_closure(net)}


def in_a_function_that_calls_itself(net: Any) -> Any:
    def repeated(x: Tensor, times: int = 2) -> Tensor:
        return repeated(net.down(functional.gelu(net.up(x))), times - 1) if times else x

    return repeated


def as_a_weight(net: Any) -> Any:
    first, second = net.up.weight, net.down.weight
    biases = [net.up.bias, net.down.bias]
    return lambda x: functional.gelu(x @ first.t() + biases[0]) @ second.t() + biases[1]


def as_a_method(net: Any) -> Any:
    up, down = net.up.forward, net.down.forward
    return lambda x: down(functional.gelu(up(x)))


def in_a_partial(net: Any) -> Any:
    def both(up: nn.Module, down: nn.Module, x: Tensor) -> Tensor:
        return down(functional.gelu(up(x)))  # type: ignore[no-any-return]

    return functools.partial(both, net.up, net.down)


class Hidden:
    """Keeps two layers in an object that isn't a module."""

    def __init__(self, net: Any) -> None:
        self.both = in_a_closure(net)

    def __call__(self, x: Tensor) -> Tensor:
        return self.both(x)  # type: ignore[no-any-return]


class Half:
    """Uses a weight both by its layer and by itself."""

    def __init__(self, net: Any) -> None:
        self.net, self.weight, self.lock = net, net.down.weight, threading.Lock()

    def __call__(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.net.up(x))
        return self.net.down(h) + 0.05 * functional.linear(h, self.weight)  # type: ignore[no-any-return]


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        return (gradients[0] @ weight).float(), gradients[0].t() @ x


def in_an_own_function(net: Any) -> Any:
    weight = net.down.weight
    return lambda x: Times.apply(functional.gelu(net.up(x)), weight)


def as_a_view(net: Any) -> Any:
    up, down = net.up.weight.t(), net.down.weight.t()
    return lambda x: functional.gelu(x @ up) @ down


def in_a_checkpoint(net: Any) -> Any:
    by_weight = as_a_weight(net)
    return lambda x: checkpoint(by_weight, x, use_reentrant=False)


def in_a_list(net: Any) -> Any:
    net.weights = [net.up.weight, net.down.weight]
    return lambda x: functional.gelu(x @ net.weights[0].t()) @ net.weights[1].t()


HOLDERS = [
    in_a_closure, in_a_default, in_a_closure_of_a_closure, in_a_container,
    in_a_function_that_calls_itself, as_a_weight, as_a_method, in_a_partial, Hidden, Half,
    in_an_own_function, as_a_view, in_a_checkpoint, in_a_list,
]  # fmt: skip


class Kinds(nn.Module):
    """Has layers of which each keeps or makes its weights in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(16, 16))
        self.spectral = spectral_norm(nn.Linear(16, 16))
        self.statistics = nn.BatchNorm1d(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.attention.out_proj.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(x.unsqueeze(0))[0].squeeze(0)
        x = self.statistics(self.spectral(self.normed(x)))
        y = self.attention(x[None], x[None], x[None])[0][0]
        return self.tied(y)  # type: ignore[no-any-return]


def scripted(_: Any = None) -> nn.Module:
    layers = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.PReLU())
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        return torch.jit.script(layers)  # type: ignore[no-any-return]


class Spectral(nn.Module):
    """Has a complex weight, which a closure uses as well."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.weight = weight = nn.Parameter(torch.randn(9, 32, dtype=torch.complex64) / 5)
        self.kept = lambda x: x * weight

    def forward(self, x: Tensor) -> Tensor:
        frequencies = torch.fft.rfft(self.up(x).float(), n=16, dim=0)
        h = torch.fft.irfft(self.kept(frequencies * self.weight), n=256, dim=0)
        return self.down(torch.tanh(h))  # type: ignore[no-any-return]


def captured(net: nn.Module) -> CapturedCall:
    x = torch.randn(256, 16)
    call = CapturedCall(net, (x,), {})
    output = net(x)
    call.watch(output)
    output.square().mean().backward()
    call.close()
    return call


def kept(net: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, part in net.named_modules()
        for table in (dict(part._parameters.items()), dict(part._buffers.items()), vars(part))
        for key, value in table.items()
        if key not in ("_parameters", "_buffers")
    }


NETS = {keep.__name__: functools.partial(Net, keep) for keep in HOLDERS}
KINDS: dict[str, Callable[[], nn.Module]] = {
    **NETS,
    "kinds": Kinds,
    "scripted": scripted,
    "spectral": Spectral,
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_fp64_has_the_gradients_of_fp32(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    net = make()
    call = captured(net)
    before = kept(net)
    own = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    repeater = Repeater(call, net)
    plain, exact = repeater.repeat(nullcontext), repeater.in_double(nullcontext)
    for group, tensors in plain.results.groups.items():
        for name, tensor in tensors.items():
            wide = exact.results.groups[group][name]
            if tensor is None:
                assert wide is None
                continue
            assert wide is not None, name
            assert torch.allclose(wide.to(tensor.dtype), tensor, rtol=1e-3, atol=1e-6), name
    assert exact.results.groups["output"]["0"].dtype is torch.float64  # type: ignore[union-attr]
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, own[name]), name
    after = kept(net)
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def judged(net: nn.Module) -> Finding:
    """Return what comes of a comparison with bf16."""
    return compare(captured(net), net, nullcontext, autocast, BF16)


def test_bf16_is_within_rounding_of_complex_numbers() -> None:
    torch.manual_seed(0)
    found = judged(Spectral())
    assert found.verdict == "within rounding", found.reason


@pytest.mark.parametrize("keep", HOLDERS)
def test_bf16_is_within_rounding_of_such_a_model(keep: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    found = judged(Net(keep))
    assert found.verdict == "within rounding"
    # A gradient that the copy hasn't is further away than any rounding.
    assert all(part.changed < 0.1 for part in found.parts)


class Trainer:
    """Has what can't be copied, and leads back to the module."""

    def __init__(self) -> None:
        self.lock, self.module = threading.Lock(), None
        self.seen = 0

    def see(self, module: Any, args: Any, output: Any) -> None:
        self.seen += 1


def with_a_lock(net: Any) -> Any:
    net.lock = threading.Lock()
    return in_a_closure(net)


def with_a_trainer(net: Any) -> Any:
    net.trainer = Trainer()
    net.trainer.module = net
    net.up.register_forward_hook(net.trainer.see)
    return in_a_closure(net)


def with_an_open_file(net: Any) -> Any:
    net.files = {"log": Path(os.devnull).open()}  # noqa: SIM115 - the test closes it
    return in_a_closure(net)


@pytest.mark.parametrize("keep", [with_a_lock, with_a_trainer, with_an_open_file])
def test_what_cannot_be_copied_is_shared(keep: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    net = Net(keep)
    before = {name: value for name, value in vars(net).items() if not name.startswith("_")}
    found = judged(net)
    assert found.verdict == "within rounding"
    assert all(part.changed < 0.1 for part in found.parts)
    after = {name: value for name, value in vars(net).items() if not name.startswith("_")}
    assert all(after[name] is value for name, value in before.items())
    assert after.keys() == before.keys()
    for file in getattr(net, "files", {}).values():
        file.close()


class Depends(nn.Module):
    """Computes something else in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * 1.01 if y.dtype is torch.float64 else y  # type: ignore[no-any-return]


def test_a_model_that_computes_something_else_in_fp64_shows_nothing() -> None:
    torch.manual_seed(0)
    net = Depends()

    @contextmanager
    def changed() -> Iterator[None]:
        wrong = net.layer.register_forward_hook(lambda module, args, output: output * 1.005)
        yield
        wrong.remove()

    found = compare(captured(net), net, nullcontext, changed, REORDERED)
    assert found.verdict == "unknown"
    assert "something else in fp64" in found.reason


def test_what_is_kept_elsewhere_is_as_a_plain_call_leaves_it() -> None:
    torch.manual_seed(0)
    last: dict[str, Tensor] = {}
    net = Net(in_a_closure)
    net.up.register_forward_hook(lambda module, args, output: last.update(hidden=output.detach()))
    found = judged(net)
    assert found.verdict == "within rounding"
    assert last["hidden"].dtype is torch.float32


class Renormed(nn.Module):
    """Changes its weights, but only in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if self.layer.weight.dtype is torch.float64:
            with torch.no_grad():
                self.layer.weight.mul_(1 + 1e-6)
        return self.layer(x)  # type: ignore[no-any-return]


def test_what_is_changed_in_fp64_alone_leaves_the_parameters_as_they_are() -> None:
    torch.manual_seed(0)
    net = Renormed()
    before = net.layer.weight.detach().clone()
    found = judged(net)
    assert found.verdict == "unknown"
    assert "something else in fp64: all of value of" in found.reason
    assert torch.equal(net.layer.weight, before)
