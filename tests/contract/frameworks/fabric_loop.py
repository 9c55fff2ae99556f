"""Trains a classifier in a loop of Lightning Fabric."""

import argparse

import torch
from lightning.fabric import Fabric
from telling import tell
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    """Returns its loss by a method of its own, as well as its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y)


parser = argparse.ArgumentParser()
parser.add_argument("--precision", default="32-true")
parser.add_argument("--fused", action="store_const", const=True)
args = parser.parse_args()

fabric = Fabric(accelerator="cpu", devices=1, precision=args.precision)
torch.manual_seed(0)
x = torch.randn(64, 8)
y = (x.sum(1) > 0).long()
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, y), batch_size=8))
model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=args.fused)
model, optimizer = fabric.setup(model, optimizer)
model.mark_forward_method("loss")

losses = []
for inputs, labels in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels) + model.loss(inputs, labels)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    losses.append(loss.item())
tell(losses, model)
