"""Training loops of the wild, each of which once made torch_npu's fused optimizers go wrong."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

STEPS = 20
MIDDLE = STEPS // 2
BETAS = (0.9, 0.999)
Make = Callable[[Any], Any]
Loop = Callable[[Make], tuple[nn.Module, Any]]

MAKERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd-momentum": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01
    ),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95)),
    "adadelta": lambda p: torch.optim.Adadelta(p, rho=0.8),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, weight_decay=0.01),
    # A large eps, since the small difference of large averages magnifies every rounding.
    "rmsprop-centered": lambda p: torch.optim.RMSprop(
        p, lr=0.01, eps=0.1, momentum=0.9, centered=True
    ),
}


class Lamb(torch.optim.Optimizer):
    """Computes and keeps what torch_optimizer's Lamb does, of which it takes the name."""

    __module__ = "torch_optimizer.lamb"

    def __init__(self, params: Any) -> None:
        self.clamp_value, self.adam, self.debias = 10, False, False
        super().__init__(params, {"lr": 0.02, "betas": BETAS, "eps": 1e-6, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Any, group: Any) -> None:
        state = self.state[parameter]
        if not state:
            zeros = torch.zeros_like(parameter)
            state.update(step=0, exp_avg=zeros, exp_avg_sq=zeros.clone())
        state["step"] += 1
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(parameter.grad, 1 - group["betas"][0])
        square.lerp_(parameter.grad.square(), 1 - group["betas"][1])
        update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * parameter
        weight, size = parameter.norm().clamp(0, self.clamp_value), update.norm()
        ratio = weight / size
        state.update(weight_norm=weight, adam_norm=size, trust_ratio=ratio)
        parameter.sub_(group["lr"] * ratio * update)


class Task:
    """A small model on the device with its data, the same at each making."""

    def __init__(self, make: Make) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to("npu")
        self.x, self.y = torch.randn(8, 6).to("npu"), torch.randn(8, 3).to("npu")
        self.make = make
        self.optimizer = make(self.model.parameters())

    def backward(self) -> Any:
        loss = (self.model(self.x) - self.y).square().mean()
        loss.backward()
        return loss

    def steps(self, count: int = STEPS, at: dict[int, Callable[[], Any]] | None = None) -> Any:
        """Train; what is named for a step is done before it."""
        for number in range(count):
            (at or {}).get(number, bool)()
            self.optimizer.zero_grad()
            self.backward()
            self.optimizer.step()
        return self.model, self.optimizer


def _zeroing(zero: Callable[[Task], Any]) -> Loop:
    def loop(make: Make) -> Any:
        task = Task(make)
        for _ in range(STEPS):
            zero(task)
            task.backward()
            task.optimizer.step()
        return task.model, task.optimizer

    return loop


def _forget(task: Task) -> None:
    for parameter in task.model.parameters():
        parameter.grad = None


def _scheduled(make: Make) -> Any:
    task = Task(make)
    scheduler = torch.optim.lr_scheduler.StepLR(task.optimizer, 3, gamma=0.7)
    for _ in range(STEPS):
        task.steps(1)
        scheduler.step()
    return task.model, task.optimizer


def _accumulating(make: Make) -> Any:
    task = Task(make)
    for _ in range(STEPS):
        task.optimizer.zero_grad()
        task.backward()
        task.backward()
        nn.utils.clip_grad_norm_(task.model.parameters(), 0.1)
        task.optimizer.step()
    return task.model, task.optimizer


def _scaling(scaler_of: Callable[[], Any]) -> Loop:
    def loop(make: Make) -> Any:
        task, scaler = Task(make), scaler_of()
        for number in range(STEPS):
            task.optimizer.zero_grad()
            with torch.autocast("npu", dtype=torch.float16):
                out = task.model(task.x)
            loss = (out.float() - task.y).square().mean()
            scaler.scale(loss * (float("inf") if number in (0, MIDDLE) else 1.0)).backward()
            scaler.unscale_(task.optimizer)
            nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
            scaler.step(task.optimizer)
            scaler.update()
        return task.model, task.optimizer

    return loop


def _with_closure(make: Make) -> Any:
    task = Task(make)
    for _ in range(STEPS):

        def closure() -> Any:
            task.optimizer.zero_grad()
            return task.backward()

        assert task.optimizer.step(closure).item() > 0
    return task.model, task.optimizer


def _rolled_back(make: Make) -> Any:
    task = Task(make)
    task.steps(4)
    saved = copy.deepcopy((task.model.state_dict(), task.optimizer.state_dict()))

    def load() -> None:
        task.model.load_state_dict(saved[0])
        task.optimizer.load_state_dict(saved[1])

    return task.steps(at={14: load})


def _to_the_cpu_and_back(make: Make) -> Any:
    task = Task(make)
    return task.steps(at={14: lambda: (task.model.to("cpu"), task.model.to("npu"))})


def _unfrozen_late(make: Make) -> Any:
    task = Task(make)
    task.model[0].requires_grad_(False)
    return task.steps(at={14: lambda: task.model[0].requires_grad_(True)})


def _frozen_midway(make: Make) -> Any:
    task = Task(make)
    return task.steps(at={14: lambda: task.model[0].requires_grad_(False)})


def _group_added(make: Make) -> Any:
    task = Task(make)
    task.optimizer = make(task.model[0].parameters())
    more = {"params": list(task.model[2].parameters()), "lr": 0.02}
    return task.steps(at={14: lambda: task.optimizer.add_param_group(more)})


def _weights_averaged(make: Make) -> Any:
    """Evaluate with averaged weights now and then, by exchanging the data of the parameters."""
    task = Task(make)
    average = copy.deepcopy(task.model)

    def swap() -> None:
        for ours, theirs in zip(task.model.parameters(), average.parameters(), strict=True):
            ours.data, theirs.data = theirs.data, ours.data

    return task.steps(at={13: swap, 15: swap, 17: swap})


def _settings_changed(make: Make) -> Any:
    task = Task(make)

    def change() -> None:
        task.optimizer.param_groups[0]["maximize"] = True

    return task.steps(at={14: change})


def _state_reset(make: Make) -> Any:
    task = Task(make)
    return task.steps(at={14: task.optimizer.state.clear})


def _steps_set(make: Make) -> Any:
    """Warm up anew, by setting the counters of the steps."""
    task = Task(make)

    def reset() -> None:
        for state in task.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].zero_()

    return task.steps(at={14: reset})


def _pickled(make: Make) -> Any:
    task = Task(make)
    task.steps(14)
    task.model, task.optimizer = pickle.loads(pickle.dumps((task.model, task.optimizer)))
    return task.steps(STEPS - 14)


def _outlived(make: Make) -> Any:
    """Let the optimizer go before its state and the model, and another one take the memory."""
    task = Task(make)
    model, optimizer = task.steps()
    state = optimizer.state_dict()
    del task, optimizer
    gc.collect()
    Task(make).steps(3)
    return model, state


def _two_groups(make: Make) -> Any:
    task = Task(make)
    first, second = (list(task.model[i].parameters()) for i in (0, 2))
    task.optimizer = make([{"params": first}, {"params": second, "lr": 0.02, "weight_decay": 0.1}])
    return task.steps()


LOOPS: dict[str, Loop] = {
    "zero_grad": _zeroing(lambda task: task.optimizer.zero_grad()),
    "zero_grad-in-place": _zeroing(lambda task: task.optimizer.zero_grad(set_to_none=False)),
    "model.zero_grad": _zeroing(lambda task: task.model.zero_grad()),
    "grad=None": _zeroing(_forget),
    "scheduler": _scheduled,
    "accumulation-and-clipping": _accumulating,
    "GradScaler": _scaling(lambda: torch.amp.GradScaler("npu", init_scale=2.0**10)),
    "npu.GradScaler": _scaling(
        lambda: torch.npu.amp.GradScaler(init_scale=2.0**10)  # type: ignore[attr-defined]
    ),
    "closure": _with_closure,
    "rollback": _rolled_back,
    "cpu-and-back": _to_the_cpu_and_back,
    "unfrozen-late": _unfrozen_late,
    "frozen-midway": _frozen_midway,
    "group-added": _group_added,
    "weights-averaged": _weights_averaged,
    "settings-changed": _settings_changed,
    "state-reset": _state_reset,
    "steps-set": _steps_set,
    "pickled": _pickled,
    "outlived": _outlived,
    "two-groups": _two_groups,
}
