"""Snapshots are the affair of the script's own process, and not of those that it forks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from fasttrain.shim.snapshots.preempt_signal import PREEMPT_SIGNAL
from support.preempted import data, loss_of, network

Tick = Callable[[], None]
FORK: Any = multiprocessing.get_context("fork")


def epoch(tick: Tick) -> Any:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in DataLoader(data(), 8):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        tick()
    return model.state_dict()


def weights_of_a_child(queue: Any) -> None:
    """Train in a process that SLURM's signal reaches as well."""

    def tick() -> None:
        PREEMPT_SIGNAL.flag = True

    queue.put({name: value.tolist() for name, value in epoch(tick).items()})


def forked(target: Any) -> Any:
    queue = FORK.SimpleQueue()
    child = FORK.Process(target=target, args=(queue,))
    child.start()
    child.join()
    assert child.exitcode == 0
    return queue.get()


def test_children_that_train_take_no_snapshot(preempted: Any, tmp_path: Any) -> None:
    def folds(tick: Tick) -> Any:
        return [forked(weights_of_a_child) for _ in range(2)]

    first, second = preempted.attempt(folds, 0)
    assert first == second
    assert not (tmp_path / "snapshots").exists()


def test_a_run_whose_children_train_goes_on_without_snapshots(preempted: Any, capfd: Any) -> None:
    def both(tick: Tick) -> Any:
        forked(weights_of_a_child)
        return epoch(tick)

    assert preempted.attempt(both, 3) is not None  # the signal doesn't end it
    assert "trains in processes that it forks" in capfd.readouterr().err


def test_children_that_only_look_leave_a_run_its_snapshots(preempted: Any) -> None:
    """Such as an evaluation; in a replay, too, what they read and compute is real."""

    def evaluated(tick: Tick) -> Any:
        def look(queue: Any) -> None:
            sums = [x.sum().item() for x, _ in DataLoader(data(), 8)]
            queue.put((sums, network()(torch.ones(1, 4)).shape))

        seen: list[Any] = []

        def tick_and_look() -> None:
            seen.append(forked(look))
            tick()

        return epoch(tick_and_look), seen

    assert preempted.differ(evaluated, 3) == []
