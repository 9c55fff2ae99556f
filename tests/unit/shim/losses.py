"""Losses as scripts write them, each of a model and a batch; all are sums over the samples, or over
what of them counts, divided by how much that is.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

TOTAL = 8  # samples of the whole batch, which a script knows as its --batch-size
CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.3, 1.5, 0.7], dtype=torch.float64)


def batch(size: int) -> Any:
    """Give a batch; every field has the samples as its first dimension."""
    torch.manual_seed(1)
    mask = torch.rand(size, 6) > 0.4
    mask[:, 0] = True
    padded = torch.where(torch.rand(size, 3) > 0.4, torch.randint(0, 6, (size, 3)), -100)
    padded[:, 0] = torch.randint(0, 6, (size,))
    some = torch.tensor([0, 1, -100, 2, 3, -100, 5, 4])[:size]
    return SimpleNamespace(
        x=torch.randn(size, 5).double(),
        x2=torch.randn(size, 5).double(),
        labels=torch.randint(0, 6, (size,)),
        some_labels=some,  # where -100 counts nothing
        soft=torch.rand(size, 6).double().softmax(-1),
        target=torch.randn(size, 6).double(),
        chance=torch.rand(size, 6).double(),
        mask=mask.double(),
        weight=torch.rand(size).double() + 0.1,
        sign=torch.where(torch.rand(size) > 0.5, 1.0, -1.0).double(),
        words=torch.randn(size, 3, 5).double(),
        next_words=padded,
        lengths=torch.randint(1, 4, (size,)),
    )


def _tokens(m: Any, b: Any, **options: Any) -> Tensor:
    return F.cross_entropy(m(b.words).transpose(1, 2), b.next_words, **options)


def _count(b: Any) -> Tensor:
    return (b.next_words != -100).sum()


def _squares(m: Any, b: Any) -> Tensor:
    return (m(b.x) - b.target) ** 2


def _focal(each: Tensor) -> Tensor:
    return (1 - (-each).exp()) ** 2 * each


def _ctc(m: Any, b: Any, **options: Any) -> Tensor:
    scores = m(b.words.repeat(1, 3, 1)).log_softmax(-1).transpose(0, 1)
    words = b.labels[:, None].repeat(1, 3) % 5 + 1
    return F.ctc_loss(scores, words, torch.full((len(b.x),), 9), b.lengths, **options)


def _kl_of_normals(m: Any, b: Any) -> Tensor:
    mean, logvar = m(b.x2).chunk(2, -1)
    return -0.5 * (1 + logvar - mean.pow(2) - logvar.exp())


def _in_place(total: Tensor, by: float) -> Tensor:
    total /= by
    return total


ce, mse, bce = F.cross_entropy, F.mse_loss, F.binary_cross_entropy
kl, logits_bce = F.kl_div, F.binary_cross_entropy_with_logits
W = CLASS_WEIGHTS

# fmt: off
CLASSES = {
    "cross entropy": lambda m, b: ce(m(b.x), b.labels),
    "some ignored": lambda m, b: ce(m(b.x), b.some_labels),
    "weighted": lambda m, b: ce(m(b.x), b.labels, weight=W),
    "weighted, some ignored": lambda m, b: ce(m(b.x), b.some_labels, weight=W),
    "sum": lambda m, b: ce(m(b.x), b.some_labels, reduction="sum"),
    "each, then mean": lambda m, b: ce(m(b.x), b.labels, reduction="none").mean(),
    "those that count": lambda m, b: ce(m(b.x), b.some_labels, reduction="none")[b.some_labels >= 0].mean(),  # noqa: E501
    "mean of the mean": lambda m, b: ce(m(b.x), b.some_labels).mean(),
    "smoothed": lambda m, b: ce(m(b.x), b.labels, label_smoothing=0.1),
    "smoothed, ignored": lambda m, b: ce(m(b.x), b.some_labels, label_smoothing=0.1),
    "smoothed, weighted": lambda m, b: ce(m(b.x), b.labels, weight=W, label_smoothing=0.1),
    "smoothed, sum": lambda m, b: ce(m(b.x), b.labels, label_smoothing=0.1, reduction="sum"),
    "soft targets": lambda m, b: ce(m(b.x), b.soft),
    "soft targets, smoothed": lambda m, b: ce(m(b.x), b.soft, label_smoothing=0.1),
    "soft targets, weighted": lambda m, b: ce(m(b.x), b.soft, weight=W),
    "soft targets, sum": lambda m, b: ce(m(b.x), b.soft, reduction="sum"),
    "soft targets by hand": lambda m, b: -(b.soft * m(b.x).log_softmax(-1)).sum(1).mean(),
    "mixup": lambda m, b: 0.3 * ce(m(b.x), b.labels) + 0.7 * ce(m(b.x), (b.labels + 1) % 6),
    "nll": lambda m, b: F.nll_loss(m(b.x).log_softmax(-1), b.some_labels),
    "gathered": lambda m, b: -m(b.x).log_softmax(-1).gather(1, b.labels[:, None]).mean(),
    "focal": lambda m, b: _focal(ce(m(b.x), b.labels, reduction="none")).mean(),
    "margins": lambda m, b: F.multi_margin_loss(m(b.x), b.labels),
}
TOKENS = {
    "flat": lambda m, b: ce(m(b.words).reshape(-1, 6), b.next_words.reshape(-1)),
    "two dimensions": lambda m, b: _tokens(m, b),
    "smoothed": lambda m, b: _tokens(m, b, label_smoothing=0.1),
    "weighted": lambda m, b: _tokens(m, b, weight=W),
    "sum by a tensor": lambda m, b: _tokens(m, b, reduction="sum") / _count(b),
    "sum by a number": lambda m, b: _tokens(m, b, reduction="sum") / _count(b).item(),
    "sum by at least one": lambda m, b: _tokens(m, b, reduction="sum") / _count(b).clamp(min=1),
    "masked": lambda m, b: (_tokens(m, b, reduction="none") * (b.next_words >= 0)).sum() / (_count(b) + 1e-8),  # noqa: E501
    "mean of each line": lambda m, b: (_tokens(m, b, reduction="none").sum(1) / (b.next_words >= 0).sum(1)).mean(),  # noqa: E501
    "sum by samples": lambda m, b: _tokens(m, b, reduction="sum") / b.words.size(0),
    "sum by all places": lambda m, b: _tokens(m, b, reduction="sum") / (b.words.size(0) * 3),
    "position by position": lambda m, b: sum(ce(m(b.words[:, i]), b.labels) for i in range(3)),
    "mean of positions": lambda m, b: sum(ce(m(b.words[:, i]), b.labels) for i in range(3)) / 3,
    "ctc": lambda m, b: _ctc(m, b),
    "ctc sum": lambda m, b: _ctc(m, b, reduction="sum"),
}
DISTANCES = {
    "mse": lambda m, b: mse(m(b.x), b.target),
    "mse sum": lambda m, b: mse(m(b.x), b.target, reduction="sum"),
    "l1": lambda m, b: F.l1_loss(m(b.x), b.target),
    "l1 sum": lambda m, b: F.l1_loss(m(b.x), b.target, reduction="sum"),
    "smooth l1": lambda m, b: F.smooth_l1_loss(m(b.x), b.target),
    "huber sum": lambda m, b: F.huber_loss(m(b.x), b.target, reduction="sum"),
    "bce": lambda m, b: bce(m(b.x).sigmoid(), b.chance),
    "bce weighted": lambda m, b: bce(m(b.x).sigmoid(), b.chance, weight=b.mask),
    "logits": lambda m, b: logits_bce(m(b.x), b.chance),
    "logits weighted": lambda m, b: logits_bce(m(b.x), b.chance, pos_weight=W),
    "logits sum": lambda m, b: logits_bce(m(b.x), b.chance, reduction="sum"),
    "kl batchmean": lambda m, b: kl(m(b.x).log_softmax(-1), b.soft, reduction="batchmean"),
    "kl sum": lambda m, b: kl(m(b.x).log_softmax(-1), b.soft, reduction="sum"),
    "distilled": lambda m, b: 0.7 * 9 * kl((m(b.x) / 3).log_softmax(-1), b.soft, reduction="batchmean") + 0.3 * ce(m(b.x), b.labels),  # noqa: E501
    "cosine": lambda m, b: F.cosine_embedding_loss(m(b.x), b.target, b.sign),
    "triplet": lambda m, b: F.triplet_margin_loss(m(b.x), b.target, m(b.x2)),
    "gaussian": lambda m, b: F.gaussian_nll_loss(m(b.x), b.target, b.chance + 0.1),
    "poisson": lambda m, b: F.poisson_nll_loss(m(b.x), b.chance),
    "ranking": lambda m, b: F.margin_ranking_loss(m(b.x)[:, 0], m(b.x)[:, 1], b.sign),
    "quantiles": lambda m, b: torch.max(0.9 * (b.target - m(b.x)), 0.1 * (m(b.x) - b.target)).mean(),  # noqa: E501
}
BY_HAND = {
    "sum by size": lambda m, b: _squares(m, b).sum() / b.x.size(0),
    "sum by elements": lambda m, b: _squares(m, b).sum() / b.target.numel(),
    "sum by twice the size": lambda m, b: _squares(m, b).sum() / (2 * len(b.x)),
    "inverse times sum": lambda m, b: 1 / len(b.x) * _squares(m, b).sum(),
    "sum by size in place": lambda m, b: _in_place(_squares(m, b).sum(), len(b.x)),
    "sum by --batch-size": lambda m, b: _squares(m, b).sum() / TOTAL,
    "sum by the data set": lambda m, b: _squares(m, b).sum() / 1000,
    "sum by passes": lambda m, b: _squares(m, b).sum() / 4,
    "sum times a constant": lambda m, b: _squares(m, b).sum() * 0.01,
    "mean by passes": lambda m, b: _squares(m, b).mean() / 4,
    "sums, then mean": lambda m, b: _squares(m, b).sum(1).mean(),
    "means, then sum": lambda m, b: _squares(m, b).mean(1).sum(),
    "mean of the batch, then sum": lambda m, b: _squares(m, b).mean(0).sum(),
    "mean of the batch, then mean": lambda m, b: _squares(m, b).mean(0).mean(),
    "sum of the batch, then mean": lambda m, b: _squares(m, b).sum(0).mean(),
    "masked": lambda m, b: (_squares(m, b) * b.mask).sum() / b.mask.sum(),
    "selected": lambda m, b: _squares(m, b).masked_select(b.mask > 0).mean(),
    "weighted mean": lambda m, b: (_squares(m, b).mean(1) * b.weight).mean(),
    "mean by weights": lambda m, b: (_squares(m, b).mean(1) * b.weight).sum() / b.weight.sum(),
    "by positives": lambda m, b: F.l1_loss(m(b.x), b.target, reduction="none").sum() / b.mask.sum().item(),  # noqa: E501
    "linear": lambda m, b: ((m[0](b.x) - b.target[:, :1]) ** 2).sum(),
    "tanh": lambda m, b: ((m[0](b.x).tanh() - b.target[:, :1]) ** 2).sum(),
    "one number each": lambda m, b: (m[0].bias[0] * b.x).sum(),
    "of shape 1": lambda m, b: _squares(m, b).mean().view(1),
}
SEVERAL = {
    "two means": lambda m, b: mse(m(b.x), b.target) + ce(m(b.x), b.some_labels),
    "difference": lambda m, b: 0.5 * mse(m(b.x), b.target) - ce(m(b.x), b.some_labels),
    "alpha": lambda m, b: torch.add(mse(m(b.x), b.target), ce(m(b.x), b.some_labels), alpha=0.3),
    "sum and mean": lambda m, b: mse(m(b.x), b.target, reduction="sum") + ce(m(b.x), b.labels),
    "vae of sums": lambda m, b: mse(m(b.x), b.target, reduction="sum") + _kl_of_normals(m, b).sum(),
    "vae by size": lambda m, b: (mse(m(b.x), b.target, reduction="sum") + _kl_of_normals(m, b).sum()) / len(b.x),  # noqa: E501
    "vae of a mean and a sum": lambda m, b: mse(m(b.x), b.target) + _kl_of_normals(m, b).sum(),
    "stack, mean": lambda m, b: torch.stack([mse(m(b.x), b.target), ce(m(b.x), b.some_labels)]).mean(),  # noqa: E501
    "stack, sum": lambda m, b: torch.stack([mse(m(b.x), b.target), ce(m(b.x), b.labels)]).sum(),
    "stack, weights": lambda m, b: (torch.stack([mse(m(b.x), b.target), ce(m(b.x), b.labels)]) * W[:2]).sum(),  # noqa: E501
    "one by one, stack mean": lambda m, b: torch.stack([mse(m(x), t) for x, t in zip(b.x, b.target, strict=True)]).mean(),  # noqa: E501
    "one by one, sum": lambda m, b: sum(mse(m(x), t) for x, t in zip(b.x, b.target, strict=True)),
    "one by one, sum by size": lambda m, b: sum(mse(m(x), t) for x, t in zip(b.x, b.target, strict=True)) / len(b.x),  # noqa: E501
    "learned weights": lambda m, b: torch.exp(-m[0].bias[0]) * mse(m(b.x), b.target) + m[0].bias[0],
}
PENALTIES = {
    "squares": lambda m, b: ce(m(b.x), b.labels) + 0.1 * sum(p.pow(2).sum() for p in m.parameters()),  # noqa: E501
    "norms": lambda m, b: ce(m(b.x), b.labels) + 0.1 * sum(p.norm() for p in m.parameters()),
    "stacked": lambda m, b: ce(m(b.x), b.labels) + 0.1 * torch.stack([p.abs().sum() for p in m.parameters()]).sum(),  # noqa: E501
    "joined": lambda m, b: ce(m(b.x), b.labels) + 0.1 * torch.cat([p.view(-1) for p in m.parameters()]).abs().sum(),  # noqa: E501
    "to old weights": lambda m, b: ce(m(b.x), b.labels) + 0.1 * mse(m[0].weight, torch.ones(8, 5).double(), reduction="sum"),  # noqa: E501
    "orthogonal": lambda m, b: ce(m(b.x), b.labels) + 0.1 * (m[0].weight @ m[0].weight.T - torch.eye(8)).pow(2).sum(),  # noqa: E501
    "beside a sum": lambda m, b: ce(m(b.x), b.labels, reduction="sum") + 0.1 * sum(p.pow(2).sum() for p in m.parameters()),  # noqa: E501
}
# fmt: on
BY_KIND: dict[str, dict[str, Any]] = {
    "classes": CLASSES,
    "tokens": TOKENS,
    "distances": DISTANCES,
    "by hand": BY_HAND,
    "several": SEVERAL,
    "penalties": PENALTIES,
}  # fmt: skip
