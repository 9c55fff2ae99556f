"""A profiler whose traces go to a folder, and to files by name."""

import gzip
import json
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(12, 8), torch.randint(2, (12,))


def step():
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"loss {loss.item():.6f}")


with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=1, warmup=1, active=1, repeat=2),
    on_trace_ready=tensorboard_trace_handler("traces"),
) as p:
    for _ in range(6):
        step()
        p.step()
print("traces", len(list(Path("traces").iterdir())))


def count(text):
    named = [event.get("name") for event in json.loads(text)["traceEvents"]]
    return named.count("Optimizer.step#SGD.step")


for name in ("trace.json", "trace.json.gz"):
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as p:
        step()
    p.export_chrome_trace(name)
    p.export_stacks("stacks.txt")
print("steps", count(Path("trace.json").read_text()), Path("stacks.txt").exists())
print("packed", count(gzip.decompress(Path("trace.json.gz").read_bytes())))

with torch.autograd.profiler.profile() as older:
    step()
older.export_chrome_trace("older.json")
print("older", count(Path("older.json").read_text()))
torch.save(net.state_dict(), "model.pt")
