"""Steps of fused optimizers under fp16, which skip by themselves: GradScaler's, and no read."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.shim.levers.loss_scaling import device_steps, lever

STEPS = 8
BOOMS = ((), (3,), (0, 1, 5))  # the steps whose losses overflow
Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adam": lambda p, **own: torch.optim.Adam(p, lr=1e-2, amsgrad=True, **own),
    "adamw": lambda p, **own: torch.optim.AdamW(p, lr=1e-2, **own),
    "sgd": lambda p, **own: torch.optim.SGD(p, lr=0.1, weight_decay=1e-3, **own),
    "momentum": lambda p, **own: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **own),
    "adagrad": lambda p, **own: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, **own),
}
OWN: dict[str, Any] = {"fused": True}  # as the script may have it, instead of the lever
CASES = [(name, {}) for name in OPTIMIZERS] + [("adamw", OWN)]
# Without a first step of momentum that overflows, in which torch leaves garbage.
LIKE_TORCH = [
    (*case, booms)
    for case in CASES
    for booms in BOOMS
    if not (case[0] == "momentum" and 0 in booms)
]
every_optimizer = pytest.mark.parametrize(("name", "own"), CASES)


class Loop:
    """A loop with a schedule and clipping, whose loss overflows at some steps."""

    def __init__(self, make: Make, booms: tuple[int, ...] = (), **own: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4))
        self.optimizer = make(self.model.parameters(), **own)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.inputs = torch.randn(STEPS, 24, 16)
        self.targets = torch.randint(0, 4, (STEPS, 24))
        self._booms = booms

    def loss(self, step: int, output: Any) -> Any:
        loss = nn.functional.cross_entropy(output.float(), self.targets[step])
        return loss * 1e38 if step in self._booms else loss

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step, self.model(self.inputs[step])).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)

    def script(self, around: Any = None) -> Loop:
        for step in range(STEPS):
            self.backward(step)
            with around or nullcontext():
                self.optimizer.step()
            self.schedule.step()
        return self

    def by_hand(self, scaler: Any) -> Loop:
        for step in range(STEPS):
            self.optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                output = self.model(self.inputs[step])
            scaler.scale(self.loss(step, output)).backward()
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            scaler.step(self.optimizer)
            scaler.update()
            self.schedule.step()
        return self

    def weights(self) -> list[Any]:
        return [p.detach().clone() for p in self.model.parameters()]

    def assert_weights(self, other: Loop) -> None:
        assert all(map(torch.equal, self.weights(), other.weights()))


def assert_same_states(found: dict[Any, Any], expected: dict[Any, Any]) -> None:
    """Compare two states of optimizers, bit for bit, whatever lies in them."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same_states(found[key], value)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


class Reads(TorchDispatchMode):
    """Counts numbers that are read from tensors: on a GPU, each waits for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "own", "booms"), LIKE_TORCH)
def test_it_is_gradscaler_with_a_fused_optimizer(
    rig: Any, name: str, own: dict[str, Any], booms: tuple[int, ...]
) -> None:
    scaler = torch.amp.GradScaler("cpu")
    by_hand = Loop(OPTIMIZERS[name], booms, fused=True).by_hand(scaler)
    with rig(amp="float16", optimizer="fused") as runtime:
        found = Loop(OPTIMIZERS[name], booms, **own).script()
        counts = runtime.outcomes()["loss_scaling"].counts
        state = found.optimizer.state_dict()["state"]
    found.assert_weights(by_hand)
    assert_same_states(state, by_hand.optimizer.state_dict()["state"])
    assert found.schedule.state_dict() == by_hand.schedule.state_dict()
    assert (counts["steps"], counts.get("skipped steps", 0)) == (STEPS - len(booms), len(booms))
    assert counts["scale"] == scaler.get_scale() == 2 ** (16 - len(booms))


@every_optimizer
def test_it_is_the_loop_whose_overflows_the_host_reads(
    rig: Any, monkeypatch: pytest.MonkeyPatch, name: str, own: dict[str, Any]
) -> None:
    def weights() -> tuple[Loop, dict[str, int]]:
        with rig(amp="float16", optimizer="fused") as runtime:
            loop = Loop(OPTIMIZERS[name], (0, 1, 5), **own).script()
            return loop, runtime.outcomes()["loss_scaling"].counts

    found, counts = weights()
    monkeypatch.setattr(lever, "skips_by_itself", lambda *_: False)
    expected, expected_counts = weights()
    found.assert_weights(expected)
    assert counts == expected_counts


@every_optimizer
def test_no_step_reads_a_number(rig: Any, name: str, own: dict[str, Any]) -> None:
    with rig(amp="float16", optimizer="fused"):
        loop = Loop(OPTIMIZERS[name], (3,), **own)
        loop.script()  # past the first step, which writes the first report
        reads = Reads()
        loop.script(reads)
    assert reads.count == 0


def test_other_steps_are_read(rig: Any) -> None:
    """The counter of reads counts, and an optimizer without a kernel still skips."""
    with rig(amp="float16", optimizer="keep") as runtime:
        loop = Loop(OPTIMIZERS["adamw"], (3,))
        reads = Reads()
        loop.script(reads)
        assert runtime.outcomes()["loss_scaling"].counts["skipped steps"] == 1
    assert reads.count >= STEPS


def test_a_closure_at_the_beginning_of_a_fused_step(rig: Any) -> None:
    by_hand = Loop(OPTIMIZERS["adamw"], (3,), fused=True).by_hand(torch.amp.GradScaler("cpu"))
    with rig(amp="float16", optimizer="fused") as runtime:
        found = Loop(OPTIMIZERS["adamw"], (3,))
        for step in range(STEPS):
            found.optimizer.step(lambda step=step: found.backward(step))
            found.schedule.step()
        counts = runtime.outcomes()["loss_scaling"].counts
    found.assert_weights(by_hand)
    assert (counts["steps"], counts["skipped steps"]) == (STEPS - 1, 1)


def test_the_optimizer_is_the_scripts_own_after_a_step(rig: Any) -> None:
    with rig(amp="float16", optimizer="fused"):
        loop = Loop(OPTIMIZERS["adamw"])
        attributes = {*vars(loop.optimizer), "_opt_called"}  # a scheduler's
        seen: list[float] = []
        loop.optimizer.register_step_post_hook(lambda o, *_: seen.append(float(o.found_inf)))
        loop.script()
        assert set(vars(loop.optimizer)) == attributes
        assert not hasattr(copy.deepcopy(loop.optimizer), "found_inf")
        assert not hasattr(pickle.loads(pickle.dumps(loop.optimizer)), "found_inf")
    assert seen == [0.0] * STEPS


def test_what_a_step_that_raised_was_told_is_forgotten(rig: Any) -> None:
    with rig(amp="float16", optimizer="fused"):
        loop = Loop(OPTIMIZERS["adamw"], (0,))

        def boom(*_: Any) -> None:
            raise KeyError

        hook = loop.optimizer.register_step_post_hook(boom)
        loop.backward(0)
        with pytest.raises(KeyError):
            loop.optimizer.step()
        hook.remove()
        before = loop.weights()
        loop.backward(1)
        loop.optimizer.step()
        assert not any(map(torch.equal, before, loop.weights()))
        assert "found_inf" not in vars(loop.optimizer)


def test_the_first_step_with_momentum_leaves_no_garbage(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty_like
    nan = float("nan")
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty(*a, **k).fill_(nan))
    with rig(amp="float16", optimizer="fused"):
        loop = Loop(OPTIMIZERS["momentum"], (0, 1)).script()
    assert all(p.isfinite().all() for p in loop.model.parameters())


def test_a_step_of_a_subclass_is_read(rig: Any) -> None:
    """It may do anything, and inherits a flag that says that it can be told."""

    class Plain(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p -= 1e-3 * p.grad

    with rig(amp="float16", optimizer="fused"):
        loop = Loop(lambda p, **own: Plain(p, **own), (2,), fused=True)
        assert loop.optimizer._step_supports_amp_scaling
        loop.script()
    assert all(p.isfinite().all() for p in loop.model.parameters())


def test_groups_of_which_one_is_not_fused(rig: Any) -> None:
    """torch's other implementations refuse to be told."""

    def grouped(parameters: Any, **own: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        groups = [{"params": [first], "fused": True}, {"params": others, "fused": False}]
        return torch.optim.AdamW(groups, lr=1e-2, **own)

    def trained() -> Loop:
        with rig(amp="float16", optimizer="fused") as runtime:
            loop = Loop(grouped, (3,)).script()
            assert runtime.outcomes()["loss_scaling"].counts["skipped steps"] == 1
            return loop

    assert all(p.isfinite().all() for p in trained().model.parameters())


def test_an_overflow_of_a_parameter_that_two_optimizers_have(rig: Any) -> None:
    """Its count reaches each of them once: torch takes it off the step counters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with rig(amp="float16", optimizer="fused") as runtime:
        both = torch.optim.Adam(model.parameters(), lr=1e-2)
        one = torch.optim.Adam(model[1].parameters(), lr=1e-2)
        for factor in (1.0, 1e38):
            model.zero_grad()
            (model(torch.ones(2, 4)).mean() * factor).backward()
            both.step()
            one.step()
        counts = runtime.outcomes()["loss_scaling"].counts
    steps = [s["step"].item() for o in (both, one) for s in o.state.values()]
    assert steps == [1.0] * 6
    assert (counts["steps"], counts["skipped steps"]) == (2, 2)


def test_the_scripts_own_found_inf_stays(rig: Any) -> None:
    with rig(amp="float16", optimizer="fused"):
        loop = Loop(OPTIMIZERS["adamw"])
        own = loop.optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        loop.script()
        assert loop.optimizer.found_inf is own  # type: ignore[attr-defined]


def test_a_forked_child_counts_from_zero(rig: Any) -> None:
    with rig(amp="float16", optimizer="fused") as runtime:
        loop = Loop(OPTIMIZERS["adamw"], (3,)).script()
        runtime.outcomes()
        for recorder in runtime._recorders:
            recorder.reset()
        loop.backward(0)
        loop.optimizer.step()
        counts = runtime.outcomes()["loss_scaling"].counts
    assert (counts["steps"], counts.get("skipped steps")) == (1, None)


def test_a_gradient_that_two_parameters_share_hides_no_overflow(rig: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    before = [p.detach().clone() for p in model.parameters()]
    with rig(amp="float16", optimizer="fused"):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        model[2].weight.grad = model[1].weight.grad = torch.zeros(4, 4)
        torch.autograd.backward([(model[0].bias * 3e38).sum() + model(torch.ones(2, 4)).sum() * 0])
        sgd.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_step_on_another_device_than_the_scale_is_read() -> None:
    found = torch.zeros((), device="meta")
    fused = torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=True)
    assert device_steps.skips_by_itself(fused, torch.zeros(()))
    assert not device_steps.skips_by_itself(fused, found)


@pytest.mark.parametrize(
    ("kind", "told"), [("cpu", True), ("cuda", True), ("xpu", False), ("mps", False)]
)
def test_kernels_that_are_known_to_take_found_inf(kind: str, told: bool) -> None:
    found: Any = SimpleNamespace(device=torch.device(kind))
    for name, make in OPTIMIZERS.items():
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        fused = make([parameter], fused=True)
        own = told and name != "momentum"  # not at its first step
        assert device_steps.skips_by_itself(fused, found) is own, name


def test_a_step_of_sharded_parameters_is_read() -> None:
    shard: Any = nn.Parameter(torch.ones(2))
    shard._local_tensor = torch.ones(1)  # as a DTensor has it
    assert not device_steps.skips_by_itself(torch.optim.AdamW([shard], fused=True), torch.zeros(()))
