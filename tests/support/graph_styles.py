"""Small models and loops in many styles, for the rehearsal of CUDA graphs.

A style is a model's class and a loop that trains it for `STEPS` steps and returns tensors that it
has kept; what they hold is read after its end.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

STEPS = 10
Build = Callable[[], nn.Module]
Loop = Callable[[Any], list[Tensor]]


def batches(steps: int = STEPS) -> Iterator[Tensor]:
    """Yield batches (4, 4), the same ones each time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(4, 4, generator=generator)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


class Net(nn.Module):
    """A plain model; others override what they do with its features."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.features(x))


def weights(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


# Loops


def plain(model: nn.Module) -> list[Tensor]:
    """Losses are kept with their autograd graphs."""
    optimizer, losses = sgd(model), []
    for x in batches():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return [*losses, *weights(model)]


def detached(model: nn.Module) -> list[Tensor]:
    optimizer, losses, outputs = AdamW(model.parameters()), [], []
    for x in batches():
        output = model(x)
        loss = output.square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        outputs.append(output.detach())
    return [*losses, *outputs, *weights(model)]


def counted(model: nn.Module) -> list[Tensor]:
    optimizer, total = sgd(model), 0.0
    for x in batches():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return [torch.tensor(total)]


def zeroes_late(model: nn.Module) -> list[Tensor]:
    """Forward, zero_grad, backward, step; the gradients are read until they are dropped."""
    norms: list[Tensor] = []
    optimizer = sgd(model)
    for x in batches():
        loss = model(x).square().mean()
        norms.extend(p.grad.norm() for p in model.parameters() if p.grad is not None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [*norms, *weights(model)]


def zeroes_late_in_place(model: nn.Module) -> list[Tensor]:
    optimizer = sgd(model)
    for x in batches():
        loss = model(x).square().mean()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
    return weights(model)


def zeroes_in_place(model: nn.Module) -> list[Tensor]:
    optimizer = sgd(model)
    for x in batches():
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()
    return weights(model)


def zeroes_now_and_then(model: nn.Module) -> list[Tensor]:
    """Gradients of several steps add up."""
    optimizer = sgd(model)
    for number, x in enumerate(batches()):
        model(x).square().mean().backward()
        optimizer.step()
        if number % 3 == 2:
            optimizer.zero_grad()
    return weights(model)


def changes_order(model: nn.Module) -> list[Tensor]:
    """Zeroes first, then late, then not at all for two steps."""
    optimizer = sgd(model)
    for number, x in enumerate(batches(3 * STEPS)):
        if number < STEPS:
            optimizer.zero_grad()
        loss = model(x).square().mean()
        if STEPS <= number < 2 * STEPS or number % 3 == 0:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def validates(model: nn.Module) -> list[Tensor]:
    optimizer, kept = sgd(model), []
    for number, x in enumerate(batches()):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if number % 2:
            with torch.no_grad():
                kept.append(model(x))
                kept.append(model.eval()(x))
            model.train()
    return [*kept, *weights(model)]


def averages(model: nn.Module) -> list[Tensor]:
    """Keep an average of the weights."""
    optimizer, average = sgd(model), copy.deepcopy(model).requires_grad_(False)
    for x in batches():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        for mean, p in zip(average.parameters(), model.parameters(), strict=True):
            mean.mul_(0.9).add_(p.detach(), alpha=0.1)
    return weights(average)


def two_optimizers(model: Any) -> list[Tensor]:
    optimizers = sgd(model.first), AdamW(model.last.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 2)
    for x in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        schedule.step()
    return weights(model)


def retains(model: nn.Module) -> list[Tensor]:
    """Two backward passes through the same call."""
    optimizer = sgd(model)
    for x in batches():
        optimizer.zero_grad()
        output = model(x)
        output.square().mean().backward(retain_graph=True)
        output.abs().mean().backward()
        optimizer.step()
    return weights(model)


def recurs(model: nn.Module) -> list[Tensor]:
    """A state is passed on from call to call."""
    optimizer, state, states = sgd(model), torch.zeros(4, 8), []
    for x in batches():
        optimizer.zero_grad()
        output, state = model(x, state)
        output.square().mean().backward()
        optimizer.step()
        state = state.detach()
        states.append(state)
    return [*states, *weights(model)]


def takes_fields(model: nn.Module) -> list[Tensor]:
    """The output is an object with a field `out`; the objects are kept."""
    optimizer, kept = sgd(model), []
    for x in batches():
        optimizer.zero_grad()
        output = model(x)
        output.out.square().mean().backward()
        optimizer.step()
        kept.append(output)
    return [*(box.out for box in kept), *weights(model)]


def takes_items(model: nn.Module) -> list[Tensor]:
    optimizer, kept = sgd(model), []
    for x in batches():
        optimizer.zero_grad()
        output = model(x)
        output["out"].square().mean().backward()
        optimizer.step()
        kept.append(output)
    return [*(found["out"] for found in kept), *weights(model)]


def keeps_aux(model: Any) -> list[Tensor]:
    optimizer, kept = sgd(model), []
    for x in batches():
        optimizer.zero_grad()
        (model(x).square().mean() + model.aux).backward()
        optimizer.step()
        kept.append(model.aux.detach())
    return [*kept, *weights(model)]


def accumulates(model: nn.Module) -> list[Tensor]:
    optimizer = sgd(model)
    for number, x in enumerate(batches()):
        (model(x).square().mean() / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def calls_twice(model: nn.Module) -> list[Tensor]:
    optimizer = sgd(model)
    for x in batches():
        optimizer.zero_grad()
        (model(x) - model(2 * x)).square().mean().backward()
        optimizer.step()
    return weights(model)


def adversarial(model: nn.Module) -> list[Tensor]:
    """Two models in turn, as in a GAN."""
    judge = Net()
    optimizers = sgd(model), sgd(judge)
    for x in batches():
        optimizers[1].zero_grad()
        made = model(x)
        (judge(x) - judge(made.detach())).mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        judge(made).mean().backward()
        optimizers[0].step()
    return [*weights(model), *weights(judge)]


def keeps_gradients(model: nn.Module) -> list[Tensor]:
    optimizer, kept = sgd(model), []
    for x in batches():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        kept.append(next(model.parameters()).grad)
    return [*[g for g in kept if g is not None], *weights(model)]


def keeps_gradients_late(model: nn.Module) -> list[Tensor]:
    """Begins to keep gradients once CUDA graphs are in use, and drops them after the forward."""
    optimizer, kept = sgd(model), []
    for number, x in enumerate(batches()):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number > STEPS // 2:
            kept.append(next(model.parameters()).grad)
    return [*[g for g in kept if g is not None], *weights(model)]


def keeps_views_of_gradients(model: nn.Module) -> list[Tensor]:
    optimizer, kept = sgd(model), []
    for x in batches():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        kept.append(gradient.detach())
    return [*kept, *weights(model)]


def keeps_asked_gradients(model: nn.Module) -> list[Tensor]:
    """Gradients by torch.autograd.grad, beside those of the backward pass."""
    kept: list[Tensor] = []
    optimizer = sgd(model)
    for x in batches():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        kept.extend(torch.autograd.grad(loss, [*model.parameters()], retain_graph=True))
        loss.backward()
        optimizer.step()
    return [*kept, *weights(model)]


def delays(model: nn.Module) -> list[Tensor]:
    """Another optimizer steps between two calls that one backward pass goes through."""
    scale: Any = nn.Parameter(torch.ones(()))
    own, other = sgd(model), SGD([scale], lr=0.1)
    pending: list[Tensor] = []
    for x in batches():
        pending.append(model(x).square().mean())
        other.zero_grad()
        loss: Any = torch.square(scale - 2)
        loss.backward()
        other.step()
        if len(pending) == 2:
            own.zero_grad()
            loss = torch.stack(pending).sum()
            loss.backward()
            own.step()
            pending.clear()
    return weights(model)


def differentiates_inputs(model: nn.Module) -> list[Tensor]:
    """The inputs take gradients, and stand in a list."""
    optimizer, kept = sgd(model), []
    for x in batches():
        optimizer.zero_grad()
        parts = [x.requires_grad_()]
        model(parts).square().mean().backward()
        optimizer.step()
        kept.append(x.grad)
    return [*[g for g in kept if g is not None], *weights(model)]


# Models that are safe


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.first(x)))


class InPlaceEma(Net):
    ema: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(8))

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        with torch.no_grad():
            self.ema.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h + self.ema


class Rotary(Net):
    """Makes a table in its first call, and keeps it."""

    table: Tensor | None = None

    def features(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.cos(torch.arange(8.0, device=x.device))
        return super().features(x) * self.table


class Recurrent(Net):
    def forward(self, x: Tensor, state: Any = None) -> Any:
        state = torch.tanh(self.first(x) + state)
        return self.last(state), state


@dataclass
class Fields:
    out: Tensor


class InDataclass(Net):
    def forward(self, x: Tensor) -> Any:
        return Fields(super().forward(x))


class InDict(Net):
    def forward(self, x: Tensor) -> Any:
        return {"out": super().forward(x)}


class OfList(Net):
    def forward(self, x: Any) -> Any:
        return super().forward(x[0])


# Models that keep what they compute


class Memory(Net):
    """Reads what its last call has left."""

    def __init__(self) -> None:
        super().__init__()
        self.mem: Any = None

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        if self.mem is not None:
            h = h + 0.1 * self.mem
        self.mem = h.detach()
        return h


class NewEma(Net):
    """Reassigns a buffer."""

    ema: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(8))

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        self.ema = 0.9 * self.ema + 0.1 * h.detach().mean(0)
        return h + self.ema


class Aux(Net):
    aux: Any = None

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        self.aux = 0.01 * h.square().mean()
        return h


class State:
    """A plain object."""

    def __init__(self) -> None:
        self.h: Tensor = torch.zeros(4, 8)


class InObject(Net):
    def __init__(self) -> None:
        super().__init__()
        self.state = State()

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x) + 0.1 * self.state.h
        self.state.h = h.detach()
        return h


class Slotted:
    __slots__ = ("h",)

    def __init__(self) -> None:
        self.h = torch.zeros(4, 8)


class InSlots(InObject):
    def __init__(self) -> None:
        super().__init__()
        self.state: Any = Slotted()


class InDeque(Net):
    """A cache of the last features."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: deque[Tensor] = deque(maxlen=3)

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        for old in self.cache:
            h = h + 0.1 * old
        self.cache.append(h.detach())
        return h


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 8)
        self.cache: dict[str, list[Tensor]] = {"h": [torch.zeros(4, 8)]}

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x) + 0.1 * self.cache["h"][0]
        self.cache["h"] = [h.detach()]
        return h


class InBlock(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()


class OnClass(Net):
    before: Any = None

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        if OnClass.before is not None:
            h = h + 0.1 * OnClass.before
        OnClass.before = h.detach()
        return h


class Hooked(Net):
    """A hook takes features to a dictionary that only its closure holds."""

    def __init__(self) -> None:
        super().__init__()
        found = {"h": torch.zeros(4, 8)}

        def hook(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
            output = output + 0.1 * found["h"]
            found["h"] = output.detach()
            return output

        self.first.register_forward_hook(hook)


class BackwardHooked(Net):
    """A hook keeps gradients of features."""

    def __init__(self) -> None:
        super().__init__()
        KEPT.clear()
        self.first.register_full_backward_hook(lambda *found: KEPT.append(found[2][0]))


class HookedFeatures(Net):
    def features(self, x: Tensor) -> Tensor:
        h: Any = super().features(x)
        h.register_hook(lambda gradient: KEPT.append(gradient))
        return torch.relu(h)


class OnParameter(Net):
    """Keeps its features on a parameter."""

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x) + 0.1 * getattr(self.first.weight, "before", torch.zeros(4, 8))
        self.first.weight.before = h.detach()  # type: ignore[attr-defined]
        return h


KEPT: list[Tensor] = []


class InGlobal(Net):
    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        KEPT.append(h.detach())
        return h


def reads_global(model: nn.Module) -> list[Tensor]:
    KEPT.clear()
    plain(model)
    return [*KEPT, *weights(model)]


class Later(Net):
    """Keeps its features once it is told to."""

    keeping = False
    mem: Any = None

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        if self.mem is not None:
            h = h + 0.1 * self.mem
        if self.keeping:
            self.mem = h.detach()
        return h


def keeps_late(model: Any) -> list[Tensor]:
    """Has the model keep its features when CUDA graphs are in use already."""
    optimizer = sgd(model)
    for number, x in enumerate(batches()):
        model.keeping = number > STEPS // 2
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return weights(model)


class Box:
    def __init__(self, out: Tensor) -> None:
        self.out = out


class InBox(Net):
    """Returns an object that says nothing of what it holds."""

    def forward(self, x: Tensor) -> Any:
        return Box(super().forward(x))


@dataclass
class Outer:
    box: Box

    @property
    def out(self) -> Tensor:
        return self.box.out


class InBoxedField(Net):
    def forward(self, x: Tensor) -> Any:
        return Outer(Box(super().forward(x)))


class InProxy(Net):
    """Returns a mapping that can't be changed."""

    def forward(self, x: Tensor) -> Any:
        return MappingProxyType({"out": super().forward(x)})
