"""What the receipt says of ranks that can't share memory."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.shim import ranks as ranks_module
from fasttrain.shim.batches import Batches
from fasttrain.shim.ledger import Ledger
from fasttrain.shim.levers.replicate import Replicate
from fasttrain.shim.parallel_context import ParallelContext
from fasttrain.shim.random_streams import RandomStreams
from fasttrain.shim.ranks import Ranks
from fasttrain.shim.roots import RootCalls
from fasttrain.shim.training_state import TrainingState
from fasttrain.spec.plan import Strategy


def ranks_of_one(*, boardless: bool) -> Any:
    """Give a rank that has joined, and meets nobody."""
    return SimpleNamespace(
        rank=0, world_size=1, joined=True, joining=False, boardless=boardless, on_join=[],
        join=lambda: None, gather=lambda text: [text], broadcast=lambda _: None,
        sum=lambda tensor: tensor, waits=nullcontext,
    )  # fmt: skip


def notes(*, boardless: bool) -> tuple[str, ...]:
    """Give what is noted when a model is trained."""
    ranks, roots, batches = ranks_of_one(boardless=boardless), RootCalls(), Batches()
    context = ParallelContext(
        Strategy("ddp"), ranks, roots, RandomStreams(ranks), TrainingState(roots), batches,
        SimpleNamespace(), accumulates=True,  # type: ignore[arg-type]
    )  # fmt: skip
    ledger = Ledger("strategy", "ddp", explicit=False)
    with ExitStack() as undo:
        Replicate(ledger, context).install(undo)
        roots.install(undo)
        nn.Linear(2, 1)(torch.ones(1, 2))
    return ledger.outcome().notes


def test_ranks_that_cannot_share_memory_are_told_of() -> None:
    assert notes(boardless=False) == ()
    (note,) = notes(boardless=True)
    assert "no memory could be shared" in note


@pytest.mark.parametrize(
    ("local", "board", "boardless"),
    [("2", None, True), ("1", None, False), ("2", object(), False)],
    ids=["one node without", "two nodes", "one node"],
)
def test_only_ranks_of_one_node_miss_a_table(
    monkeypatch: pytest.MonkeyPatch, local: str, board: Any, boardless: bool
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(ranks_module.Board, "of_node", lambda *_: board)
    torchs = SimpleNamespace(PrefixStore=lambda *_: None, init_process_group=lambda *_, **__: None)
    monkeypatch.setattr(ranks_module, "dist", torchs)
    ranks = Ranks(0, 2, None, "gloo")
    ranks.join()
    assert ranks.joined
    assert ranks.boardless is boardless
