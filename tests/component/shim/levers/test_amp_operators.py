"""Operators that run in fp32: without a backward in low precision, recurrent layers, softmax."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions.constraints import simplex
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fasttrain.model.outcome import State
from fasttrain.shim.hooks.containers import map_tensors, tensors_in
from fasttrain.shim.hooks.roots import Root
from fasttrain.shim.levers.amp.operators import OPERATORS, RECURRENT_IN_FP32
from support.command import NO_BF16_LSTM

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


def test_by_fp16_a_softmax_has_the_bits_of_autocast(rig: Any) -> None:
    model = Policy(SOFTMAX["method"])
    with torch.autocast("cpu", torch.float16):
        expected = model(X).float()
    with rig(amp="float16"):
        assert torch.equal(Policy(SOFTMAX["method"])(X), expected)


@pytest.mark.parametrize("way", SOFTMAX)
def test_probabilities_sum_to_one(rig: Any, way: str) -> None:
    expected = Policy(SOFTMAX[way])(X)
    with rig(amp="bfloat16"):
        model = Policy(SOFTMAX[way])
        found = model(X)
    assert model.seen == [torch.bfloat16]
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


RECURRENT = {
    "lstm": nn.LSTM(4, 4, 2), "gru": nn.GRU(4, 4), "tanh": nn.RNN(4, 4),
    "relu": nn.RNN(4, 4, nonlinearity="relu"), "both ways": nn.LSTM(4, 4, bidirectional=True),
}  # fmt: skip


@pytest.fixture
def as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have roots be on a GPU, as far as the lever can tell, whose autocast runs layers in fp16.

    Not in the arithmetic of fp16, but with its numbers.
    """
    parameter = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda:0"))
    monkeypatch.setattr(Root, "parameter", lambda _: parameter)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    functions: Any = torch._VF  # type: ignore[attr-defined]
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        monkeypatch.setattr(functions, name, in_half(getattr(functions, name)), raising=False)


def in_half(original: Any) -> Any:
    """Return what torch's autocast makes of a layer: ``_cudnn_rnn_cast_reflatten``."""

    def layer(*args: Any) -> Any:
        if not torch.is_autocast_enabled("cuda"):
            return original(*args)
        halved = map_tensors(args, lambda t: t.half().float() if t.is_floating_point() else t)
        return map_tensors(original(*halved), lambda t: t.half())

    return layer


class Language(nn.Module):
    """Hands its state on, as language models do; a gradient that reaches it is small."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer)

    def forward(self, x: Any, state: Any = None) -> Any:
        output, state = self.layer(x, state)
        return output, state


def run_twice(model: Language, x: Any) -> Any:
    _, state = model(x)
    output, state = model(x, map_tensors(state, torch.Tensor.detach))
    loss = output.data.mean() if isinstance(output, PackedSequence) else output.mean()
    (loss * 1e-9).backward()
    return output, state, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_of_a_gpu_run_in_fp32(
    rig: Any, as_a_gpu: None, kind: str, packed: bool
) -> None:
    x = X.unsqueeze(1)
    if packed:
        x = pack_padded_sequence(X.reshape(3, 2, 4), torch.tensor([3, 2]))
    expected = run_twice(Language(RECURRENT[kind]), x)
    with rig(amp="bfloat16", device="cuda") as runtime:
        found = run_twice(Language(RECURRENT[kind]), x)
        outcome = runtime.outcomes()["amp"]
    for one, other in zip(tensors_in(found), tensors_in(expected), strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
    assert (outcome.state, outcome.notes) == (State.APPLIED, (RECURRENT_IN_FP32,))


def test_by_fp16_whose_loss_is_scaled_they_run_as_torch_has_them(rig: Any, as_a_gpu: None) -> None:
    with rig(amp="float16", device="cuda") as runtime:
        model = Language(RECURRENT["gru"])
        rounded = model(X.unsqueeze(1))[0]
        assert torch.equal(rounded, rounded.half().float())
        assert runtime.outcomes()["amp"].notes == ()


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_of_a_cpu_run_in_low_precision(amp: Any, kind: str) -> None:
    Language(RECURRENT[kind])(X.unsqueeze(1))
    assert amp().state is State.APPLIED or NO_BF16_LSTM in amp().reason
    assert RECURRENT_IN_FP32 not in amp().notes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_recurrent_layers_can_be_scripted(amp: Any) -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0]

    model = Scripted()
    with torch.no_grad():
        assert torch.equal(torch.jit.script(model)(X), model(X))


class Dotted(nn.Module):
    """Fails in bf16: torch has no rule for `dot`, which wants both vectors of one type."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(len(X)))

    def forward(self, x: Any) -> Any:
        return self.scale.dot(self.linear(x).sum(1))


# dynamo warns while it traces; here that would be an error inside of it
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_dynamo_meets_in_what_the_script_compiles_is_repeated_in_fp32(rig: Any) -> None:
    expected = Dotted()(X)
    with rig(amp="bfloat16") as runtime:
        found = torch.compile(Dotted(), backend="eager")(X)
        outcome = runtime.outcomes()["amp"]
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected)
    assert "not in fp32" in outcome.reason
