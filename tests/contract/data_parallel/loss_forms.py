# ruff: noqa: T201, E501
"""Losses in all forms, three steps of a fresh model each, for an even and an odd batch.

The first argument says whether the script computes them or the model does; others name some.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.checkpoint import checkpoint


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, t):
        ctx.save_for_backward(o - t)
        return ((o - t) ** 2).sum()

    @staticmethod
    def backward(ctx, g):
        (d,) = ctx.saved_tensors
        return 2 * g * d, None


def rest(c):
    return c - torch.diag(torch.diag(c))


def normed(o):
    return (o - o.mean(0)) / (o.std(0) + 1e-5)


def each(o, y):
    return F.cross_entropy(o, y, reduction="none")


def entropy(p):
    return (p * p.log()).sum()


def by_reversed(o, t):
    half = (o[:, 0] - t[:, 0]).abs()
    return (half + half.flip(0)).mean()


scale = nn.Parameter(torch.zeros(()))
ce, mse = F.cross_entropy, F.mse_loss
# fmt: off
FORMS = {
    "mse": lambda o, t, y: mse(o, t), "sum by length": lambda o, t, y: ((o - t) ** 2).sum() / len(o),
    "sum by a number": lambda o, t, y: ((o - t) ** 2).sum() / 8, "classes": lambda o, t, y: ce(o, y),
    "sum of classes": lambda o, t, y: ce(o, y, reduction="sum") / 16,
    "by a counted number": lambda o, t, y: (each(o, y) * (y > 0)).sum() / max(int((y > 0).sum()), 1),
    "ignored": lambda o, t, y: ce(o, y, ignore_index=0), "weighted": lambda o, t, y: ce(o, y, weight=torch.tensor([0.2, 1.5])),
    "smoothed": lambda o, t, y: ce(o, y, label_smoothing=0.2), "soft": lambda o, t, y: ce(o, t.softmax(1)),
    "smoothed, weighted, ignored": lambda o, t, y: ce(o, y, weight=torch.tensor([0.2, 1.5]), ignore_index=1, label_smoothing=0.1),
    "by a tensor": lambda o, t, y: ce(o, y, ignore_index=0, reduction="sum") / (y > 0).sum(),
    "mean times length": lambda o, t, y: mse(o, t) * len(o), "half a sum": lambda o, t, y: 0.5 * ((o - t) ** 2).sum(),
    "one by one": lambda o, t, y: sum(mse(a, b) for a, b in zip(o, t, strict=True)),
    "mean of one by one": lambda o, t, y: torch.stack([mse(a, b) for a, b in zip(o, t, strict=True)]).mean(),
    "weights that sum up": lambda o, t, y: (each(o, y) * ((y + 1.0) / (y + 1.0).sum())).sum(),
    "weights by softmax": lambda o, t, y: (each(o, y) * t[:, 0].softmax(0)).sum(),
    "root": lambda o, t, y: mse(o, t).sqrt(), "squared": lambda o, t, y: mse(o, t) ** 2, "log": lambda o, t, y: mse(o, t).log(),
    "exp": lambda o, t, y: ce(o, y).exp(), "norm": lambda o, t, y: (o - t).norm(), "dist": lambda o, t, y: torch.dist(o, t),
    "einsum": lambda o, t, y: torch.einsum("bi,bi->", o - t, o - t), "dot": lambda o, t, y: (o - t).flatten() @ (o - t).flatten(),
    "flooding": lambda o, t, y: (ce(o, y) - 0.9).abs() + 0.9, "hinge": lambda o, t, y: F.relu(mse(o, t) - 0.4),
    "product": lambda o, t, y: mse(o, t) * ce(o, y), "ratio": lambda o, t, y: mse(o, t) / t.var(),
    "trained factor": lambda o, t, y: torch.exp(-scale) * mse(o, t) + scale,
    "trained factor of a sum": lambda o, t, y: torch.exp(-scale) * ((o - t) ** 2).sum() + scale,
    "largest": lambda o, t, y: each(o, y).topk(4).values.mean(), "max": lambda o, t, y: each(o, y).max(),
    "median": lambda o, t, y: each(o, y).median(), "selected": lambda o, t, y: each(o, y)[y > 0].mean(),
    "logsumexp": lambda o, t, y: o[:, 0].logsumexp(0), "custom": lambda o, t, y: Squares.apply(o, t),
    "checkpoint": lambda o, t, y: checkpoint(lambda a, b: ((a - b) ** 2).sum(), o, t, use_reentrant=True),
    "entropy of the mean": lambda o, t, y: entropy(o.softmax(1).mean(0)), "variance": lambda o, t, y: -o.var(0).mean(),
    "correlations": lambda o, t, y: rest(normed(o).T @ normed(t) / len(o)).pow(2).sum(), "covariance": lambda o, t, y: rest(torch.cov(o.T)).pow(2).sum(),
    "contrast": lambda o, t, y: ce(o @ t.T, torch.arange(len(o))), "dice": lambda o, t, y: 1 - 2 * (o.sigmoid() * t.abs()).sum() / (o.sigmoid().sum() + t.abs().sum()),
    "cosine of all": lambda o, t, y: 1 - F.cosine_similarity(o.flatten(), t.flatten(), dim=0), "moments": lambda o, t, y: (o.mean(0) - t.mean(0)).pow(2).sum(),
    "sorted": lambda o, t, y: (o[:, 0].sort().values - t[:, 0].sort().values).abs().mean(), "pairs": lambda o, t, y: F.pdist(o).mean(),
    "reversed": lambda o, t, y: by_reversed(o, t), "bits": lambda o, t, y: F.binary_cross_entropy_with_logits(o, (t > 0).float()),
    "bits of chances": lambda o, t, y: F.binary_cross_entropy(o.sigmoid(), (t > 0).float(), reduction="sum"), "huber": lambda o, t, y: F.huber_loss(o, t),
    "l1": lambda o, t, y: F.l1_loss(o, t), "smooth l1": lambda o, t, y: F.smooth_l1_loss(o, t, reduction="sum"), "nll": lambda o, t, y: F.nll_loss(o.log_softmax(1), y),
    "divergence": lambda o, t, y: F.kl_div(o.log_softmax(1), t.softmax(1), reduction="batchmean"), "divergences": lambda o, t, y: F.kl_div(o.log_softmax(1), t.softmax(1), reduction="sum"),
    "gaussian": lambda o, t, y: F.gaussian_nll_loss(o, t, o.exp()), "poisson": lambda o, t, y: F.poisson_nll_loss(o, t.abs(), reduction="sum"),
    "penalty": lambda o, t, y: mse(o, t) + 0.1 * sum(p.pow(2).sum() for p in model.parameters()), "activity": lambda o, t, y: mse(o, t) + 0.1 * o.abs().sum(1).mean(),
}
# fmt: on


class Inside(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.linear, self.form = nn.Linear(6, 2), form

    def forward(self, x, t, y):
        return self.form(self.linear(x), t, y)


X, T = (torch.randn(9, size, generator=torch.Generator().manual_seed(size)) for size in (6, 2))
Y = torch.tensor([0, 1, 1, 0, 1, 1, 0, 1, 0])
inside, names = sys.argv[1] == "inside", sys.argv[2:] or list(FORMS)
for size in (8, 9):
    for name in names:
        torch.manual_seed(0)
        model = Inside(FORMS[name])
        optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.01)
        for _ in range(3):
            x, t, y = X[:size], T[:size], Y[:size]
            loss = model(x, t, y) if inside else FORMS[name](model.linear(x), t, y)
            optimizer.zero_grad()
            loss.backward()
            gradient = model.linear.weight.grad
            factor = 0.0 if scale.grad is None else scale.grad.item()
            print(f"{name} {loss.item():.5f} {gradient.norm().item():.5f} {factor:.5f}")
            optimizer.step()
