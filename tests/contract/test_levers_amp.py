"""A script that bf16 would end runs, and the receipt says what was left alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fasttrain.launch.receipts import read_receipt
from fasttrain.model.outcome import State

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F


class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function, ctx.x = function, x
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.detach().requires_grad_(True)
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


class Thrifty(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = Checkpoint.apply(self.b, self.a(x))
        return y, y.softmax(1).data.numpy()


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.update = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, edges):
        into = torch.zeros(len(x), 8)
        return self.update(into.index_add_(0, edges[1], self.message(x)[edges[0]]))  # scatter


torch.manual_seed(0)
x, y, edges = torch.randn(50, 6), torch.randint(0, 3, (50,)), torch.randint(0, 50, (2, 200))
first, second, seen = Thrifty(), Graph(), {}
first.b.register_forward_hook(lambda module, args, out: seen.update(out=out.detach().numpy()))
parameters = [*first.parameters(), *second.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    hidden, weights = first(x)
    F.cross_entropy(second(hidden, edges), y).backward()
    optimizer.step()
print(weights.dtype, seen["out"].dtype, all(p.grad is not None for p in parameters))
"""


def test_a_script_that_bf16_would_end(fasttrain: Any, script: Any, tmp_path: Path) -> None:
    path, run_dir = script(SCRIPT), tmp_path / "run"
    options = ("--device", "cpu", "--amp", "bf16", "--strict", "--run-dir", run_dir)
    done = fasttrain("run", path, *options)
    assert done.stdout == b"float32 float32 True\n", done.stderr
    receipt = read_receipt(run_dir)
    (amp,) = [outcome for outcome in receipt.ranks[0].outcomes if outcome.lever == "amp"]
    assert (amp.state, amp.counts) == (State.APPLIED, {"forwards": 2})
    line = 1 + SCRIPT.splitlines().index(next(t for t in SCRIPT.splitlines() if "# scatter" in t))
    (unmet,) = receipt.unmet
    assert re.match(r"rank 0: amp bfloat16 .* Graph \(", unmet)
    assert f"{Path(path).name}:{line})" in unmet
    assert done.returncode != 0  # as --strict has it
    assert b"[strict]" in done.stderr


KEEPS = """
import torch

kept = []


class Keeper(torch.nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        if len(calls) == 4:  # nobody searches any more
            kept.append(output)
        return output.sum()


keeper, calls = Keeper(4, 4), []
while len(calls) < 4:
    calls.append(1)
    keeper(torch.ones(2, 4))
kept[0] @ torch.eye(4)  # in bf16, by what no call of the model can be repeated for
"""


def test_an_error_that_precision_may_explain_says_so(fasttrain: Any, script: Any) -> None:
    options = ("--device", "cpu", "--run-dir")
    told = re.compile(rb"\nfasttrain [^\n]*\bbfloat16\b[^\n]* --amp off\n")
    done = fasttrain("run", script(KEEPS), "--amp", "bf16", *options, "low")
    assert (done.returncode, bool(told.search(done.stderr))) == (1, True), done.stderr
    other = script("import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\n{}['key']", "other.py")
    done = fasttrain("run", other, "--amp", "bf16", *options, "other")
    assert (done.returncode, told.search(done.stderr)) == (1, None)


SPOILT = """
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class FewShot(nn.Module):  # trains in its forward
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(5, 16)

    def forward(self, support, labels, query):
        with torch.no_grad():
            support, query = self.backbone(support), self.backbone(query)
        head = nn.Linear(16, 5)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.5, momentum=0.9)
        for _ in range(50):
            loss = F.cross_entropy(head(support), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return head(query)


rows, labels = torch.eye(5).repeat(4, 1), torch.arange(5).repeat(4)
print((FewShot()(rows, labels, rows).argmax(1) == labels).float().mean().item())

policy = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 6), nn.Softmax(dim=-1))
action = Categorical(policy(torch.randn(256, 5))).sample()  # asks for a sum of 1
print(action.shape)


class Thrifty(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 5))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


model, kept = Thrifty(), []
model.block[0].register_forward_hook(lambda module, args, out: kept.append(out.dtype))
model(rows).square().mean().backward()
print(kept)
"""


def test_what_a_script_does_around_and_inside_of_its_models(
    fasttrain: Any, script: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = ("--device", "cpu", "--amp", "bf16", "--run-dir", run_dir)
    done = fasttrain("run", script(SPOILT), *options)
    kept = "[torch.float32, torch.float32]"  # in the forward pass, and when that is repeated
    assert done.stdout.decode() == f"1.0\ntorch.Size([256])\n{kept}\n", done.stderr
    (amp,) = [found for found in read_receipt(run_dir).ranks[0].outcomes if found.lever == "amp"]
    assert (amp.state, amp.counts, amp.missed) == (State.APPLIED, {"forwards": 3}, ())
