"""Models, data and losses of data_parallel_overhead.py and data_parallel_traffic.py.

A task is the same in every process. The loops are in parallel_loop.py.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from models import CifarNet, Gpt, GptWithLoss
from torch import Tensor, nn
from torch.nn import functional

BATCHES = 16  # of an epoch
CLASSES = 10
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """A model with the data of an epoch.

    Attributes:
        model: The model.
        inputs: Those of all batches.
        targets: Those of all batches.
        batch: Samples of a batch, over all ranks.
        loss: Returns the loss of a batch.
    """

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    batch: int
    loss: Loss


def outside(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss, computed in the loop."""
    logits = model(x)
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), y.flatten())


def inside(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss, computed in the model."""
    loss: Tensor = model(x, y)[1]
    return loss


def mlp() -> Task:
    """Return three layers, for a step of a few milliseconds."""
    batch, width = 512, 512
    sizes = [width, width, width, CLASSES]
    layers: list[nn.Module] = []
    data = torch.randn(batch * BATCHES, width), torch.randint(0, CLASSES, (batch * BATCHES,))
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.GELU()]
    return Task(nn.Sequential(*layers[:-1]), *data, batch, outside)


def convnet() -> Task:
    """Return a narrow ResNet-8 with BatchNorm over images of 32 by 32."""
    batch = 64
    images = torch.randn(batch * BATCHES, 3, 32, 32)
    return Task(CifarNet(width=8), images, torch.randint(CLASSES, (len(images),)), batch, outside)


def _gpt(
    kind: Callable[..., nn.Module], loss: Loss, vocabulary: int, layers: int, batch: int
) -> Task:
    seq = 64
    tokens = torch.randint(vocabulary, (batch * BATCHES, seq + 1))
    model = kind(vocabulary, seq, layers, 128, 4)
    return Task(model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), batch, loss)


def transformer_outside() -> Task:
    """Return a GPT of four layers and 256 tokens."""
    return _gpt(Gpt, outside, 256, 4, 16)


def transformer_inside() -> Task:
    """Return the same GPT with the loss in its forward."""
    return _gpt(GptWithLoss, inside, 256, 4, 16)


def language_model() -> Task:
    """Return a GPT whose logits take most memory: 32,000 for each of 512 tokens."""
    return _gpt(Gpt, outside, 32_000, 2, 8)


def language_model_inside() -> Task:
    """Return the same GPT with the loss in its forward."""
    return _gpt(GptWithLoss, inside, 32_000, 2, 8)


TASKS: dict[str, Callable[[], Task]] = {
    f.__name__: f
    for f in (
        *(mlp, convnet, transformer_outside, transformer_inside),
        *(language_model, language_model_inside),
    )
}


def build_task(name: str) -> Task:
    """Return a task, the same in every process."""
    torch.manual_seed(0)
    return TASKS[name]()
