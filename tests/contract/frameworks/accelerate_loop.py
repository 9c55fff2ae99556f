"""Trains a classifier in a loop of Hugging Face's Accelerate, or by hand with a GradScaler."""

import argparse
from collections.abc import Iterator

import torch
from telling import tell
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--mixed-precision", default="no")
parser.add_argument("--by-hand", action="store_true", help="fp16 without Accelerate")
parser.add_argument("--fused", action="store_const", const=True)
args = parser.parse_args()

torch.manual_seed(0)
x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=args.fused)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
criterion = nn.CrossEntropyLoss()


def train_with_accelerate() -> Iterator[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=True, mixed_precision=args.mixed_precision, gradient_accumulation_steps=2
    )
    net, adamw, batches, schedule = accelerator.prepare(model, optimizer, loader, scheduler)
    for inputs, labels in (batch for _ in range(2) for batch in batches):
        with accelerator.accumulate(net):
            loss = criterion(net(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            adamw.step()
            schedule.step()
            adamw.zero_grad()
        yield loss.item()


def train_by_hand() -> Iterator[float]:
    scaler = torch.amp.GradScaler("cpu")
    for number, (inputs, labels) in enumerate(batch for _ in range(2) for batch in loader):
        with torch.autocast("cpu", torch.float16):
            output = model(inputs)
        loss: Tensor = criterion(output.float(), labels)
        scaler.scale(loss / 2).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
        yield loss.item()


tell(list(train_by_hand() if args.by_hand else train_with_accelerate()), model)
