"""fp16 loops against the same loops written by hand with autocast and GradScaler: equal bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.model.outcome import State

STEPS = 20
# Not written as a keyword: the compile lever looks for that in all modules of the process.
SECOND_DERIVATIVES: dict[str, Any] = {"create_graph": True}
BOOM = 7  # the step whose loss overflows


def fp16(model: Callable[..., Any], *args: Any) -> Any:
    with torch.autocast("cpu", torch.float16):
        return model(*args).float()


def make_model(seed: int = 0, out: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, out))


@pytest.fixture(scope="module")
def data() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS, 2, 24, 16, generator=generator)
    return inputs, torch.randint(0, 4, (STEPS, 2, 24), generator=generator)


def bits(*models: nn.Module) -> list[Any]:
    return [p.detach().clone() for model in models for p in model.parameters()]


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def loss_of(output: Any, target: Any, step: int, *, boom: bool) -> Any:
    loss = nn.functional.cross_entropy(output, target)
    return loss * 1e38 if boom and step == BOOM else loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_clipping_schedule_and_overflow(rig, data, name, set_to_none):
    inputs, targets = data

    def train(scaler: Any) -> tuple[list[Any], list[float], list[float]]:
        model = make_model()
        call = model if scaler is None else lambda x: fp16(model, x)
        optimizer = OPTIMIZERS[name](model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        losses, norms = [], []
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=set_to_none)
            for part in range(2):
                loss = loss_of(call(inputs[step, part]), targets[step, part], step, boom=True)
                (loss if scaler is None else scaler.scale(loss)).backward()
            losses.append(loss.item())
            if scaler is not None:
                scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            schedule.step()
        return bits(model), losses, norms

    scaler = torch.amp.GradScaler("cpu")
    by_hand = train(scaler)
    with rig(amp="float16") as runtime:
        found = train(None)
        outcome = runtime.outcomes()["loss_scaling"]
    assert same(found[0], by_hand[0])
    assert found[1] == by_hand[1]
    assert found[2][:BOOM] == by_hand[2][:BOOM]
    assert outcome.state is State.APPLIED
    assert outcome.counts == {
        "backward passes": 2 * STEPS,
        "steps": STEPS - 1,
        "skipped steps": 1,
        "scale": int(scaler.get_scale()),
    }
    assert outcome.counts["scale"] == 2**15


def test_gradients_are_what_they_are_without_scaling(rig, data):
    inputs, targets = data

    def gradients() -> list[Any]:
        model = make_model()
        for part in range(2):  # the second pass adds to what the first one left
            nn.functional.cross_entropy(model(inputs[0, part]), targets[0, part]).backward()
        return [p.grad for p in model.parameters()]

    plain = gradients()
    with rig(amp="float16"):
        found = gradients()
    for expected, actual in zip(plain, found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=2e-4)


def test_a_gan_with_two_optimizers(rig, data):
    inputs, _ = data

    def train(scaler: Any) -> list[Any]:
        maker, judge = make_model(0, out=16), make_model(1, out=1)
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (maker, judge)]

        def call(model: nn.Module, x: Any) -> Any:
            return model(x) if scaler is None else fp16(model, x)

        def step(loss: Any, optimizer: Any) -> None:
            optimizer.zero_grad()
            if scaler is None:
                loss.backward()
                optimizer.step()
                return
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        for batch in inputs[:, 0]:
            made = call(maker, batch)
            step(nn.functional.softplus(call(judge, made.detach())).mean(), optimizers[1])
            step(-call(judge, made).mean(), optimizers[0])
        return bits(maker, judge)

    by_hand = train(torch.amp.GradScaler("cpu"))
    with rig(amp="float16") as runtime:
        assert same(train(None), by_hand)
        assert runtime.outcomes()["loss_scaling"].counts["steps"] == 2 * STEPS


def test_a_gradient_penalty_through_autograd_grad(rig, data):
    inputs, _ = data

    def penalty() -> tuple[Any, list[Any]]:
        model = make_model(out=1)
        points = inputs[0, 0].clone().requires_grad_()
        output = model(points)
        [slope] = torch.autograd.grad(output.sum(), points, **SECOND_DERIVATIVES)
        loss = ((slope.norm(dim=1) - 1) ** 2).mean()
        loss.backward()
        return loss.item(), [p.grad for p in model.parameters() if p.grad is not None]

    expected_loss, expected = penalty()
    with rig(amp="float16"):
        found_loss, found = penalty()
    assert found_loss == pytest.approx(expected_loss, rel=0.02)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=5e-3)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_script_that_skips_infinite_gradients_itself(rig, set_to_none):
    """It makes no step that the scale could back off after."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    steps = 0
    with rig(amp="float16") as runtime:
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(12):
            sgd.zero_grad(set_to_none=set_to_none)
            ((model(torch.ones(8, 4)) - 3) ** 2).sum().backward()
            if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                sgd.step()
                steps += 1
        counts = runtime.outcomes()["loss_scaling"].counts
    assert steps >= 6
    assert counts["steps"] == steps
    assert "skipped steps" not in counts
    assert counts["scale"] == 2 ** (16 - (12 - steps))


def test_an_overflow_counts_once_for_the_optimizer_that_skipped(rig):
    judge, maker = make_model(0, out=1), make_model(1, out=1)
    x = torch.ones(4, 16)
    with rig(amp="float16") as runtime:
        first, second = (torch.optim.SGD(m.parameters(), lr=1e-3) for m in (judge, maker))
        (judge(x).sum() * 1e3).backward()
        first.step()  # skipped; its gradients stay infinite until they are dropped
        for _ in range(12):
            second.zero_grad()
            (maker(x).mean() * 1e-3).backward()
            second.step()
        counts = runtime.outcomes()["loss_scaling"].counts
    assert counts["skipped steps"] == 1
    assert counts["scale"] == 2**15


def test_accumulation_that_overflowed_waits_for_its_step(rig, data):
    inputs, targets = data

    def train(scaler: Any) -> list[Any]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            for part in range(2):
                output = model(inputs[step, part]) if scaler is None else fp16(
                    model, inputs[step, part]
                )  # fmt: skip
                loss = loss_of(output, targets[step, part], step, boom=part == 0)
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        return bits(model)

    scaler = torch.amp.GradScaler("cpu")
    by_hand = train(scaler)
    with rig(amp="float16") as runtime:
        assert same(train(None), by_hand)
        assert runtime.outcomes()["loss_scaling"].counts["scale"] == scaler.get_scale()


def test_inputs_with_a_gradient_of_their_own(rig, data):
    inputs, targets = data
    model = make_model()

    def attack() -> Any:
        points = inputs[0, 0].clone().requires_grad_()
        nn.functional.cross_entropy(model(points), targets[0, 0]).backward()
        return points.grad

    expected = attack()
    with rig(amp="float16"):
        torch.testing.assert_close(attack(), expected, rtol=0.02, atol=2e-4)


def test_one_pass_for_several_losses_and_given_gradients(rig, data):
    inputs, _ = data

    def gradient(scaled: bool) -> Any:
        model = make_model()
        output = model(inputs[0, 0])
        seed = torch.full_like(output, 0.01)
        if scaled:
            torch.autograd.backward([output.mean(), output], [None, seed])
        else:
            (output.mean() + (output * seed).sum()).backward()
        return next(model.parameters()).grad

    expected = gradient(scaled=False)
    with rig(amp="float16"):
        torch.testing.assert_close(gradient(scaled=True), expected, rtol=0.02, atol=2e-3)


def test_a_loop_without_an_optimizer_drops_what_overflows(rig, data):
    inputs, targets = data
    model = make_model()
    with rig(amp="float16") as runtime:
        for step in range(STEPS):
            loss = loss_of(model(inputs[step, 0]), targets[step, 0], step, boom=True)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        outcome = runtime.outcomes()["loss_scaling"]
    assert all(p.isfinite().all() for p in model.parameters())
    assert outcome.counts["scale"] == 2**15


def test_checkpointed_blocks_are_scaled_once(rig, data):
    from torch.utils.checkpoint import checkpoint

    inputs, targets = data
    model = make_model()

    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(model)

        def forward(self, x: Any) -> Any:
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)

    nn.functional.cross_entropy(model(inputs[0, 0]), targets[0, 0]).backward()
    wrapped = Reentrant()
    with rig(amp="float16"):
        nn.functional.cross_entropy(wrapped(inputs[0, 0].clone()), targets[0, 0]).backward()
    for expected, actual in zip(model.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=0.02, atol=2e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_closure_at_the_beginning_of_a_step(rig, data, name):
    """As frameworks call the optimizers that evaluate it once."""
    inputs, targets = data

    def train(scaler: Any) -> list[Any]:
        model = make_model()
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(STEPS):

            def closure(step: int = step) -> Any:
                optimizer.zero_grad()
                loss = loss_of(model(inputs[step, 0]), targets[step, 0], step, boom=True)
                loss.backward()
                return loss

            if scaler is None:
                optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
                continue
            optimizer.zero_grad()
            output = fp16(model, inputs[step, 0])
            scaler.scale(loss_of(output, targets[step, 0], step, boom=True)).backward()
            scaler.step(optimizer)
            scaler.update()
        return bits(model)

    by_hand = train(torch.amp.GradScaler("cpu"))
    with rig(amp="float16") as runtime:
        assert same(train(None), by_hand)
        counts = runtime.outcomes()["loss_scaling"].counts
    assert (counts["steps"], counts["skipped steps"]) == (STEPS - 1, 1)


def test_a_closure_of_an_optimizer_that_nothing_is_known_of(rig, data, capsys):
    inputs, targets = data
    model = make_model()

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            return closure()

    optimizer = Twice(model.parameters(), lr=0.1)

    def closure() -> Any:
        loss = nn.functional.cross_entropy(model(inputs[0, 0]), targets[0, 0])
        loss.backward()
        return loss

    with rig(amp="float16"), pytest.raises(SystemExit) as left:
        optimizer.step(closure)
    assert left.value.code == 78
    assert "[fp16-closure]" in capsys.readouterr().err


def test_a_closure_is_refused(rig, data, capsys):
    inputs, targets = data
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> Any:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[0, 0]), targets[0, 0])
        loss.backward()
        return loss

    with rig(amp="float16"), pytest.raises(SystemExit) as left:
        optimizer.step(closure)
    assert left.value.code == 78
    assert "[fp16-closure]" in capsys.readouterr().err


def test_the_scripts_own_scaler_is_left_alone(rig, data):
    inputs, targets = data

    def train() -> tuple[list[Any], float]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        for step in range(5):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(fp16(model, inputs[step, 0]), targets[step, 0])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return bits(model), scaler.get_scale()

    expected = train()
    with rig(amp="float16") as runtime:
        found = train()
        outcomes = runtime.outcomes()
    assert same(found[0], expected[0])
    assert outcomes["amp"].state is State.CEDED
    assert outcomes["loss_scaling"].state is not State.APPLIED


def test_an_error_in_backward_leaves_gradients_unscaled(rig, data):
    inputs, targets = data
    model = make_model()
    with rig(amp="float16"):
        loss = nn.functional.cross_entropy(model(inputs[0, 0]), targets[0, 0])
        loss.backward()
        before = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert same([p.grad for p in model.parameters()], before)


def test_it_steps_back_with_amp(rig, data):
    inputs, targets = data
    with rig(amp="float16") as runtime:
        model = make_model()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(inputs[0, 0])
        nn.functional.cross_entropy(output.float(), targets[0, 0]).backward()
        assert runtime.outcomes()["loss_scaling"].state is State.CEDED


def test_a_model_that_amp_leaves_alone_needs_no_scaling(rig, data):
    inputs, targets = data
    with rig(amp="float16") as runtime:
        model = make_model().double()
        nn.functional.cross_entropy(model(inputs[0, 0].double()), targets[0, 0]).backward()
        outcome = runtime.outcomes()["loss_scaling"]
    assert outcome.state is State.SKIPPED
    assert "float64" in outcome.reason


def test_everything_is_put_back(rig):
    before = (torch.autograd.backward, torch.autograd.grad, torch.optim.Optimizer.__init__)
    with rig(amp="float16"):
        assert torch.autograd.backward is not before[0]
    assert (torch.autograd.backward, torch.autograd.grad, torch.optim.Optimizer.__init__) == before


@pytest.mark.parametrize("between", ["metric", "optimizer", "root dies", "another pass"])
def test_an_overflow_is_known_whatever_the_script_does_before_the_step(rig, between):
    """New models and optimizers begin with the next backward pass."""
    x = torch.ones(4, 16)
    model, metric, other = make_model(), make_model(1), make_model(2)
    weights = bits(model)
    with rig(amp="float16") as runtime:
        sgd = torch.optim.SGD(model.parameters(), lr=1e-6)
        other(x)
        (model(x).sum() * 1e38).backward()
        if between == "metric":
            metric(x)
        elif between == "optimizer":
            sgd = torch.optim.SGD(model.parameters(), lr=1e-6)
        elif between == "root dies":
            del other
        else:
            metric(x).sum().backward()
        sgd.step()
        assert same(bits(model), weights)
        assert runtime.outcomes()["loss_scaling"].counts["skipped steps"] == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_that_takes_the_place_of_another(rig, fused):
    """Its overflow skips the step, and lowers the scale."""
    x = torch.ones(4, 16)
    with rig(amp="float16") as runtime:
        model = nn.Linear(16, 4, bias=False)
        adam = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        model(x).mean().backward()
        adam.step()
        adam.zero_grad()
        model.weight = nn.Parameter(model.weight.detach().clone())
        adam.param_groups[0]["params"][0] = model.weight
        [weight] = bits(model)
        (model(x).sum() * 1e38).backward()
        adam.step()
        assert torch.equal(model.weight, weight)
        adam.zero_grad()
        model(x).mean().backward()
        counts = runtime.outcomes()["loss_scaling"].counts
    assert (counts["steps"], counts["skipped steps"], counts["scale"]) == (1, 1, 2**15)


def test_parameters_that_a_script_replaces_in_each_step_lower_the_scale(rig):
    """Without an optimizer nothing has a list of them."""
    x = torch.ones(4, 16)
    with rig(amp="float16") as runtime:
        model = nn.Linear(16, 4, bias=False)
        for _ in range(3):
            (model(x).sum() * 1e38).backward()
            model.weight = nn.Parameter(model.weight.detach().clone())
        counts = runtime.outcomes()["loss_scaling"].counts
    assert counts["scale"] == 2**14
