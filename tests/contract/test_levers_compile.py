"""Compilation in place: the model is what it was, and the receipt tells what dynamo made of it."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.model.outcome import State
from fasttrain.shim.levers.compile.slots import HOOKS_CHANGE
from support.rig import X, backend, network, rig, train

# dynamo warns while it compiles; here that would be an error inside the compiler
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

Pair = namedtuple("Pair", "first second")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Any) -> Any:
        return x + self.body(x)


def test_the_model_is_what_it_was(compiled: Any) -> None:
    model = network()
    keys, kind = list(model.state_dict()), type(model)
    train(model)
    assert compiled().state is State.APPLIED
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == ["", "0", "1", "2"]


def test_copies_have_weights_of_their_own(compiled: Any) -> None:
    model = network()
    train(model)
    expected = model(X).detach()
    copies = [copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        copies[0][0].weight.zero_()
    assert torch.equal(model(X), expected)
    assert not torch.equal(copies[0](X), expected)
    assert torch.equal(copies[1](X), expected)
    assert torch.equal(copies[2](X), expected)


def test_a_saved_model_loads_without_fasttrain(compiled: Any, tmp_path: Path) -> None:
    model = network()
    train(model)
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch; m = torch.load('model.pt', weights_only=False);"
        "print(m(torch.zeros(1, 4)).tolist(), [n for n in sys.modules if 'fasttrain' in n])"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=99
    )
    assert done.stdout == f"{model(torch.zeros(1, 4)).tolist()} []\n", done.stderr


def test_hooks_that_come_and_go_after_the_first_call(compiled: Any) -> None:
    model, seen = network(), []
    train(model)
    hooks = [
        model.register_forward_hook(lambda *_: seen.append("root")),
        model[0].register_forward_hook(lambda *_: seen.append("part")),
        model[2].register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    train(model, 1)
    assert seen == ["part", "root", "backward"]
    for hook in hooks:
        hook.remove()
    train(model, 1)
    assert len(seen) == 3
    assert model._compiled_call_impl is not None
    assert compiled().counts["graphs"] == 3


def test_hooks_that_change_all_the_time_end_compilation(compiled: Any) -> None:
    model = network()
    for expected in range(1, 8):
        train(model, 1)
        seen: list[int] = []
        hook = model[0].register_forward_hook(lambda *_, seen=seen: seen.append(1))
        train(model, 1)
        hook.remove()
        assert seen == [1], expected
    assert model._compiled_call_impl is None
    assert any(HOOKS_CHANGE in note for note in compiled().notes)


def test_a_graph_that_is_used_twice() -> None:
    with backend("aot_eager_decomp_partition"), rig(compile="default"):
        model = nn.Sequential(network(), nn.Dropout(0.5), nn.Sigmoid())
        loss = model(X).square().mean()
        loss.backward(retain_graph=True)
        first = model[0][0].weight.grad.clone()
        loss.backward()
    assert torch.equal(model[0][0].weight.grad, 2 * first)


@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_tracing_and_transforms_of_a_compiled_model(scope: str) -> None:
    with backend("aot_eager"), rig(compile="default", scope=scope) as runtime:
        trace_and_transform(nn.Sequential(*network(), Block(), Block()))
        outcome = runtime.outcomes()["compile"]
    assert outcome.counts["targets"] == (1 if scope == "model" else 2)
    assert outcome.counts["failures"] == 0


def trace_and_transform(model: nn.Sequential) -> None:
    train(model)
    expected = model(X)
    assert torch.equal(torch.jit.trace(model, X)(X), expected)
    torch.testing.assert_close(torch.func.vmap(model)(X), expected)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    gradients = torch.func.grad(lambda w: torch.func.functional_call(model, w, (X,)).sum())(weights)
    model.zero_grad()
    expected.sum().backward()
    torch.testing.assert_close(gradients["2.bias"], model[2].bias.grad)


class Labeled(torch.Tensor):
    """As datasets of images have it: with a label that goes along."""

    label = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_function__(func, types, args, kwargs or {})
        labels = [arg.label for arg in args if isinstance(arg, Labeled)]
        if isinstance(output, Labeled) and labels:
            output.label = labels[0]
        return output


class Bare(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", [Labeled, Bare])
def test_tensors_of_the_scripts_own_classes_run_eagerly(kind: type[Any], compiled: Any) -> None:
    model = network()
    x = X.as_subclass(kind)
    x.label = "first"
    for given in (x, X, x):
        output = model(given)
        assert type(output) is type(given)
        assert getattr(output, "label", "first") == "first"
        output.sum().backward()
    assert [site.what for site in compiled().sites] == ["Sequential"]
    assert compiled().counts["failures"] == 0
    [note] = [note for note in compiled().notes if "a class of the script's" in note]
    assert note.startswith("Sequential runs eagerly")


def test_a_root_that_was_compiled_as_a_part_before(compiled: Any) -> None:
    model = network()
    model[0](X)
    losses = train(model)
    assert [site.what for site in compiled().sites] == ["Linear", "Sequential"]
    assert losses == train(network())


RETURNS = [
    lambda y: (y, [y], {"a": y}),
    lambda y: Pair(y, None),
    lambda y: torch.max(y, dim=1),
    lambda y: None,
    lambda y: "text",
    lambda y: {"y": y, "n": 3, "z": torch.view_as_complex(y.reshape(-1, 2))},
]


@pytest.mark.parametrize("make", RETURNS)
def test_whatever_a_model_returns(compiled: Any, make: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return make(self.linear(x))

    model = Model()
    found, expected = model(X), make(model.linear(X))
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected) if not isinstance(expected, str | None) else None
    assert compiled().state is State.APPLIED


def test_an_exception_of_the_model_is_its_own(compiled: Any) -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            if x.shape[0] != 3:
                raise KeyError("mine")
            return self.linear(x)

    model = Picky()
    model(X)
    with pytest.raises(KeyError, match="mine"):
        model(X[:2])
    assert model(X).shape == (3, 4)


def test_outputs_changed_in_place(compiled: Any) -> None:
    model = network()
    y = model(X)
    y += 1
    y.sum().backward()
    assert model[2].bias.grad.tolist() == [3.0] * 4


# --- the script compiles by itself --------------------------------------------------------------


def own_wrapper(model: nn.Module) -> Any:
    return torch.compile(model)  # own: wrapper


def own_method(model: nn.Module) -> Any:
    model.compile()  # own: method
    return model


def own_forward(model: nn.Module) -> Any:
    model.forward = torch.compile(model.forward)  # own: forward
    return model


@pytest.mark.parametrize("own", [own_wrapper, own_method, own_forward])
@pytest.mark.parametrize("called_before", [True, False])
def test_the_scripts_own_compilation(compiled: Any, own: Any, called_before: bool) -> None:
    model = network()
    if called_before:
        model(X)
    model = own(model)
    losses = train(model)
    outcome = compiled()
    assert outcome.state is State.CEDED
    lines = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if f"# own: {own.__name__[4:]}" in text)
    assert f"test_levers_compile.py:{line}" in outcome.reason
    assert losses == pytest.approx(train(network()))


@pytest.mark.parametrize("choices", [{"amp": "bfloat16"}, {"compile": "default"}])
def test_a_whole_step_that_the_script_compiles(choices: dict[str, str]) -> None:
    with backend("eager"), rig(optimizer="fused", **choices) as runtime:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @torch.compile(fullgraph=True)
        def forward(x: Any) -> Any:
            return model(x).square().mean()

        @torch.compile
        def update() -> None:
            optimizer.step()

        losses = []
        for _ in range(3):
            loss = forward(X)
            optimizer.zero_grad()
            loss.backward()
            update()
            losses.append(loss.item())
        outcomes = runtime.outcomes()
    stacks = [reason.user_stack for reason in torch._dynamo.utils.graph_break_reasons]
    assert not [frame for stack in stacks for frame in stack if "fasttrain" in frame.filename]
    assert losses == pytest.approx(train(network()))
    # nothing is seen of what is compiled around a root, and the receipt says so
    line = (
        Path(__file__).read_text().splitlines().index("        @torch.compile(fullgraph=True)") + 1
    )
    for lever in (*choices, "optimizer"):
        expected = State.CEDED if lever == "compile" else State.SKIPPED
        assert outcomes[lever].state is expected
        assert f"test_levers_compile.py:{line})" in outcomes[lever].reason


def test_a_known_root_inside_of_what_the_script_compiles() -> None:
    expected = network()(X)
    with backend("eager"), rig(amp="bfloat16") as runtime:
        model = network()
        model(X)

        @torch.compile(fullgraph=True)
        def forward(x: Any) -> Any:
            return model(x)

        assert torch.equal(forward(X), expected)
        assert runtime.outcomes()["amp"].counts["forwards"] == 1


def test_a_compiled_loss_function_is_no_compiled_model(compiled: Any) -> None:
    @torch.compile
    def loss(y: Any) -> Any:
        return y.square().mean()

    model = network()
    loss(model(X)).backward()
    outcome = compiled()
    assert outcome.state is State.APPLIED
    assert [site.what for site in outcome.sites] == ["Sequential"]


def test_a_pickle_of_the_whole_model_mid_run_is_clean(compiled: Any) -> None:
    model = network()
    train(model)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"fasttrain" not in file.getvalue()
