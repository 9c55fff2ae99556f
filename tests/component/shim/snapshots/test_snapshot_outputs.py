"""What models return in a replay has the shapes, numbers and types that it had, without a call."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset

from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.snapshots.files import packed, unpacked
from fasttrain.shim.snapshots.root_outputs import RootOutputs, form_of, kind_of, made_like
from support.preempted import data, loss_of, network

Tick = Callable[[], None]
Pair = namedtuple("Pair", "mean count")


@dataclass(frozen=True)
class Result:
    logits: Tensor
    loss: float = 0.5


@dataclass(slots=True)
class Slotted:
    parts: list[Any]


class Attributes(dict):  # type: ignore[type-arg]
    """Its items are its attributes, as in many configurations."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


def outputs(samples: int, number: float, word: str) -> list[Any]:
    rows = torch.full((samples, 3), number)
    return [
        rows,
        None,
        number,
        [rows, rows > 0, None],
        (rows.sum(), {"loss": number, "name": word, 3: rows}),
        Pair(rows, samples),
        rows.max(1),
        [{"boxes": rows}] * samples,
        OrderedDict(a=rows, b=np.float64(number), c=np.full(samples, number)),
        Result(rows, number),
        Slotted([rows, word]),
        SimpleNamespace(rows=rows),
        Attributes(rows=rows, count=samples),
        Normal(rows, rows.exp()),
        rows.shape,
        [],
    ]


@pytest.mark.parametrize("number", range(16))
@pytest.mark.parametrize("samples", [1, 4, 9])
def test_one_is_made_like_another(number: int, samples: int) -> None:
    seen, other = outputs(4, 1.0, "a")[number], outputs(samples, 2.5, "b")[number]
    values: list[Any] = []
    form = form_of(other, values)
    assert kind_of(form) == kind_of(form_of(seen, []))
    made = made_like(seen, form, iter(values))
    again: list[Any] = []
    assert form_of(made, again) == form
    assert again == values
    assert type(made) is type(other)
    if isinstance(made, Attributes):
        assert made.__dict__ is made


@pytest.mark.parametrize(
    "other",
    [torch.ones(2), torch.ones(2, 2).long(), [torch.ones(2, 2)], {"b": torch.ones(2, 2)}, None, 1],
)
def test_what_is_of_another_kind_is_not_made_of_it(other: Any) -> None:
    for seen in (torch.ones(2, 2), {"a": torch.ones(2, 2)}, Pair(torch.ones(2, 2), 1)):
        assert kind_of(form_of(other, [])) != kind_of(form_of(seen, []))


@pytest.mark.parametrize(
    "other",
    [
        object(),
        (torch.ones(2), deque()),
        {"x": pack_sequence([torch.ones(2)])},
        {(1, 2): torch.ones(2)},
        np.ones(5000),
    ],
)
def test_what_is_unknown_has_no_kind(other: Any) -> None:
    assert kind_of(form_of(other, [])) is None


def test_an_object_that_holds_itself_has_no_kind() -> None:
    one = Slotted([])
    one.parts.append(one)
    assert kind_of(form_of(one, [])) is None


def test_an_output_can_be_changed_in_place() -> None:
    seen = torch.ones(2, 2, requires_grad=True)
    form = form_of(seen * 1, [])
    for shape in ((2, 2), (3, 2)):
        made = made_like(seen, (form[0], shape, *form[2:]), iter(()))
        assert made.requires_grad
        made.add_(1)
    plain = made_like(seen, form_of(torch.ones(2, 2), []), iter(()))
    assert not plain.requires_grad
    plain.numpy()


def test_calls_in_loaders_and_backward_passes_are_not_recorded() -> None:
    outputs, roots = RootOutputs(lambda: apart), RootCalls()
    model: Any = SimpleNamespace(calls=None, ref=lambda: None)
    apart = True
    outputs._returned(model, torch.ones(2))
    assert outputs.state() == {"forms": [], "calls": []}
    apart = False
    for output in (torch.ones(2), torch.zeros(2), (torch.ones(3), 5)):
        outputs._returned(model, output)
    state = unpacked(packed(outputs.state()))
    assert state["calls"] == [([0, 2, 1, 1], [5], {})]
    assert roots.on_return == []


# --- loops


class Texts(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        words = torch.Generator().manual_seed(index)
        return torch.randint(9, (1 + index * 7 % 11,), generator=words), float(index % 2)


def joined(samples: list[Any]) -> Any:
    lengths = torch.tensor([len(words) for words, _ in samples])
    offsets = lengths.cumsum(0) - lengths
    words = torch.cat([words for words, _ in samples])
    return words, offsets, torch.tensor([y for _, y in samples])


def padded(samples: list[Any]) -> Any:
    lengths = torch.tensor([len(words) for words, _ in samples])
    words = nn.utils.rnn.pad_sequence([words for words, _ in samples], batch_first=True)
    return words, lengths, torch.tensor([y for _, y in samples])


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(9, 4), nn.Linear(4, 1)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.out(self.bag(words, offsets))  # type: ignore[no-any-return]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.out = nn.Embedding(9, 4), nn.GRU(4, 4), nn.Linear(4, 1)

    def forward(self, words: Tensor, lengths: Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(words), lengths, batch_first=True, enforce_sorted=False
        )
        states, _ = pad_packed_sequence(self.cell(packed)[0], batch_first=True)
        assert states.shape[:2] == words.shape
        return states, self.out(states.sum(1))[:, 0]


def train(optimizer: Any, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def by_offsets(tick: Tick) -> Any:
    model, losses = Bag(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(3):
        for words, offsets, y in DataLoader(Texts(), 4, shuffle=True, collate_fn=joined):
            loss = nn.functional.mse_loss(model(words, offsets)[:, 0], y)
            losses.append(train(optimizer, loss))
            tick()
    return model.state_dict(), losses


def by_lengths(tick: Tick) -> Any:
    model, losses, count = Reader(), [], 0
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for _ in range(3):
        for words, lengths, y in DataLoader(Texts(), 4, shuffle=True, collate_fn=padded):
            states, found = model(words, lengths)
            count += states.numel()
            losses.append(train(optimizer, nn.functional.mse_loss(found, y)))
            tick()
    assert losses[-1] < 1
    return model.state_dict(), losses, count


CALLS: list[int] = []


class Scored(nn.Module):
    """Returns numbers, and counts its calls where no snapshot sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor, y: Tensor, alpha: float) -> Any:
        CALLS.append(len(x))
        loss = loss_of(self.body, x, y) * alpha
        hits = ((self.body(x).squeeze(1) > 0) == y.bool()).sum().item()
        found = Result(self.body(x), loss.item())
        return loss, {"loss": loss.item(), "hits": hits, "kind": "train"[:hits]}, found


def by_numbers(tick: Tick) -> Any:
    """Averages and the best model by numbers that a model returns."""
    model, best, history = Scored(), -1, []
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for epoch in range(4):
        model.train()
        for step, (x, y) in enumerate(DataLoader(data(), 8, shuffle=True)):
            loss, stats, found = model(x, y, 1 + step / 10 + epoch)
            assert len(found.logits) == len(x)
            train(optimizer, loss)
            history.append((stats["loss"], stats["kind"], found.loss))
            tick()
        model.eval()
        with torch.no_grad():
            hits = sum(model(x, y, 1.0)[1]["hits"] for x, y in DataLoader(data(seed=2), 16))
        best = max(best, hits)
        history.append((hits, best))
    return model.state_dict(), history


def in_several_ways(tick: Tick) -> Any:
    """Called with other shapes in each step, frozen and not, and in inference mode."""
    model, teacher, sizes = network(), network().requires_grad_(requires_grad=False), []
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(3):
        for x, y in DataLoader(data(), 8, shuffle=True):
            with torch.inference_mode():
                sizes.append(model(x[:3]).numpy().shape)
            wanted = teacher(x).numpy()
            out = model(torch.cat([x, x]))
            out += torch.from_numpy(np.concatenate([wanted, wanted]))
            loss = out.mean() + loss_of(model, x, y)
            train(optimizer, loss)
            tick()
    return model.state_dict(), sizes


class Opaque:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return Opaque((self.body(x).squeeze(1) - y).square())


def by_objects(tick: Tick) -> Any:
    model, counts = Unknown(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        for x, y in DataLoader(data(), 8, shuffle=True):
            losses = model(x, y).loss
            counts.append(len(losses))
            train(optimizer, losses.mean())
            tick()
    return model.state_dict(), counts


class Leaving(nn.Module):
    """Leaves tensors and numbers where the script reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out, self.calls = nn.Embedding(9, 4), nn.Linear(4, 1), 0
        self.words.seen = torch.zeros(1)

    def forward(self, words: Tensor) -> Any:
        self.calls += 1
        self.words.seen = self.words(words)
        if not self.training:
            self.scores = {"mean": self.words.seen.mean().item()}
        return self.out(self.words.seen.sum(1))[:, 0]


def by_what_is_left(tick: Tick) -> Any:
    model, history, count = Leaving(), [], 0
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for _ in range(3):
        model.train()
        for words, _, y in DataLoader(Texts(), 4, shuffle=True, collate_fn=padded):
            found = model(words)
            held: Any = model.words.seen
            assert held.shape[:2] == words.shape
            penalty = held[words > 3].square().sum()
            train(optimizer, nn.functional.mse_loss(found, y) + 0.01 * penalty)
            count += model.calls
            tick()
        model.eval()
        with torch.no_grad():
            for words, _, _ in DataLoader(Texts(), 16, collate_fn=padded):
                model(words)
                history.append(model.scores["mean"])
    assert history[-1] == history[-1]
    return model.state_dict(), history, count, model.calls


@pytest.mark.parametrize(
    ("loop", "stop_at"),
    [
        (by_what_is_left, 40),
        (by_offsets, 40),
        (by_lengths, 40),
        (by_numbers, 19),
        (in_several_ways, 20),
        (by_objects, 12),
    ],
)
def test_it_ends_as_if_it_was_not_preempted(preempted: Any, loop: Any, stop_at: int) -> None:
    assert preempted.differ(loop, stop_at) == []


def test_a_replay_that_is_preempted_again(preempted: Any) -> None:
    whole = preempted.attempt(by_numbers, 0)
    assert preempted.attempt(by_numbers, 11) is None
    assert preempted.attempt(by_numbers, 26, resume="required") is None
    model, history = preempted.attempt(by_numbers, 0, resume="required")
    assert history == whole[1]
    assert all(torch.equal(value, whole[0][name]) for name, value in model.items())


def test_a_history_that_a_module_keeps_is_not_recorded_with_each_call() -> None:
    outputs, roots = RootOutputs(lambda: False), RootCalls()
    with ExitStack() as undo:
        roots.install(undo)
        outputs.install(roots, undo)
        model: Any = nn.Linear(2, 2)
        for call in range(3):
            model.forward = lambda x, n=call: setattr(model, "past", [0.5] * 600 * n) or x
            model(torch.ones(2))
        for _ in range(5):
            model(torch.ones(2))
    ((_, values, left),) = outputs.state()["calls"]
    assert (len(values), left) == (600 + 1200, {})


def test_a_replay_calls_no_model_again(preempted: Any) -> None:
    """Whatever its arguments are: only the first step and the first evaluation are computed."""
    assert preempted.attempt(by_numbers, 30) is None
    CALLS.clear()
    preempted.attempt(by_numbers, 0, resume="required")
    after = 2 + 4  # of 32 batches and four evaluations
    assert len(CALLS) <= 1 + 1 + after
