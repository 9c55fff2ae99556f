"""Whole tensors that scripts have of shards, on real ranks: they share their numbers."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.shards import reads
from fasttrain.shim.data_parallel.shards.replica import ShardedReplica
from fasttrain.shim.data_parallel.shards.whole_copies import COPIES, STALE_EVERY, LentTensor
from support.forked_ranks import on_ranks

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(3))


class Training:
    """A model of two layers, one of which has rows that don't divide, with what a script does."""

    def __init__(self, *, early: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        if early:
            self.model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
            self.model[1].weight = self.model[0].weight  # tied
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.weight: Any = lambda: self.model[0].weight
        self.call: Any = self.model
        # Run before and after each backward pass.
        self.before: Any = lambda: None
        self.after: Any = lambda: None
        state = self.model.state_dict()
        self.early = [state["0.weight"], self.model[1].bias.data[1:]] if early else []

    def step(self) -> float:
        loss: Tensor = self.call(X).square().mean()
        self.optimizer.zero_grad()
        self.backward(loss)
        self.optimizer.step()
        return loss.item()

    def backward(self, loss: Any) -> None:
        self.before()
        loss.backward()
        self.after()

    def steps(self) -> list[float]:
        return [self.step() for _ in range(2)]


def state_dict_in_place(t: Training) -> Any:
    state = t.model.state_dict()
    state["0.weight"].mul_(0.5)
    state["1.bias"][0] = 3
    return t.steps()


def kept_state_dict(t: Training) -> Any:
    state, deep = t.model.state_dict(), copy.deepcopy(t.model.state_dict())
    t.step()
    t.model.load_state_dict(state)  # does nothing
    t.step()
    return [state["0.weight"], deep["0.weight"], t.step()]


def kept_optimizer_state(t: Training) -> Any:
    t.step()
    state = t.optimizer.state_dict()["state"]
    t.step()
    return [state[0]["exp_avg"]]


def saved_later(t: Training) -> Any:
    kept = {"model": t.model.state_dict()}
    t.step()
    buffer = io.BytesIO()
    torch.save(kept, buffer)
    buffer.seek(0)
    t.step()
    pickled = pickle.loads(pickle.dumps(kept))
    return [torch.load(buffer)["model"]["0.weight"], pickled["model"]["0.weight"]]


def array(t: Training) -> Any:
    values = t.weight().data.numpy()
    values[6] = 7
    losses = t.steps()
    t.weight().detach().numpy()[...] = 0.1
    return [*losses, *t.steps(), torch.from_numpy(values)]


def view_kept(t: Training) -> Any:
    row, flat = t.weight().data[6], t.weight().data.view(-1)
    t.step()
    row.zero_()
    flat[0] = 2
    return [*t.steps(), row, flat]


def view_with_gradient(t: Training) -> Any:
    row = t.weight()[6]
    with torch.no_grad():
        row.fill_(2)
    return [*t.steps(), row.detach()]


def gradient_view(t: Training) -> Any:
    t.step()
    t.backward(t.call(X).mean())
    flat = t.weight().grad.view(-1)
    loss = t.call(X).mean()
    flat.mul_(0.5)
    t.backward(loss)  # adds
    t.weight().grad[0] = 0
    t.optimizer.step()
    return [flat, *t.steps()]


def swapped(t: Training) -> Any:
    averages = [torch.full(p.shape, 0.5) for p in t.model.parameters()]
    found = []
    for _ in range(2):
        for p, average in zip(t.model.parameters(), averages, strict=True):
            average.data, p.data = p.data, average.data
        found += t.steps()
    return [*found, *averages]


def swapped_clones(t: Training) -> Any:
    averages = [p.detach().clone() for p in t.model.parameters()]
    t.step()
    for p, average in zip(t.model.parameters(), averages, strict=True):
        p.data, average.data = average.data, p.data
    return [*t.steps(), averages[0] * 1]


def lists(t: Training) -> Any:
    values = [torch.full(p.shape, 0.3) for p in t.model.parameters()]
    state = t.model.state_dict()
    with torch.no_grad():
        torch._foreach_copy_(list(t.model.parameters()), values)
    return [*t.steps(), state["0.weight"]]


def penalty(t: Training) -> Any:
    total = sum(p.view(-1).pow(2).sum() for p in t.model.parameters())
    total = total + t.weight()[0].abs().sum() + t.weight()[:, 1].pow(2).sum()
    t.backward(t.call(X).mean() + total)
    t.optimizer.step()
    return t.steps()


def renormed(t: Training) -> Any:
    with torch.no_grad():
        t.weight().renorm_(2, 0, 0.1)
    return t.steps()


def kept_from_before(t: Training) -> Any:
    t.step()
    weight, bias = t.early
    weight[4].zero_()
    bias.fill_(2)
    return [*t.steps(), weight, bias]


def viewed_and_assigned(t: Training) -> Any:
    t.weight().data[0].zero_()
    t.weight().data = torch.full((7, 5), 0.2)
    t.model[1].bias.data[0].fill_(3)
    return [*t.steps(), t.weight()]


def several_views(t: Training) -> Any:
    first, second = t.weight().data[0], t.weight().data[1:]
    del first
    bias = t.model[1].bias.data[:2]
    second.fill_(0.3)
    bias.fill_(1)
    return [*t.steps(), second, bias]


STYLES: tuple[Callable[[Training], Any], ...] = (
    state_dict_in_place, kept_state_dict, kept_optimizer_state, saved_later, array, view_kept,
    view_with_gradient, gradient_view, swapped, swapped_clones, lists, penalty, renormed,
    kept_from_before, viewed_and_assigned, several_views,
)  # fmt: skip


def numbers(values: Any) -> list[list[float]]:
    wholes = [getattr(v, "full_tensor", lambda v=v: torch.as_tensor(v))() for v in values]
    return [whole.detach().flatten().double().tolist() for whole in wholes]


def by_all(
    ranks: Ranks, tell: Callable[[str], None] = lambda _: None, *, early: bool = False
) -> Training:
    """Return one that all ranks train."""
    training = Training(early=early)
    model = training.model
    replica = ShardedReplica(model, ranks, [training.optimizer], tell)

    def call(x: Tensor) -> Any:
        COPIES.agree()
        return replica.call(model, (x,), {})

    training.call = call
    training.before, training.after = replica.begin_pass, replica.after_backward
    return training


def alike(one: list[float], other: list[float]) -> bool:
    return torch.allclose(torch.tensor(one), torch.tensor(other))


@pytest.mark.filterwarnings("ignore")
def test_what_a_script_does_to_whole_tensors_is_done_to_shards(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        ranks.join()
        different = {}
        with ExitStack() as undo:
            reads.install(undo)
            for style in STYLES:
                early = style is kept_from_before
                wanted = numbers(style(Training(early=early)))
                found = numbers(style(by_all(ranks, early=early)))
                if not all(map(alike, wanted, found)):
                    different[style.__name__] = [wanted, found]
        return different

    for ended in on_ranks(tmp_path / "ranks", act):
        assert ended.good == {}


def by_training(folder: Path, act: Callable[[Training, int, list[str]], Any]) -> list[Any]:
    """Return what each rank returns for one that all train, its rank, and what it is told."""

    def on_one(ranks: Ranks) -> Any:
        ranks.join()
        told: list[str] = []
        with ExitStack() as undo:
            reads.install(undo)
            training = by_all(ranks, told.append)
            training.step()
            return act(training, ranks.rank, told)

    return [ended.good for ended in on_ranks(folder, on_one)]


def test_a_deep_copy_of_kept_tensors_has_each_of_them() -> None:
    """torch notes copies by ids, which are used again once a tensor is gone."""
    for _ in range(50):
        state = {at: _lent(torch.full((3,), float(at))) for at in range(15)}
        copied = copy.deepcopy(state)
        assert [float(tensor[0]) for tensor in copied.values()] == list(range(15))
        assert {type(tensor) for tensor in copied.values()} == {Tensor}
    copies = copy.deepcopy([state[0], state[0]])  # tied
    assert copies[0] is copies[1]


def _lent(whole: Tensor) -> LentTensor:
    lent = whole.as_subclass(LentTensor)
    lent.of = SimpleNamespace(stale=False)  # type: ignore[assignment]
    return lent


def test_another_thread_reads_what_was_gathered_last(tmp_path: Path) -> None:
    """Ranks can't gather in two threads at once."""

    def act(training: Training, _: int, told: list[str]) -> Any:
        state = training.model.state_dict()
        before = state["0.weight"].clone()
        training.step()
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(state["0.weight"] * 1))
        thread.start()
        thread.join()
        changed = not torch.equal(before, state["0.weight"])
        return [torch.equal(before, found[0]), changed, "another thread" in "".join(told)]

    assert by_training(tmp_path / "ranks", act) == [[True] * 3] * 2


def test_what_runs_on_whole_tensors_is_told(tmp_path: Path) -> None:
    def act(training: Training, _: int, told: list[str]) -> Any:
        weights, values = list(training.model.parameters()), training.model.state_dict().values()
        before = list(told)
        with torch.no_grad():
            torch._foreach_copy_(weights, [value * 2 for value in values])
        return [text for text in told if text not in before]

    for told in by_training(tmp_path / "ranks", act):
        assert "_foreach_copy_" in "".join(told)


def test_what_a_checkpoint_held_is_freed_and_forgotten(tmp_path: Path) -> None:
    def act(training: Training, rank: int, _: list[str]) -> Any:
        state = training.model.state_dict()
        training.step()
        freed = StorageWeakRef(state["0.weight"].untyped_storage())
        training.step()
        known = [len(COPIES)]
        held = not freed.expired()
        if rank == 0:  # as by garbage collection
            del state
        known.append(int(freed.expired()))
        for _ in range(STALE_EVERY):
            training.call(X)
        known.append(len(COPIES))
        state = {}
        for _ in range(STALE_EVERY):
            training.call(X)
        return [held, *known, int(freed.expired()), len(COPIES)]

    wanted = [[True, 4, int(rank == 0), 4, 1, 0] for rank in range(2)]
    assert by_training(tmp_path / "ranks", act) == wanted


SHOWN: tuple[Callable[[Any], Any], ...] = (
    lambda w: w, lambda w: w.data, lambda w: w * 2, lambda w: w[0], lambda w: {"w": w.detach()},
)  # fmt: skip


def test_shards_are_printed_whole(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        ranks.join()
        with ExitStack() as undo:
            reads.install(undo)
            weights = [Training().weight(), by_all(ranks).weight()]
            return [[str(show(weight)) for show in SHOWN] for weight in weights]

    for ended in on_ranks(tmp_path / "ranks", act):
        one, ranks = ended.good
        assert ranks == one


def test_a_parameter_that_the_script_replaces_ends_with_words(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        ranks.join()
        training = by_all(ranks)
        training.step()
        training.model[1].bias = nn.Parameter(torch.ones(3))
        with pytest.raises(SystemExit):
            training.step()

    for ended in on_ranks(tmp_path / "ranks", act):
        assert "[fsdp-replaced]" in ended.stderr
        assert ended.good is None
