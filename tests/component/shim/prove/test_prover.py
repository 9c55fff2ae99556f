"""The losses that are read, the turns that are kept to, and what is reported."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from fasttrain.model.codec import dumps, loads
from fasttrain.model.proof import Took, Turn
from fasttrain.shim.process.turns import Turns
from fasttrain.shim.prove.prover import Losses, Prover


@pytest.fixture
def losses() -> Iterator[Losses]:
    with ExitStack() as undo:
        found = Losses()
        found.install(undo)
        yield found


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


def test_a_steps_loss_is_the_mean_of_its_backward_passes(losses: Losses) -> None:
    leaf(1.0).sum().backward()
    losses.end_step()
    leaf(2.0).sum().backward()
    torch.autograd.backward(leaf(4.0).sum())
    losses.end_step()
    losses.end_step()
    assert losses.read() == (1.0, 3.0, None)
    assert losses.passes == 3
    assert losses.read() == ()


def test_what_the_script_writes_into_its_loss_later_is_not_read(losses: Losses) -> None:
    loss = leaf(1.0).sum()
    loss.backward()
    loss.detach().zero_()
    losses.end_step()
    assert losses.read() == (1.0,)


def test_losses_of_several_numbers_and_those_that_are_not_finite(losses: Losses) -> None:
    several = leaf(1.0, 3.0) * 1.0
    several.backward(torch.ones(2))
    losses.end_step()
    (leaf(1.0).sum() * math.nan).backward()
    losses.end_step()
    torch.autograd.backward([leaf(1.0).sum(), leaf(5.0).sum()])
    losses.end_step()
    assert losses.read() == (2.0, None, 3.0)


def ones(end: torch.Tensor) -> None:
    torch.autograd.backward([end], [torch.ones_like(end)])


def sparse(weight: torch.Tensor) -> None:
    torch.autograd.backward([weight.to_sparse()], [torch.ones(2).to_sparse()])


STARTS: dict[str, tuple[Callable[[torch.Tensor], None], float | None]] = {
    "an iterator": (lambda w: torch.autograd.backward(it for it in [w.sum()]), 4.0),
    "a complex number": (lambda w: ones(torch.complex(w[:1], w[1:])), 2.0),
    "complex numbers": (lambda w: ones(torch.complex(w, w)), 2.0),
    "an edge": (lambda w: torch.autograd.backward(get_gradient_edge(w.sum())), None),
    "a sparse tensor": (sparse, None),
    "a nested tensor": (lambda w: ones(torch.nested.as_nested_tensor([w.clone()])), None),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("name", STARTS)
def test_a_backward_pass_may_start_from_anything_that_torch_takes(
    losses: Losses, name: str
) -> None:
    act, expected = STARTS[name]
    weight = leaf(1.0, 3.0)
    act(weight)
    losses.end_step()
    assert weight.grad is not None
    assert losses.read() == (expected,)


class Giver:
    """The other end of the socket."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair()
        self.turns = Turns(theirs.detach())
        self._left = b""

    def give(self, turn: Turn) -> None:
        self.ours.sendall(dumps(turn, indent=None).encode() + b"\n")

    def heard(self) -> list[Took]:
        self.ours.setblocking(False)
        try:
            text = self.ours.recv(1 << 20)
        except BlockingIOError:
            text = b""
        return [loads(Took, line) for line in text.splitlines()]

    def close(self) -> None:
        self.ours.close()
        os.close(self.turns._descriptor)


@pytest.fixture
def giver() -> Iterator[Giver]:
    found = Giver()
    yield found
    found.close()


@pytest.fixture
def prover(giver: Giver) -> Iterator[Prover]:
    giver.give(Turn(1))
    meter: Any = SimpleNamespace(device="")
    with ExitStack() as undo:
        found = Prover(giver.turns, meter, lambda: None)
        found.install(undo)
        yield found


def step(prover: Prover, loss: float = 1.0) -> None:
    prover.losses.note([torch.tensor(loss)])
    prover.after_step()


def test_turns_are_kept_to(prover: Prover, giver: Giver) -> None:
    giver.give(Turn(4, untimed=1))
    giver.give(Turn(2, one_by_one=True))
    giver.give(Turn(0, over=True))
    for at in range(1, 7):
        step(prover, float(at))
    with pytest.raises(SystemExit) as ended:
        step(prover, 7.0)
    assert ended.value.code == 0
    first, block, warm_up = giver.heard()
    assert (first.steps, first.losses, len(first.wall_s)) == (1, (1.0,), 1)
    assert (block.steps, block.losses, len(block.wall_s)) == (5, (2.0, 3.0, 4.0, 5.0), 3)
    assert (warm_up.steps, warm_up.losses, len(warm_up.wall_s)) == (7, (6.0, 7.0), 2)
    assert block.turn_s >= sum(block.wall_s) > 0
    assert len(block.processor_s) == 3
    assert not any(took.ended for took in (first, block, warm_up))
    with pytest.raises(SystemExit):  # of a script that has swallowed the first one
        step(prover)
    prover.finish()
    assert giver.heard() == [], "who was told to end reports no end"


def test_the_end_of_the_script_is_reported_with_what_it_did(prover: Prover, giver: Giver) -> None:
    giver.give(Turn(9))
    for _ in range(4):
        step(prover)
    prover.finish()
    prover.finish()
    _, last = giver.heard()
    assert (last.steps, len(last.losses), last.ended) == (4, 3, True)


def test_who_has_nobody_any_more_to_give_a_turn_ends(prover: Prover, giver: Giver) -> None:
    giver.ours.close()
    with pytest.raises(SystemExit):
        step(prover)


def test_who_has_nobody_any_more_to_hear_a_report_ends(giver: Giver) -> None:
    giver.turns.report(Took(1))
    giver.ours.close()
    with pytest.raises(SystemExit):
        giver.turns.wait()


def test_who_waits_shows_that_it_has_not_hung(
    giver: Giver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fasttrain.shim.process.turns.BEAT_S", 0.01)
    beats = []

    def beat() -> None:
        beats.append(1)
        if len(beats) == 3:
            giver.give(Turn(5))

    assert giver.turns.wait(beat) == Turn(5)
    assert len(beats) == 3


def test_a_forked_child_takes_no_turns(prover: Prover, giver: Giver) -> None:
    pid = os.fork()
    if not pid:
        prover.after_step()
        prover.finish()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert giver.heard() == []


@pytest.mark.parametrize("together", [True, False])
def test_threads_that_train_at_the_same_time_are_told(
    prover: Prover, giver: Giver, together: bool
) -> None:
    giver.give(Turn(9))
    if together:
        step(prover)
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(step, prover).result()
    prover.finish()
    assert giver.heard()[-1].threads_train is together


def test_the_number_of_threads_is_reported(
    prover: Prover, giver: Giver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    giver.give(Turn(9))
    step(prover)
    (took,) = giver.heard()
    assert took.threads == 7
