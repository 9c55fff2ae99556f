"""Trains a decoder the way torchtune's recipes do: dtype, compilation and kernels of its own."""

import argparse

import torch
from telling import tell
from torch import Tensor, nn

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="fp32", choices=["bf16", "fp32"])
parser.add_argument("--compile", action="store_true")
parser.add_argument("--fused", action="store_const", const=True)
args = parser.parse_args()


class Layer(nn.Module):
    """Attention-free layer of a decoder."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.SiLU(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Decoder(nn.Module):
    """Returns the logits of the next token."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList(Layer(size) for _ in range(2))
        self.output = nn.Linear(size, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
    )


torch.set_float32_matmul_precision("high")
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16 if args.dtype == "bf16" else torch.float32)
model = Decoder(64, 32)
torch.set_default_dtype(torch.float32)
if args.compile:
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    loss_of = torch.compile(loss_of, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=args.fused)
tokens = torch.randint(0, 64, (6, 4, 8))

losses = []
for batch in tokens:
    loss = loss_of(model(batch), batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
tell(losses, model)
