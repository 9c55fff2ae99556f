"""Train a character-level transformer on the source text of Python's own standard library.

Nothing is downloaded. At the default size the 0.8 million parameters learn the look of Python in
about a minute on two CPU cores.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

VOCABULARY = 128  # the ASCII codes themselves
CORPUS_BYTES = 1_000_000
VALIDATION_SHARE = 0.1
VALIDATION_BATCHES = 20


def read_corpus(size: int) -> Tensor:
    """Return the first `size` characters of the standard library's ASCII files (size,)."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_bytes()
        if source.isascii():
            text += source
        if len(text) >= size:
            break
    return torch.frombuffer(text[:size], dtype=torch.uint8).long()


def windows(codes: Tensor, starts: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return inputs, and targets one character later, both (len(starts), block)."""
    rows = codes[starts[:, None] + torch.arange(block + 1)]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which each position sees itself and earlier ones."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of x (batch, seq, width)."""
        batch, seq, width = x.shape
        shape = (batch, seq, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    """A pre-norm transformer block: attention, then a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Refine x (batch, seq, width)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CharTransformer(nn.Module):
    """A GPT-style decoder over ASCII codes."""

    def __init__(self, block: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor) -> Tensor:
        """Return the logits (batch, seq, vocabulary) of the character after each one of idx."""
        x = self.token(idx) + self.position(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices only, not on biases and norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))


def make_scheduler(
    optimizer: torch.optim.Optimizer, steps: int, warmup: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a linear warm-up, followed by a cosine that ends at a tenth of the peak."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def next_char_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per character."""
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: nn.Module, codes: Tensor, batch: int, block: int) -> float:
    """Return the mean loss over evenly spread windows, the same ones at every call."""
    device = next(model.parameters()).device
    starts = torch.linspace(0, len(codes) - block - 1, VALIDATION_BATCHES * batch).long()
    model.eval()
    total = 0.0
    for part in starts.split(batch):
        inputs, targets = windows(codes, part, block)
        total += next_char_loss(model, inputs.to(device), targets.to(device)).item()
    model.train()
    return total / VALIDATION_BATCHES


def train(model: nn.Module, codes: Tensor, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Train on random windows of codes; return the optimizer, so that it can be saved."""
    device = next(model.parameters()).device
    optimizer = make_optimizer(model, args)
    scheduler = make_scheduler(optimizer, args.steps, args.warmup)
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(codes) - args.block, (args.batch,))
        inputs, targets = windows(codes, starts, args.block)
        loss = next_char_loss(model, inputs.to(device), targets.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        if step % args.log_every == 0 or step == args.steps:
            print(f"step {step:5d}  train loss {loss.item():.4f}")
    return optimizer


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--block", type=int, default=128, help="characters per window")
    parser.add_argument("--width", type=int, default=128, help="features per position")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--heads", type=int, default=4, help="attention heads per block")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=60, help="steps up to the peak")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="decay of the matrices")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--log-every", type=int, default=50, help="steps between two lines")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to save a checkpoint")
    return parser.parse_args()


def main() -> None:
    """Train, validate and, if asked, save."""
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    codes = read_corpus(CORPUS_BYTES)
    train_codes, validation_codes = codes.tensor_split([int(len(codes) * (1 - VALIDATION_SHARE))])
    model = CharTransformer(args.block, args.width, args.layers, args.heads).to(device)
    optimizer = train(model, train_codes, args)
    print(f"validation loss {validate(model, validation_codes, args.batch, args.block):.4f}")
    if args.out:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.out)


if __name__ == "__main__":
    main()
