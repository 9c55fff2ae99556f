"""A tiny GPT learns to answer: only the tokens of the answer count, the prompt is masked out."""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


@dataclass
class GPTConfig:
    block_size: int = 16
    vocab_size: int = 20
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 24


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.n_head = config.n_head

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
                   for part in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 2 * config.n_embd), nn.GELU(),
            nn.Linear(2 * config.n_embd, config.n_embd),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


def make_dataset(n, config):
    """Prompts of letters, some more frequent than others, and behind them the same in reverse."""
    g = torch.Generator().manual_seed(1337)
    idx = torch.zeros(n, config.block_size + 1, dtype=torch.long)
    targets = torch.full((n, config.block_size + 1), -100)
    for row in range(n):
        length = int(torch.randint(2, config.block_size // 2 + 1, (1,), generator=g))
        prompt = 1 + (torch.rand(length, generator=g) ** 3 * (config.vocab_size - 1)).long()
        idx[row, :length], idx[row, length:2 * length] = prompt, prompt.flip(0)
        targets[row, length:2 * length] = prompt.flip(0)
    return TensorDataset(idx[:, :-1].contiguous(), targets[:, 1:].contiguous())


@torch.no_grad()
def perplexity(model, loader, device):
    model.eval()
    nll, tokens = 0.0, 0
    for idx, targets in loader:
        idx, targets = idx.to(device), targets.to(device)
        logits, _ = model(idx)
        answered = targets != -100
        logp = logits[answered].log_softmax(-1)
        nll -= logp.gather(1, targets[answered].unsqueeze(1)).sum().item()
        tokens += answered.sum().item()
    model.train()
    return math.exp(nll / tokens)


config = GPTConfig()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337)

train_set, val_set = random_split(
    make_dataset(120, config), [90, 30], generator=torch.Generator().manual_seed(42)
)
train_loader = DataLoader(train_set, batch_size=12, shuffle=True)
val_loader = DataLoader(val_set, batch_size=12)

model = GPT(config).to(device)
decay = [p for p in model.parameters() if p.dim() >= 2]
nodecay = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}],
    lr=2e-3, betas=(0.9, 0.95),
)
max_epochs, warmup = 3, 4
max_steps = max_epochs * len(train_loader)


def lr_factor(step):
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (max_steps - warmup)))


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)

iter_num = 0
for epoch in range(max_epochs):
    for idx, targets in train_loader:
        logits, loss = model(idx.to(device), targets.to(device))
        print(f"step {iter_num} loss {loss.item():.9g}")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        iter_num += 1
    print(f"epoch {epoch}: val perplexity {perplexity(model, val_loader, device):.4f}, "
          f"lr {scheduler.get_last_lr()[0]:.6f}")

print(f"final loss {loss.item():.9g}")
torch.save(
    {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
     "scheduler": scheduler.state_dict(), "iter_num": iter_num},
    "model.pt",
)
