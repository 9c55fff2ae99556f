"""Gradients that torch's object averages in memory that the ranks of a node share."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.shim.data_parallel import node_memory
from fasttrain.shim.data_parallel import ranks as ranks_module
from fasttrain.shim.data_parallel.backward import BackwardPasses
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.replica import Replica
from fasttrain.shim.data_parallel.replicate import Replicate
from fasttrain.shim.hooks.loop import TrainingState
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.hooks.roots import RootCalls
from support.forked_ranks import on_ranks

PASSES = 6  # by then torch's object has taken over
Backward = Callable[[Tensor], None]


class Net(nn.Module):
    """Of more than a megabyte, so that it has two buckets; the first layer is in the second one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 600, dtype=dtype)
        self.second = nn.Linear(600, 1200, dtype=dtype)
        self.leaves_out = False

    def forward(self, x: Tensor) -> Tensor:
        inner = x.repeat(1, 100) if self.leaves_out else self.first(x)
        out: Tensor = self.second(inner)
        return out


def one_pass(replica: Replica, module: nn.Module, x: Tensor, backward: Backward) -> str:
    """Make a pass as the lever does, and return what tells its gradients from others."""
    module.zero_grad()
    loss = replica.call(module, (x,), {}).square().mean()
    replica.begin_pass()
    backward(loss)
    replica.after_backward()
    gradients = [p.grad.to_dense().double() for p in module.parameters() if p.grad is not None]
    data = b"".join(bytes(gradient.flatten().numpy()) for gradient in gradients)
    return hashlib.sha256(data).hexdigest()


def in_a_thread(loss: Tensor) -> None:
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def trained(
    ranks: Ranks,
    *,
    shares: bool,
    dtype: torch.dtype = torch.float32,
    left_out: int = -1,
    last: Backward = Tensor.backward,
) -> Any:
    """Return what tells the gradients of each pass from others, and which used the memory.

    Args:
        ranks: All ranks.
        shares: Whether they share memory.
        dtype: That of the model.
        left_out: A pass without the first layer.
        last: Makes the last backward pass.
    """
    ranks.join()
    table = ranks.means
    if not shares:
        ranks.means = None
    module = Net(dtype)
    replica = Replica(module, ranks)
    found, used = [], []
    for number in range(PASSES):
        x = torch.linspace(-1, number + ranks.rank, 24, dtype=dtype).view(4, 6)
        before = table._number if table else 0
        module.leaves_out = number == left_out
        backward = last if number == PASSES - 1 else Tensor.backward
        found.append(one_pass(replica, module, x, backward))
        used.append(bool(table) and table._number > before)
    return found, used, len(replica._filled)


def on_two_ranks(folder: Path, **options: Any) -> Any:
    """Return the result of both ranks, after a check that it is the same."""
    first, second = [end.good for end in on_ranks(folder, partial(trained, **options))]
    assert first == second
    return first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1 << 23, 1 << 12])
def test_they_are_those_of_gloo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int
) -> None:
    monkeypatch.setattr(ranks_module, "MEANS_BYTES", size)
    found, used, waiting = on_two_ranks(tmp_path, shares=True, dtype=dtype)
    assert used == [False] * 2 + [True] * 4
    assert not waiting
    assert found == on_two_ranks(tmp_path / "gloo", shares=False, dtype=dtype)[0]


def test_a_pass_that_leaves_a_parameter_out_is_averaged_otherwise(tmp_path: Path) -> None:
    found, used, waiting = on_two_ranks(tmp_path, shares=True, left_out=4)
    assert used == [False, False, True, True, False, False]
    assert not waiting, "a bucket of the incomplete pass is still held"
    assert found == on_two_ranks(tmp_path / "gloo", shares=False, left_out=4)[0]


class Words(nn.Module):
    """With a sparse bucket, the first one to be full or the last one."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = ["table", "head"] if last else ["head", "table"]
        for name in names:  # buckets are in the opposite order
            part = nn.Linear(3, 2) if name == "head" else nn.Embedding(9, 3, sparse=True)
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(x.long() % 9).sum(1))
        return out


@pytest.mark.parametrize("last", [True, False])
def test_sparse_gradients_go_by_gloo_beside_them(tmp_path: Path, last: bool) -> None:
    def act(ranks: Ranks) -> Any:
        ranks.join()
        table = ranks.means
        assert table is not None
        module = Words(last=last)
        replica, found = Replica(module, ranks), []
        for number in range(PASSES):
            x = torch.arange(6).view(2, 3) + number + 2 * ranks.rank
            before = table._number
            one_pass(replica, module, x, Tensor.backward)
            gradients = [module.head.weight.grad, module.table.weight.grad.to_dense()]  # type: ignore[union-attr,operator]
            found.append(([g.tolist() for g in gradients], table._number > before))
        return found

    first, second = [end.good for end in on_ranks(tmp_path, act, wait_s=30.0)]
    assert first == second
    assert [used for _, used in first] == [False] * 2 + [True] * 4
    modules = [Words(last=last), Words(last=last)]
    for number, (gradients, _) in enumerate(first):
        for rank, module in enumerate(modules):
            module.zero_grad()
            module(torch.arange(6).view(2, 3) + number + 2 * rank).square().mean().backward()
        for got, name in zip(gradients, ("head", "table"), strict=True):
            each: Any = [getattr(module, name).weight.grad for module in modules]
            torch.testing.assert_close(torch.tensor(got), (each[0] + each[1]).to_dense() / 2)


def test_a_pass_in_a_thread_takes_another_way(tmp_path: Path) -> None:
    """Threads of the script run in another order on each rank."""
    found, used, _ = on_two_ranks(tmp_path, shares=True, last=in_a_thread)
    assert used == [False, False, True, True, True, False]
    assert found == on_two_ranks(tmp_path / "gloo", shares=False)[0]


class HandlerError(Exception):
    """Raised by a signal's handler, as by one of a time limit."""


def ring(*_: object) -> None:
    raise HandlerError


def interrupted(ranks: Ranks, error: type[BaseException], number_of_signal: int) -> Any:
    """Return what tells the gradients of each pass from others, and at which a handler raised."""
    ranks.join()
    module = Net(torch.float32)
    replica = Replica(module, ranks)
    context: Any = SimpleNamespace(
        ranks=ranks, training=TrainingState(RootCalls()), strategy=SimpleNamespace(batch="per-rank")
    )
    passes = BackwardPasses(context)
    passes.add(replica)
    signal.signal(signal.SIGALRM, ring)
    late = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), number_of_signal))
    found, raised = [], []
    for number in range(PASSES):
        module.zero_grad()
        x = torch.linspace(-1, number + ranks.rank, 24).view(4, 6)
        loss = replica.call(module, (x,), {}).square().mean()
        loss.register_hook(lambda _: time.sleep(0.4 * ranks.rank))  # waits in the pass
        if number == 4 and not ranks.rank:
            late.start()
        try:
            passes.run(torch.autograd.backward, loss)
        except error:
            raised.append(number)
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        found.append([float(gradient.double().norm()) for gradient in gradients])
    return found, raised


@pytest.mark.parametrize(
    ("error", "number"), [(HandlerError, signal.SIGALRM), (KeyboardInterrupt, signal.SIGINT)]
)
def test_a_handler_that_raises_meanwhile_comes_behind_the_pass(
    tmp_path: Path, error: type[BaseException], number: int
) -> None:
    """As in one process, after which a script may go on."""
    act = partial(interrupted, error=error, number_of_signal=number)
    first, second = [end.good for end in on_ranks(tmp_path, act, wait_s=30.0)]
    assert (first[1], second[1]) == ([4], [])
    assert first[0] == second[0]
    assert all(len(each) == 4 for each in first[0])


def test_ranks_that_cannot_share_it_go_by_gloo_and_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(ranks: Ranks) -> Any:
        made = node_memory._new_file
        few = node_memory.WORD * 2 * 2 * (1 << 10)
        monkeypatch.setattr(ranks_module, "BOARD_BYTES", few)

        def new_file(size: int) -> str:
            return made(size) if size <= few else ""  # there is room for the smaller table alone

        monkeypatch.setattr(node_memory, "_new_file", new_file)
        lever: Any = Replicate.__new__(Replicate)
        lever._ranks, lever.recorder = ranks, OutcomeRecorder("strategy", "ddp", explicit=True)
        lever._join()
        return ranks.means is None, list(lever.recorder.outcome().notes)

    for end in on_ranks(tmp_path, act):
        alone, notes = end.good
        assert alone
        assert [note for note in notes if "gloo" in note]


def test_ranks_on_two_nodes_share_none(tmp_path: Path) -> None:
    def shared(ranks: Ranks) -> bool:
        ranks.join()
        return ranks.means is not None

    assert [end.good for end in on_ranks(tmp_path, shared, nodes=2)] == [False, False]
    assert [end.good for end in on_ranks(tmp_path, shared)] == [True, True]
