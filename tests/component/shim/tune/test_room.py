"""Results aren't compared where the host has no memory for it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.process import entry
from fasttrain.shim.tune import room
from fasttrain.shim.tune.repeats import Repeats
from fasttrain.shim.tune.room import FOR_CALL, free_bytes, no_room


def test_there_is_memory_for_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_bytes() > 0
    parameters = [*nn.Linear(10, 9, bias=False).parameters()]
    assert no_room(parameters, FOR_CALL) == ""
    monkeypatch.setattr(room, "free_bytes", lambda: 90 * FOR_CALL)
    assert no_room(parameters, FOR_CALL) == ""
    monkeypatch.setitem(entry._hidden, "LOCAL_WORLD_SIZE", "2")
    assert "GiB are free" in no_room(parameters, FOR_CALL)
    with torch.device("meta"):
        assert no_room(nn.Linear(10, 9).parameters(), FOR_CALL) == "", "not the host's memory"


def test_neither_a_call_nor_a_step_is_repeated_without_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda: 1)
    model, repeats = nn.Linear(2, 1), Repeats(RootCalls())
    optimizer = torch.optim.SGD(model.parameters())
    call: Any = None
    found = repeats._compared(call, model, print, print, 2**-8, eager=True)
    assert (found.right, found.reason[:9]) == (None, "comparing")
    model(torch.ones(1, 2)).sum().backward()
    with repeats.of_step(lambda _: nullcontext(), 2**-24) as parity:
        optimizer.step()
    assert (parity().right, parity().reason[:9]) == (None, "comparing")
