"""Trains one of six small models for a number of steps; knows nothing about fasttrain."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
from models import BasicBlock, Gpt, ResNet, UNet


def conv_block(inside: int, outside: int) -> nn.Module:
    conv = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outside), nn.ReLU())


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(256, 64), nn.LSTM(64, 64, batch_first=True)
        self.head = nn.Linear(64, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0]).flatten(0, 1)


MODELS = ("mlp", "conv", "gpt", "resnet18", "unet", "lstm")


def build(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    if name == "mlp":
        layers = (nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10))
        return nn.Sequential(*layers), torch.randn(512, 64), torch.randint(0, 10, (512,))
    if name == "conv":
        blocks = (conv_block(3, 16), conv_block(16, 16), nn.MaxPool2d(2), conv_block(16, 32))
        model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
        return model, torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,))
    if name == "resnet18":
        model = ResNet((2, 2, 2, 2), 64, 10, BasicBlock)
        return model, torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,))
    if name == "unet":
        return UNet(8, 2, 4), torch.randn(512, 3, 32, 32), torch.randint(0, 4, (512, 32, 32))
    tokens = torch.randint(0, 256, (512, 64))
    if name == "lstm":
        return Lstm(), tokens, tokens.roll(-1, 1)
    return Gpt(256, 64, 2, 64, 4), tokens, tokens.roll(-1, 1)


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="mlp", choices=MODELS)
parser.add_argument("--steps", type=int, default=300)
options = parser.parse_args()
torch.manual_seed(0)
model, inputs, targets = build(options.model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(options.steps):
    rows = slice(step * 16 % 512, step * 16 % 512 + 16)
    outputs = model(inputs[rows])
    expected = targets[rows].reshape(outputs.shape[:1] + outputs.shape[2:])
    loss = functional.cross_entropy(outputs, expected)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{loss.item():.4f}")
