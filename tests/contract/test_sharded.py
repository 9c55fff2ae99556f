"""Scripts that know nothing of ranks, with sharded parameters: what one process trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.script_runs import LEVERS_OFF, Alone, assert_same_prints, differences, forked_ranks
from support.thinned import thinned
from support.zygote import Zygote

SCRIPTS = Path(__file__).parents[1] / "scripts"
FSDP = (*LEVERS_OFF, "--strategy", "fsdp")
TRAINED = [
    "loaders/bucketed_lengths",  # zeroes gradients by the module, which a validation has called
    "loaders/gan_latents",  # the same between forward and backward; two roots
    "retain_graph",  # prints the norm of one parameter's gradient
    "contrastive_infonce",  # has a parameter that is a scalar
    "ranks/nosplit_backward_by_size",  # derivatives of its own, which depend on the batch
    "ranks/lazy_layers",  # gradients from before it is sharded
    "ranks/lbfgs_in_double",  # is sharded within a step, which holds the optimizer's state
    "ranks/first_called_in_a_thread",
    "loaders/stream_dataset",  # saves the module
    "ranks/nosplit_global_counter", "ranks/sparse_coo_buffer", "ranks/losses_not_linear",
    "accumulate_odd", "activation_checkpoint", "convnet_batchnorm", "dqn_target", "finite_guard",
    "gan_bce", "loaders/accumulate_three", "loaders/growing_batches",
    "loaders/tiny_gpt", "loaders/two_heads_dict", "loaders/weighted_sampler", "loss_parameters",
    "manual_sgd", "masked_transformer", "mlp_steplr", "progressive_growing", "reinforce",
    "siamese_bce", "training_step", "unfreeze_later", "wgan_gp",
]  # fmt: skip
REFUSED = {
    "scripted_part": "[fsdp-refused]",
    "ranks/nosplit_first_batch_sets_up": "[fsdp-writes]",  # its forward gives it its parameters
    "ranks/complex_spectrum": "[fsdp-refused]",
    "ranks/hessian_products": "--strategy ddp",
    "ranks/bags_with_offsets": "--strategy ddp",  # gradients that are sparse
    "maml_functional": "[fsdp-functional]",
}
CURVATURE = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
x = torch.randn(8, 1, requires_grad=True)
slope, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
curvature, = torch.autograd.grad(slope.sum(), x, create_graph=True)
curvature.square().mean().backward()
"""
# Penalties on a derivative, which come first in a backward pass, and in one of their own.
PENALTIES = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x = torch.randn(6, 4)
    loss = model(x).square().mean()
    x.requires_grad_()
    slope, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty = slope.square().sum(1).mean()
    optimizer.zero_grad()
    if step % 2:
        loss.backward()
        penalty.backward()
    else:
        (loss + penalty).backward()
    optimizer.step()
    print(loss.item(), penalty.item(), [p.grad.norm().item() for p in model.parameters()])
"""
LISTED = """
import collections, dataclasses, torch
from torch import nn
class Holder:
    def __init__(self, weight):
        self.weight = weight
@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    weight: nn.Parameter
def keeping(weight):
    while True:
        yield weight
def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    listed = [p for p in model.parameters()]
    named = collections.OrderedDict(model.named_parameters())
    of = {p: name for name, p in named.items()}
    held, ends = set(listed[:1]), collections.deque(listed[-1:])
    weight = model[0].weight
    def norm():
        return weight.grad.norm().item()
    only_here = model[2].weight
    for_object, for_slot, for_generator = [p for p in listed if p is only_here] * 3
    holder, slotted = Holder(for_object), Slotted(for_slot)
    kept = keeping(for_generator)
    next(kept)
    del for_object, for_slot, for_generator
    optimizer = torch.optim.AdamW(listed, lr=0.01)
    for _ in range(4):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        clipped = nn.utils.clip_grad_norm_(listed, 0.1)
        print(float(loss), float(clipped), norm(), [of[p] for p in named.values()])
        print([p.grad.abs().sum().item() for p in (*held, *ends)])
        optimizer.step()
        print([p.norm().item() for p in (only_here, holder.weight, slotted.weight, next(kept))])
main()
"""
CLOSURE = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4)
def closure():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss
for _ in range(4):
    print(float(optimizer.step(closure)))
"""
# Optimizers that are made once the parameters are shards, with states of several kinds.
LATER = """
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(16, 4)
model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.state["steps"] = 0
    @torch.no_grad()
    def step(self):
        self.state["steps"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                last = self.state[p].setdefault("last", [])
                last.append(p.grad.clone())
                p.add_(sum(last[-3:]), alpha=-group["lr"])
def train(optimizer, steps):
    for _ in range(steps):
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()
adam = torch.optim.Adam(model.parameters(), lr=0.01)
print(train(adam, 4))
later = torch.optim.Adam(model.parameters(), lr=0.01)
later.load_state_dict(adam.state_dict())
for _ in range(3):
    # torch's state_dict() refers to the states: both optimizers have the same ones.
    print(train(later, 3), later.state_dict()["state"][0]["exp_avg"].norm().item())
    print(train(adam, 1))
kept = later.state_dict()
for _ in range(3):
    print(train(later, 3))
    later.load_state_dict(kept)
own = Own(model.parameters(), lr=0.01)
print(train(own, 3), own.state["steps"])
torch.save(own.state_dict(), "model.pt")
again = Own(model.parameters(), lr=0.01)
again.load_state_dict(torch.load("model.pt"))
print(train(again, 3), again.state["steps"])
"""
TIED = """
import torch
from torch import nn
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
    def forward(self, x):
        return x + self.second(self.first(x).tanh())
model = nn.Sequential(Block(), Block(), Block())
model[1].first.weight = model[0].first.weight
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(4):
    loss = model(torch.randn(8, 6)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(float(loss), bool(torch.equal(*(
        model.state_dict()[f"{at}.first.weight"] for at in (0, 1)))))
"""
# Trains past the calls that are verified once weights are gathered in bf16, and validates.
ROUNDED = """
import torch
from torch import nn
torch.manual_seed(0)
class Layer(nn.TransformerEncoderLayer):
    def forward(self, x, *args, **kwargs):
        SEEN
        return super().forward(x, *args, **kwargs)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        layer = Layer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 20)
    def forward(self, x):
        SEEN
        return self.head(self.layers(self.tokens(x)))
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
data = torch.randint(20, (8, 6))
for step in range(18):
    loss = nn.functional.cross_entropy(model(data).flatten(0, 1), data.roll(1, 1).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        print(loss.item(), model(data).sum().item())
    model.train()
"""
# Says whether a model is gone once nobody refers to it.
DROPPED = """
import copy, gc, pickle, weakref
import torch
from torch import nn
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
    def forward(self, x):
        if COPIES:
            weight = copy.deepcopy(self.first.weight)
            assert type(weight) is nn.Parameter and weight.dtype is torch.float32
            assert b"fasttrain" not in pickle.dumps(self.first.weight)
        return x + self.second(self.first(x).tanh())
def train():
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(7):
        loss = model(torch.ones(8, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weakref.ref(model)
model = train()
gc.collect()
print(model() is None)
"""
# In place of a full device, which a CPU can't be: the move fails on the first rank alone.
HELD = """
import torch
from torch import nn
class Net(nn.Sequential):
    full = FULL
    def _apply(self, fn, recurse=True):
        if Net.full:
            Net.full = False
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 20.00 MiB")
        return super()._apply(fn, recurse)
torch.manual_seed(0)
model = Net(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
model.to("cpu", torch.float64)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(8, 6, dtype=torch.float64)
with torch.no_grad():
    print(model(x).sum().item())
print(model.state_dict()["0.0.weight"].sum().item())
for _ in range(4):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(float(loss))
"""
# Ranks that had a part of the batch each would call other experts, and gather these.
ROUTED = """
import torch
from torch import nn
torch.manual_seed(0)
class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
    def forward(self, x):
        return self.down(self.up(x).relu())
class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(4))
    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = x.clone()
        for number, expert in enumerate(self.experts):
            rows, slots = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, weights[rows, slots, None] * expert(x[rows]))
        return out
model = Routed()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = (model(torch.randn(8, 6) + (2 if step % 2 else -2)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    print(loss.item(), [p.grad.norm().item() for p in model.parameters() if p.grad is not None])
    optimizer.step()
"""
# A script sees nothing of ranks; fasttrain itself does.
ON_FIRST = "__import__('fasttrain.shim.process.entry', fromlist=['get']).get('LOCAL_RANK') == '0'"
HOOKED = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}
def step(p):
    optimizers[p].step()
    optimizers[p].zero_grad()
handles = [p.register_post_accumulate_grad_hook(step) for p in optimizers]
for number in range(6):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    print(float(loss), sum(p.grad is None for p in model.parameters()))
    if number == 3:
        handles[0].remove()
"""
MASKED = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(4):
    if number == WHEN:
        model.weight.register_hook(lambda grad: grad * 0)
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(number, flush=True)  # the other rank may end this one first
"""
ASSIGNED = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 4))  # one of even shards, one not
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(8, 5)
shadow = {}
def held_out():
    with torch.no_grad():
        return model(x).square().mean().item()
for number in range(5):
    loss = model(x[number:]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for name, p in model.named_parameters():
        shadow[name] = p.data.clone() if not number else 0.5 * shadow[name] + 0.5 * p.data
    before = held_out()
    backup = {name: p.data for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.data = shadow[name]
    averaged = held_out()
    for name, p in model.named_parameters():
        p.data = backup[name]
    assert before == held_out()
    if number == 2:
        model[0].weight.data = model[0].weight.data * 0.5
        model[2].bias.data = torch.full((4,), 0.25)
    print(loss.item(), before, averaged, model[2].bias.sum().item())
    print(model[0].weight.grad.norm(), [model[2].bias.detach().max()])
torch.save(model.state_dict(), "model.pt")
"""
# Averages from before the model is sharded, penalties, noise, masks, a new state, and copies.
MIXED = """
import copy
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
    def forward(self, x):
        return x + self.inner(x).tanh()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(5, 6), nn.Sequential(Block(), Block())
    def forward(self, x):
        return self.blocks(self.first(x))
    def begin(self, rows):
        return next(self.parameters()).new_ones(rows, 5)
def whole(name):
    copied = torch.load(name, weights_only=False)
    hooks = [h for m in copied.modules() for k, h in vars(m).items() if k.endswith("_hooks") and h]
    return type(copied).__name__, type(copied.blocks[0]).__name__, hooks
model = Net()
ema, averaged = copy.deepcopy(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
shadow = {name: p.data.clone() for name, p in model.named_parameters()}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
mask = (torch.randn(6, 5) > -1).float()
for step in range(4):
    loss = (model(torch.randn(7, 5)) - 1).square().mean()
    loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    averaged.update_parameters(model)
    with torch.no_grad():
        for ours, p in zip(ema.parameters(), model.parameters()):
            ours.mul_(0.9).add_(p, alpha=0.1)
        for name, p in model.named_parameters():
            shadow[name] = 0.5 * shadow[name] + 0.5 * p
            p.add_(torch.randn_like(p) * 0.01)
            p.data.add_(torch.randn(p.shape), alpha=0.01)
        model.first.weight *= mask
        model.first.bias[1:3] = torch.ones(2)
        held = [copy.deepcopy(p) for p in model.parameters()]
    print(loss.item(), model.begin(3).sum().item(), sum(p.sum().item() for p in held))
    if step == 1:
        best = copy.deepcopy(model)
        torch.save(model, "whole.pkl")
        print(whole("whole.pkl"))
print(type(best).__name__, *(net(torch.ones(4, 5)).sum().item() for net in (best, ema, averaged)))
best(torch.ones(4, 5)).sum().backward()
print(best.first.weight.grad.norm().item())
nets = {"model": model, "best": best, "ema": ema, "averaged": averaged}
torch.save({**{k: net.state_dict() for k, net in nets.items()}, "shadow": shadow}, "model.pt")
"""
# A backward of the script's own, which depends on the number of rows.
OWN_BACKWARD = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
class Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.rows = len(x)
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.rows
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 2)
    def forward(self, x):
        y = self.outer(self.inner(x).tanh())
        return WAY
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(5):
    x = torch.randn(8, 4)
    loss = model(x).square().sum()
    optimizer.zero_grad()
    loss.backward()
    print(float(loss), model.inner.weight.grad.norm().item())
    optimizer.step()
"""
WAYS = {
    "outermost": "Averaged.apply(y)",
    "in a view": "Averaged.apply(y).view(-1, 2)",
    "in a checkpoint": "checkpoint(Averaged.apply, y, use_reentrant=True)",
}
pytestmark = pytest.mark.slow


# Penalties on parameters of which a rank has no rows, before and after what FSDP reduces.
PENALTIES_ON_FEW_ROWS = """
import torch
from torch import nn
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.gain = nn.Parameter(torch.ones(1, 4))
    def forward(self, x):
        return x * self.gain + self.linear(x).tanh()
model = nn.Sequential(Block(), Block(), nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
def penalty():
    return sum(p.square().sum() for p in model.parameters())
def product(p):
    return (p @ p.T).trace() if p.dim() > 1 else p.norm()
for step in range(8):
    optimizer.zero_grad()
    before = penalty() if step % 4 == 1 else 0
    loss = model(torch.randn(6, 4)).square().mean()
    if step % 4 == 0:
        (loss + penalty()).backward()
    elif step % 4 == 1:
        (before + loss).backward()
    elif step % 4 == 2:
        sum(p.abs().sum() for p in model.parameters()).backward()
        loss.backward()
    else:
        loss.backward()
        sum(map(product, model.parameters())).backward()
    print(loss.item(), [p.grad.norm().item() for p in model.parameters()])
    optimizer.step()
"""
# Functions of parameters that DTensor has wrong, or not for ranks without rows.
FUNCTIONS = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
model(torch.randn(8, 4)).square().mean().backward()
inf = float("inf")
functions = [
    torch.max, torch.min, torch.std, torch.amax, torch.aminmax, torch.prod,
    lambda p: p.argmax(), lambda p: p.max(0)[0], lambda p: p.norm(inf), lambda p: p.logsumexp(0),
    lambda p: torch.linalg.vector_norm(p, inf), lambda p: p.cumsum(-1), lambda p: p.cummax(0)[0],
    lambda p: F.smooth_l1_loss(p, torch.zeros_like(p)), lambda p: torch.trace(p @ p.T),
    lambda p: torch.linalg.matrix_rank(p.detach()),
]
for p in model.parameters():
    for number, function in enumerate(functions):
        if p.dim() > 1 or number < 14:
            found = function(p)
            found = torch.stack(found) if isinstance(found, tuple) else found
            p.grad = None
            if found.requires_grad:
                found.square().sum().backward()
            print(found.tolist(), None if p.grad is None else p.grad.tolist())
print(len({p.data_ptr() for p in model.parameters()}))
nn.init.orthogonal_(model[2].weight)
print(model[2].weight.tolist())
print(model[2].bias.data_ptr() == model[2].bias.data.data_ptr())
model(torch.randn(8, 4)).square().mean().backward()
print(nn.utils.clip_grad_norm_(model.parameters(), 0.1, inf).item())
print([p.grad.abs().max().item() for p in model.parameters()])
"""
# Exports in the middle of a training.
EXPORTED = """
import torch
from torch import nn
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return x + self.linear(x).tanh()
model = nn.Sequential(Block(), Block(), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(6, 4)
def train():
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
train()
train()
model.eval()
torch.jit.trace(model, x).save("traced.pt")
module = torch.jit.trace_module(model, {"forward": x})
program = torch.export.export(model, (x,))
with torch.no_grad():
    print(torch.jit.load("traced.pt")(x).sum().item(), module(x).sum().item())
    print(program.module()(x).sum().item(), model(x).sum().item())
model.train()
train()
"""
# A call whose rows depend on each other is also tried with a part of the steps in time, of which
# those of the last rank are all padding: only that rank raises an error, between two blocks.
ALONE = """
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
    def forward(self, x):
        return x + self.linear(x).tanh()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x, mask):
        x = self.blocks[0](x - x.mean(0))
        packed = pack_padded_sequence(x, mask.sum(1), batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(packed, batch_first=True)
        return self.blocks[2](self.blocks[1](x)).mean(1)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mask = torch.arange(8) < torch.tensor([[4], [3], [2], [4], [1], [3]])
for step in range(4):
    loss = (model(torch.randn(6, 8, 6), mask) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


def closely(_: str) -> dict[str, float]:
    return {"rel": 1e-4, "abs": 1e-4}


@pytest.fixture
def pair(zygote: Zygote, tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    """Write a script, and return its run alone and as two ranks with sharded parameters."""

    def run(text: str, options: Sequence[str] = FSDP, alone: str = "") -> tuple[Any, Any]:
        path = tmp_path / "train.py"
        path.write_text(alone or text)
        one = Alone(zygote)(tmp_path / "alone", path)
        path.write_text(text)
        return one, forked_ranks(zygote, tmp_path / "ranks", path, options=options)

    return run


def assert_trains_the_same(one: Any, ranks: Any) -> None:
    assert_same_prints(ranks.lines(), one.good.stdout.splitlines(), closely)


@pytest.mark.parametrize("script", thinned(TRAINED, 0, left=8, always=TRAINED[:7]))
def test_shards_train_what_one_process_trains(script: str, zygote: Zygote, tmp_path: Path) -> None:
    path = SCRIPTS / f"{script}.py"
    one = Alone(zygote)(tmp_path / "alone", path)
    run = forked_ranks(zygote, tmp_path / "ranks", path, options=FSDP)
    assert_same_prints(run.lines(), one.good.stdout.splitlines(), closely)
    if (one.cwd / "model.pt").exists():
        assert differences(run.saved(), one.saved()) == []
    assert run.outcome("strategy")["counts"]["ranks"] == 2


def test_sharded_calls_are_split(zygote: Zygote, tmp_path: Path) -> None:
    run = forked_ranks(zygote, tmp_path / "ranks", SCRIPTS / "mlp_steplr.py", options=FSDP)
    strategy = run.good.outcome("strategy")
    assert strategy["counts"]["split calls"] > 0
    assert not strategy["missed"]


@pytest.mark.parametrize(
    "script",
    thinned(
        list(REFUSED), 0, left=1, always=["scripted_part", "ranks/nosplit_first_batch_sets_up"]
    ),
)
def test_what_shards_do_not_support_ends_with_words(
    script: str, zygote: Zygote, tmp_path: Path
) -> None:
    run = forked_ranks(zygote, tmp_path / "ranks", SCRIPTS / f"{script}.py", options=FSDP)
    assert run.returncode
    assert REFUSED[script] in run.stderr


def test_a_derivative_through_weights_that_were_freed_ends_with_words(pair: Any) -> None:
    one, ranks = pair(CURVATURE)
    assert one.good
    assert ranks.returncode
    assert "--strategy ddp" in ranks.stderr


def test_penalties_on_derivatives(pair: Any) -> None:
    assert_trains_the_same(*pair(PENALTIES))


def test_penalties_on_parameters_of_which_a_rank_has_no_rows(pair: Any) -> None:
    assert_trains_the_same(*pair(PENALTIES_ON_FEW_ROWS))


def test_parameters_that_the_script_has_listed_before(pair: Any) -> None:
    """It clips and averages them, wherever it has kept them since before they were sharded."""
    assert_trains_the_same(*pair(LISTED))


def test_parameters_in_a_tuple_are_refused(pair: Any) -> None:
    _, ranks = pair(CLOSURE.replace("x = torch", "kept = tuple(model.parameters())\nx = torch"))
    assert "[fsdp-references]" in ranks.stderr
    assert ranks.stdout == ""


@pytest.mark.matrix
def test_a_model_that_is_first_called_in_a_closure(pair: Any) -> None:
    """Its optimizer's step has begun, with the fused kernel for whole parameters."""
    assert_trains_the_same(*pair(CLOSURE, ("--amp", "off", "--strategy", "fsdp")))


def test_optimizers_that_are_made_for_shards_save_and_load_whole_states(pair: Any) -> None:
    one, ranks = pair(LATER, ("--amp", "off", "--strategy", "fsdp"))
    assert_trains_the_same(one, ranks)
    assert differences(ranks.saved(), one.saved()) == []


def test_a_parameter_that_two_blocks_share_stays_one(pair: Any) -> None:
    one, ranks = pair(TIED)
    assert_trains_the_same(one, ranks)
    assert ranks.outcome("strategy")["counts"]["sharded blocks"] == 1


def test_a_model_that_does_not_fit_its_device_is_sharded_from_the_host(pair: Any) -> None:
    """Its first call, a validation, shards it on all ranks, also where it would have fitted."""
    one, ranks = pair(HELD.replace("FULL", ON_FIRST), alone=HELD.replace("FULL", "False"))
    assert_trains_the_same(one, ranks)
    assert any("doesn't fit" in note for note in ranks.outcome("strategy")["notes"])
    assert ranks.outcome("strategy")["counts"]["sharded blocks"] == 3


def test_parts_that_are_called_depending_on_values(pair: Any) -> None:
    """The ranks gather the same parts at the same time, also in a trial."""
    one, ranks = pair(ROUTED)
    assert_trains_the_same(one, ranks)
    assert any("depend on the batch's values" in why for why in ranks.outcome("strategy")["missed"])


def test_a_part_that_only_some_ranks_come_to_with_their_rows(pair: Any) -> None:
    one, ranks = pair(ALONE)
    assert_trains_the_same(one, ranks)
    assert any("different values" in why for why in ranks.outcome("strategy")["missed"])


def test_an_output_is_saved_without_a_warning(pair: Any) -> None:
    one, ranks = pair(PENALTIES + "torch.save(model(x[:1]), 'output.pt')")
    assert_trains_the_same(one, ranks)
    assert "Warning" not in ranks.stderr


def test_functions_of_parameters_and_their_derivatives(pair: Any) -> None:
    one, ranks = pair(FUNCTIONS)
    assert_trains_the_same(one, ranks)
    assert ranks.stderr.count("Warning") == one.good.stderr.count("Warning")


def test_exports_have_whole_parameters(pair: Any) -> None:
    one, ranks = pair(EXPORTED)
    assert_trains_the_same(one, ranks)
    assert any("trace was given a copy" in note for note in ranks.outcome("strategy")["notes"])


def test_a_scripted_model_is_refused(pair: Any) -> None:
    made = "model = torch.jit.trace(model, x)"
    _, ranks = pair(EXPORTED.replace("\ntrain()", f"\n{made}\ntrain()", 1))
    assert "[fsdp-scripted]" in ranks.stderr


def test_steps_in_hooks_on_parameters(pair: Any) -> None:
    assert_trains_the_same(*pair(HOOKED))


@pytest.mark.parametrize("when", [0, 2])
def test_hooks_that_nobody_would_run_are_refused(when: int, pair: Any) -> None:
    _, ranks = pair(MASKED.replace("WHEN", str(when)))
    assert "[fsdp-hooks]" in ranks.stderr
    assert ranks.stdout.splitlines() == [str(number) for number in range(when)]


def test_what_is_assigned_to_the_data_of_a_parameter(pair: Any) -> None:
    """Such as averaged weights for a validation, and those of training after it."""
    one, ranks = pair(ASSIGNED)
    assert_trains_the_same(one, ranks)
    assert differences(ranks.saved(), one.saved()) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_of_the_scripts_own_gets_the_whole_batch(way: str, pair: Any) -> None:
    one, ranks = pair(OWN_BACKWARD.replace("WAY", WAYS[way]))
    assert_trains_the_same(one, ranks)
    assert any("has a backward of its own" in note for note in ranks.outcome("strategy")["notes"])


def test_shards_beside_whole_tensors_and_copies_of_sharded_models(pair: Any) -> None:
    one, ranks = pair(MIXED)
    assert_trains_the_same(one, ranks)
    assert differences(ranks.saved(), one.saved()) == []


def test_weights_that_are_not_finite_are_nobodys_writes(pair: Any) -> None:
    """The run goes on as in one process: what is gathered is compared with the shards."""
    one, ranks = pair(CLOSURE.replace("lr=0.1", "lr=1e38"), (*FSDP, "--on-nan", "off"))
    assert "nan" in one.good.stdout
    assert ranks.lines()[-1] == one.good.stdout.splitlines()[-1]


def test_weights_gathered_in_bf16_train_the_same_bits(zygote: Zygote, tmp_path: Path) -> None:
    options = ("--strategy", "fsdp", "--amp", "bf16", "--optimizer", "keep")
    runs = []
    for seen in ("pass", "[p.detach() for p in self.parameters()]"):
        path = tmp_path / "train.py"
        path.write_text(ROUNDED.replace("SEEN", seen))
        runs.append(forked_ranks(zygote, tmp_path / f"ranks-{len(runs)}", path, options=options))
    low, plain = runs
    assert len(low.lines()) == 18
    assert low.lines() == plain.lines()
    told = [str(run.outcome("strategy")["notes"]) for run in runs]
    assert ["gathered in bfloat16" in text for text in told] == [True, False]
    for run in runs:
        assert not run.outcome("strategy")["missed"]
        assert run.outcome("strategy")["counts"]["verified"] > 6  # the eighth call and others


@pytest.mark.parametrize(("amp", "copies"), [("off", False), ("bf16", False), ("bf16", True)])
def test_a_model_that_is_dropped_is_gone(
    amp: str, copies: bool, zygote: Zygote, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(DROPPED.replace("COPIES", str(copies)))
    options = ("--strategy", "fsdp", "--amp", amp, "--optimizer", "keep")
    run = forked_ranks(zygote, tmp_path / "ranks", path, options=options)
    assert run.lines() == ["True"]
    assert ("gathered in bfloat16" in str(run.outcome("strategy")["notes"])) == (amp == "bf16")
