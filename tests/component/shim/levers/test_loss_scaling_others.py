"""Under fp16, gradients of tensors that no optimizer and no module has are unscaled as well."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from fasttrain.model.outcome import State
from fasttrain.shim.hooks.containers import map_tensors

AGAIN = True  # not as a literal keyword, by which compilation is left off for a whole process
Model = Callable[[Tensor], Tensor]


def make_model(layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(layers)])


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator), torch.arange(8) % 6


def an_input_by_way_of_an_expression(model: Model) -> list[Tensor | None]:
    x, y = batch()
    delta = torch.zeros_like(x, requires_grad=True)
    F.cross_entropy(model(x + delta), y).backward()
    return [delta.grad]


def one_that_collects_over_passes(model: Model) -> list[Tensor | None]:
    x, y = batch()
    delta = torch.zeros_like(x, requires_grad=True)
    kept = []
    for _ in range(3):
        F.cross_entropy(model(x + delta), y).backward()
        kept.append(delta.grad)
    assert all(gradient is delta.grad for gradient in kept)
    return [delta.grad]


def one_that_is_trained_by_hand(model: Model) -> list[Tensor | None]:
    x, y = batch()
    w = torch.ones(6, requires_grad=True)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(x) * w, y)
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            w -= 0.1 * w.grad  # type: ignore[operator]
            w.grad = None
    return [w.detach(), *losses]


def one_that_keeps_its_gradient(model: Model) -> list[Tensor | None]:
    x, y = batch()
    h = model(x)
    h.retain_grad()
    half = (h * 0.5).half()
    half.retain_grad()
    for _ in range(3):  # all of them together are more than fp16 can hold times the scale
        loss = F.cross_entropy(half.float(), y) * 4
        loss.backward(retain_graph=True)
    return [h.grad, half.grad]


def one_that_the_pass_is_for(model: Model) -> list[Tensor | None]:
    x, y = batch()
    leaf, other = x.clone().requires_grad_(), torch.ones(6, requires_grad=True)
    other.grad = torch.full((6,), 3.0)
    F.cross_entropy(model(leaf) * other, y).backward(inputs=[leaf])
    assert other.grad.unique().tolist() == [3.0]
    return [leaf.grad, other.grad]


def one_in_a_reentrant_checkpoint(model: Model) -> list[Tensor | None]:
    x, y = batch()
    inside = torch.ones(6, requires_grad=True)
    found: Tensor = checkpoint(
        lambda x: model(x) * inside, x.clone().requires_grad_(), use_reentrant=True
    )
    F.cross_entropy(found, y).backward()
    return [inside.grad]


def one_that_autograd_grad_leaves(model: Model) -> list[Tensor | None]:
    x, y = batch()
    points = x.clone().requires_grad_()
    h = model(points)
    h.retain_grad()
    (slope,) = torch.autograd.grad(F.cross_entropy(h, y), points)
    return [slope, h.grad]


def one_of_another_precision(model: Model) -> list[Tensor | None]:
    x, y = batch()
    double = torch.zeros(8, 6, dtype=torch.float64, requires_grad=True)
    short = torch.zeros(8, 6, dtype=torch.bfloat16, requires_grad=True)
    F.cross_entropy(model(x + double.float() + short.float()), y).backward()
    return [double.grad, short.grad]


@pytest.mark.parametrize(
    "gradients",
    [
        an_input_by_way_of_an_expression,
        one_that_collects_over_passes,
        one_that_is_trained_by_hand,
        one_that_keeps_its_gradient,
        one_that_the_pass_is_for,
        one_in_a_reentrant_checkpoint,
        one_that_autograd_grad_leaves,
        one_of_another_precision,
    ],
)
def test_gradients_are_those_of_a_loop_without_scaling(rig: Any, gradients: Any) -> None:
    model = make_model()
    expected = gradients(model)
    with rig(amp="float16") as runtime:
        found = gradients(model)
        assert runtime.outcomes()["loss_scaling"].state is State.APPLIED
    assert all(gradient is not None and gradient.abs().max() > 1e-3 for gradient in expected)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-3)


def test_what_overflows_is_dropped_and_what_was_there_is_kept(rig: Any) -> None:
    x, y = batch()
    with rig(amp="float16"):
        model = make_model()
        delta = torch.zeros_like(x, requires_grad=True)
        F.cross_entropy(model(x + delta), y).backward()
        assert delta.grad is not None
        first = delta.grad.clone()
        (F.cross_entropy(model(x + delta), y) * 1e38).backward()
        assert torch.equal(delta.grad, first)


def test_autograd_grad_that_is_tried_again(rig: Any) -> None:
    """Its first tries overflow; what they left on the way doesn't add up."""
    x, y = batch()
    with rig(amp="float16"):
        model = make_model()
        points = x.clone().requires_grad_()
        h = model(points)
        h.retain_grad()
        torch.autograd.grad(F.cross_entropy(h, y) * 1e37, points, retain_graph=True)
        found = h.grad
        h.grad = None
        torch.autograd.grad(F.cross_entropy(h, y), points)
        torch.testing.assert_close(found, h.grad * 1e37, rtol=0.02, atol=0.0)  # type: ignore[operator]


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "generator": lambda model: model.parameters(),
    "dict": lambda model: dict(model.named_parameters()),
    "tensor": lambda model: next(model.parameters()),
}


def gradients_by(way: str, model: nn.Module) -> tuple[Any, list[Tensor]]:
    """Return the gradients that ``grad`` and ``backward`` have for inputs given in some way.

    Those of ``grad`` overflow in its first try.
    """
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    found = torch.autograd.grad(loss * 1e3, WAYS[way](model), retain_graph=True)
    loss.backward(inputs=WAYS[way](model))
    left = [p.grad for p in model.parameters() if p.grad is not None]
    return map_tensors(found, lambda gradient: gradient / 1e3), left


@pytest.mark.parametrize("lowered", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_what_gradients_are_asked_for_in_all_ways(rig: Any, way: str, lowered: bool) -> None:
    expected = gradients_by(way, make_model())
    with rig(amp="float16") as runtime:
        model = make_model() if lowered else Unseen(make_model())
        found = gradients_by(way, model)
        state = runtime.outcomes()["loss_scaling"].state
    assert (state is State.APPLIED) == lowered
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-3)


class Unseen:
    """A model that is called by a name of its own, and so in fp32."""

    def __init__(self, model: nn.Sequential) -> None:
        self.parameters, self.named_parameters = model.parameters, model.named_parameters
        self._model = model

    def __call__(self, x: Tensor) -> Tensor:
        for linear in self._model:
            x = F.linear(x, linear.weight, linear.bias)  # type: ignore[arg-type]
        return x


def test_losses_that_come_by_an_iterator_are_scaled(rig: Any) -> None:
    """Unscaled, these gradients are 0 in fp16."""
    x, y = batch()
    with rig(amp="float16"):
        model = make_model()
        loss = F.cross_entropy(model(x), y) * 1e-7
        (found,) = torch.autograd.grad(iter([loss]), model[0].bias, iter([None]))
    assert found.abs().max() > 0


def test_gradients_from_an_edge_of_the_graph_are_left_unscaled(rig: Any) -> None:
    if not hasattr(torch.autograd.graph, "get_gradient_edge"):
        pytest.skip("needs torch 2.1's edges of the graph")
    with rig(amp="float16") as runtime:
        model, (x, y) = make_model(), batch()
        loss = F.cross_entropy(model(x), y)
        torch.autograd.backward([torch.autograd.graph.get_gradient_edge(loss)])
        notes = runtime.outcomes()["loss_scaling"].notes
    assert [note for note in notes if "edges of the graph" in note]


def test_nothing_is_kept_alive(rig: Any) -> None:
    def live() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    with rig(amp="float16"):
        model = make_model()
        one_that_keeps_its_gradient(model)
        before = live()
        one_that_keeps_its_gradient(model)
        one_in_a_reentrant_checkpoint(model)
        assert live() <= before


@pytest.mark.parametrize("where", ["parameter", "leaf"])
def test_complex_gradients_are_refused(
    rig: Any, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = batch()
    with rig(amp="float16"):
        model = make_model()
        z = torch.ones(6, dtype=torch.complex64, requires_grad=True)
        if where == "parameter":
            z = model[0].spectrum = nn.Parameter(z.detach())  # type: ignore[assignment]
        loss = F.cross_entropy(model(x) * z.real, y)
        with pytest.raises(SystemExit) as left:
            loss.backward()
    assert left.value.code == 78
    assert "[fp16-complex]" in capsys.readouterr().err


def test_a_pass_for_tensors_that_are_no_leaves_is_refused(
    rig: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = batch()
    with rig(amp="float16"):
        h = make_model()(x)
        with pytest.raises(SystemExit):
            F.cross_entropy(h, y).backward(inputs=[h])
    assert "[fp16-inputs]" in capsys.readouterr().err


def test_torch_is_as_before_afterwards(rig: Any) -> None:
    with rig(amp="float16"):
        assert "retain_grad" in vars(Tensor)
    assert "retain_grad" not in vars(Tensor)


def test_gradients_inside_vmap_are_left_unscaled(rig: Any) -> None:
    """Whether a batched gradient is finite can't be read, and the pass died of it."""
    model, (x, y) = make_model(), batch()

    def loss(parameters: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, one), label)

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    expected = per_sample(parameters, x, y)
    with rig(amp="float16") as runtime:
        found = per_sample(parameters, x, y)
        outcome = runtime.outcomes()["loss_scaling"]
    for name in expected:
        assert torch.allclose(found[name], expected[name], atol=2e-3), name
    assert [note for note in outcome.notes if "torch.func.vmap" in note]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_gradients_that_are_differentiated_again(rig: Any) -> None:
    def gradients() -> list[Tensor | None]:
        model, (x, y) = make_model(), batch()
        x.requires_grad_()
        F.cross_entropy(model(x).square(), y).backward(None, None, AGAIN)
        assert x.grad is not None
        penalty, x.grad = x.grad.square().sum(), None
        model.zero_grad()
        penalty.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients()
    with rig(amp="float16"):
        found = gradients()
    for a, b in zip(found, expected, strict=True):
        assert a is not None
        assert b is not None
        assert torch.allclose(a, b, rtol=0.05, atol=1e-4)


def test_a_gradient_that_two_parameters_share(rig: Any) -> None:
    """As in A3C: a shared model steps by the gradients of a local one."""

    def weights() -> Tensor:
        local, shared = make_model(), make_model()
        sgd = torch.optim.SGD(shared.parameters(), lr=0.1)
        x, y = batch()
        for _ in range(3):
            local.load_state_dict(shared.state_dict())
            local.zero_grad(set_to_none=False)
            F.cross_entropy(local(x), y).backward()
            for ours, theirs in zip(local.parameters(), shared.parameters(), strict=True):
                theirs.grad = ours.grad
            sgd.step()
        return shared[0].weight.detach()

    expected = weights()
    with rig(amp="float16"):
        assert torch.allclose(weights(), expected, atol=1e-3)


def test_a_hook_that_only_looks_flushes_nothing(rig: Any) -> None:
    """What a hook is shown is unscaled, and in fp16 a small gradient is 0 there."""

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.register_hook(lambda _: None)
            return y

    with rig(amp="float16"):
        model = Watched(4, 4)
        (model(torch.ones(1, 4)).sum() * 1e-9).backward()
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad, torch.full((4, 4), 1e-9), rtol=1e-3, atol=0.0)
