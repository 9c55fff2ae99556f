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

from fasttrain.shim.snapshots import batches
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


def test_lengths_are_kept_where_shapes_change() -> None:
    kept = batches.KeptNumbers()
    data = [torch.ones(2, 4), torch.tensor([4, 3]), {"y": torch.tensor([1], dtype=torch.int16)}]
    signature = plain_signature(signature_of(data, kept.signature_of))
    made = made_like([torch.ones(1, 5), torch.tensor([5]), {"y": torch.ones(3)}], signature)
    assert (made[0].shape, made[1].tolist()) == ((2, 4), [4, 3])
    assert (made[2]["y"].tolist(), made[2]["y"].dtype) == ([1], torch.float32)
    for other in (torch.ones(2), torch.ones(2, 1).long(), torch.ones(513).long()):
        assert signature_of(other, kept.signature_of) == other.shape
    assert not kept.full


def test_no_more_numbers_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "ROOM_OF_NUMBERS", 5)
    kept, lengths = batches.KeptNumbers(), torch.tensor([4, 3])
    found = [signature_of(lengths, kept.signature_of) for _ in range(4)]
    assert found == [("numbers", 4, 3), ("numbers", 4, 3), (2,), (2,)]
    assert kept.full


class Sentences(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        words = torch.Generator().manual_seed(index)
        return torch.randn(2 + index % 5, 4, generator=words), index % 7


def padded(samples: list[Any]) -> Any:
    x = nn.utils.rnn.pad_sequence([words for words, _ in samples], batch_first=True)
    return x, [number for _, number in samples]


class Speech(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        sound = torch.Generator().manual_seed(index)
        words = torch.randint(1, 5, (2 + index % 3,), generator=sound)
        return torch.randn(9 + index * 7 % 11, 4, generator=sound), words


def joined(samples: list[Any]) -> Any:
    sounds, words = zip(*samples, strict=True)
    lengths = [torch.tensor([len(one) for one in part]) for part in (sounds, words)]
    return nn.utils.rnn.pad_sequence(list(sounds)), torch.cat(words), *lengths


def test_a_loss_by_lengths_can_be_computed(preempted: Any) -> None:
    """Even where their batch is shorter than the first one."""

    def loop(tick: Callable[[], None]) -> Any:
        model, losses = nn.Linear(4, 5), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            for sounds, words, *lengths in DataLoader(Speech(), 4, True, collate_fn=joined):
                loss = nn.functional.ctc_loss(model(sounds).log_softmax(2), words, *lengths)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                tick()
        return model.state_dict(), losses

    assert preempted.differ(loop, 20) == []


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
