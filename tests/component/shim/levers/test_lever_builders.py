"""The modules that the rows of the levers name, and the receipt in the rows' order."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from fasttrain.model.levers import LEVERS
from support.rig import rig

MODULES = sorted({m for row in LEVERS.values() for ms in row.workers.values() for m in ms})


@pytest.mark.parametrize("module", MODULES)
def test_each_builds_a_lever(module):
    assert len(inspect.signature(import_module(module).build).parameters) == 3


def test_every_lever_of_one_process_is_in_the_receipt_in_order():
    with rig(amp="float16", compile="default", optimizer="fused", matmul="high") as runtime:
        told = list(runtime.outcomes())
    assert [name for name in told if name in LEVERS] == [
        name for name, row in LEVERS.items() if not row.several
    ]
    assert told.index("loss_scaling") == told.index("amp") + 1


def test_levers_that_are_off_are_in_the_receipt_too():
    with rig() as runtime:
        assert list(runtime.outcomes()) == [n for n, row in LEVERS.items() if not row.several]
