"""Replayed batches look like those that they stand for."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fasttrain.shim.snapshots.batches import made_like, plain_signature, signature_of
from fasttrain.shim.snapshots.files import packed, unpacked
from support.preempted import network

Pair = namedtuple("Pair", "x y")


def batch(samples: int, length: int) -> Any:
    lengths = [length - 1] * samples
    more = OrderedDict(x=torch.ones(length), names=("a" * length, None, True, 2.5))
    return [
        torch.ones(samples, length),
        lengths,
        more,
        Pair(torch.ones(samples), b"x"),
        np.arange(length),
    ]


@pytest.mark.parametrize("other", [batch(4, 3), batch(2, 3), batch(7, 9), batch(4, 0)])
def test_one_is_made_like_another(other: Any) -> None:
    signature = unpacked(packed(plain_signature(signature_of(other))))
    made = made_like(batch(4, 3), signature)
    assert plain_signature(signature_of(made)) == signature
    assert [type(part) for part in made] == [type(part) for part in other]
    assert made[1] == other[1]
    assert made[4].tolist() == other[4].tolist()
    assert made[2]["names"] == other[2]["names"]


@pytest.mark.parametrize(
    ("seen", "other"),
    [
        (torch.ones(2, 2), torch.ones(2)),
        ([torch.ones(2)], torch.ones(2)),
        ({"a": 1}, {}),
        (3, [3]),
        ([], [3]),
        (torch.ones(2), 3),
    ],
)
def test_what_has_other_parts_is_refused(seen: Any, other: Any, capfd: Any) -> None:
    with pytest.raises(SystemExit):
        made_like(seen, plain_signature(signature_of(other)))
    assert "[snapshot-diverged]" in capfd.readouterr().err


class Sentences(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        words = torch.Generator().manual_seed(index)
        return torch.randn(2 + index % 5, 4, generator=words), index % 7


def padded(samples: list[Any]) -> Any:
    x = nn.utils.rnn.pad_sequence([words for words, _ in samples], batch_first=True)
    return x, [number for _, number in samples]


def test_what_is_counted_by_shapes_and_numbers_of_batches_is_right(preempted: Any) -> None:
    def loop(tick: Callable[[], None]) -> Any:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        tokens, numbers = 0, 0
        for _ in range(2):
            for x, given in DataLoader(Sentences(), 4, shuffle=True, collate_fn=padded):
                tokens += x.size(0) * x.size(1)
                numbers += sum(given)
                optimizer.param_groups[0]["lr"] = 10 / (100 + tokens + numbers)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                tick()
        return model.state_dict(), tokens, numbers

    assert preempted.differ(loop, 20) == []
