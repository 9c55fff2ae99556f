"""Functions of torch that get shards, on real ranks: what they do to whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.shards import reads
from fasttrain.shim.data_parallel.shards.replica import ShardedReplica
from fasttrain.shim.data_parallel.shards.whole_copies import COPIES
from support.forked_ranks import on_ranks

OTHER = torch.randn(7, 5, generator=torch.Generator().manual_seed(3))
MASK = OTHER > 0
ROWS = torch.tensor([0, 6])
FLIPPED = torch.arange(7).flip(0)


def chunks(w: Tensor) -> None:
    first, second = w.chunk(2)
    first.zero_()
    second[0].mul_(3)


def mixed_list(w: Tensor) -> None:
    torch._foreach_add_([torch.zeros(7, 5), w], [w, OTHER])
    torch._foreach_add_([w, torch.zeros(7, 5)], [OTHER, w])


def fused(w: Tensor) -> None:
    """Step with whole states, first a parameter alone, then beside one that is whole."""
    first, second = OTHER.clone(), OTHER.square()
    whole = [torch.ones(7, 5) for _ in range(3)]
    how: dict[str, Any] = {
        "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False,
        "maximize": False,
    }  # fmt: skip
    for count in (1.0, 2.0):
        steps = [torch.full((), count) for _ in range(2)]
        torch._fused_adamw_([w], [OTHER], [first], [second], [], steps[:1], **how)
        lists = ([whole[0], w], [OTHER, w], [whole[1], first], [whole[2], second])
        torch._fused_adamw_(*lists, [], steps, **how)
    w.add_(first).add_(second).add_(sum(whole))


# Each changes what it gets, whose first dimension is sharded and doesn't divide.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "row": lambda w: w[0].zero_(),
    "number of a row": lambda w: w[6][2].fill_(3),
    "data of a row": lambda w: w[6].data.fill_(3),
    "other data": lambda w: setattr(w, "data", OTHER.clone()),
    "rows": lambda w: w[1:6].mul_(OTHER[1:6]),
    "columns": lambda w: w[:, 1:3].mul_(3),
    "narrow": lambda w: w.narrow(0, 2, 3).copy_(OTHER[:3]),
    "chunks": chunks,
    "flat": lambda w: w.view(-1).add_(OTHER.view(-1)),
    "flat mask": lambda w: w.view(-1).__setitem__(MASK.view(-1), 0),
    "masked rows": lambda w: w.__setitem__(w < 0, 0),
    "normal": lambda w: w.normal_(),
    "init": lambda w: nn.init.xavier_uniform_(w),
    "orthogonal": lambda w: nn.init.orthogonal_(w),
    "bernoulli": lambda w: w.mul_(torch.bernoulli(torch.full_like(w, 0.5))),
    "dropout": lambda w: w.copy_(nn.functional.dropout(w)),
    "index_add": lambda w: w.index_add_(0, ROWS, OTHER[:2]),
    "index_copy": lambda w: w.index_copy_(0, ROWS, OTHER[:2]),
    "index_fill": lambda w: w.index_fill_(0, ROWS, 2.0),
    "scatter_add": lambda w: w.scatter_add_(0, FLIPPED.view(7, 1).expand(7, 5), OTHER),
    "masked_scatter": lambda w: w.masked_scatter_(MASK, OTHER),
    "out": lambda w: torch.add(OTHER, w, out=w),
    "picked": lambda w: w.add_(w[FLIPPED]).add_(w[w > 0].sum()),
    "stacked": lambda w: w.copy_(torch.stack([OTHER, w]).sum(0)),
    "mixed list": mixed_list,
    "fused": fused,
    "quantile": lambda w: w.div_(w.quantile(0.9)),
}


def test_functions_that_change_shards_change_the_whole_tensor(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        ranks.join()
        torch.manual_seed(0)
        found = {}
        with ExitStack() as undo:
            model = nn.Linear(5, 7)
            whole = model.weight.detach().clone()
            ShardedReplica(model, ranks, [], lambda _: None)
            reads.install(undo)
            for name, change in CHANGES.items():
                results, drawn = [], []
                for tensor in (whole.clone(), model.weight.data):
                    tensor.copy_(whole)
                    torch.manual_seed(1)
                    change(tensor)
                    drawn.append(float(torch.rand(())))
                    results.append(tensor)
                COPIES.agree()
                same = torch.allclose(results[0], results[1].full_tensor())
                found[name] = same and drawn[0] == drawn[1]
        return found

    for ended in on_ranks(tmp_path / "ranks", act):
        assert [name for name, same in ended.good.items() if not same] == []
