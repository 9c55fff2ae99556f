"""Trains a convolutional network the way timm's train.py does, averaged copy and all."""

import argparse
import contextlib
import copy
from functools import partial
from typing import Any

import torch
from telling import tell
from torch import Tensor, nn

parser = argparse.ArgumentParser()
parser.add_argument("--amp", action="store_true")
parser.add_argument("--fused", action="store_const", const=True)
args = parser.parse_args()


class NativeScaler:
    """Scales the loss, clips the gradients and makes the step."""

    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("cpu")

    def __call__(self, loss: Tensor, optimizer: Any, parameters: Any) -> None:
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        self._scaler.step(optimizer)
        self._scaler.update()


class ModelEma:
    """An exponential moving average of a model."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        values = zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
        for average, value in values:
            average.copy_(self.decay * average + (1 - self.decay) * value)


def mixup(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    targets = nn.functional.one_hot(labels, 4).float()
    part = float(torch.distributions.Beta(0.8, 0.8).sample())
    return part * x + (1 - part) * x.flip(0), part * targets + (1 - part) * targets.flip(0)


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, bias=False),
    nn.BatchNorm2d(8),
    nn.SiLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(8, 4),
)
model = model.to(memory_format=torch.channels_last)
images = torch.randn(8, 8, 3, 8, 8)
labels = torch.randint(0, 4, (8, 8))
autocast = contextlib.nullcontext
scaler = None
if args.amp:
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    scaler = NativeScaler()
ema = ModelEma(model, decay=0.9)
optimizer = torch.optim.SGD(
    model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=args.fused
)

losses = []
for batch, answers in zip(images, labels, strict=True):
    x, targets = mixup(batch.contiguous(memory_format=torch.channels_last), answers)
    with autocast():
        loss = nn.functional.cross_entropy(model(x), targets)
    optimizer.zero_grad()
    if scaler:
        scaler(loss, optimizer, model.parameters())
    else:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    ema.update(model)
    losses.append(loss.item())

model.eval()
with torch.no_grad(), autocast():
    outputs = [net(images[0]) for net in (model, ema.module)]
    losses += [nn.functional.cross_entropy(output, labels[0]).item() for output in outputs]
tell(losses, nn.ModuleList([model, ema.module]))
