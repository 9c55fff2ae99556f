"""What is compiled, and what is left to run eagerly."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.shim.hooks.roots import repeated_blocks
from fasttrain.shim.levers.compile import targets
from fasttrain.shim.levers.compile.targets import (
    COROUTINE,
    GENERATOR,
    second_derivatives,
    uncompilable,
)


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(2, 2)


class Nest(nn.Module):
    """A block of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([block(), block()])


def test_blocks_of_one_class_are_repeated() -> None:
    model = Stack(block(), nn.TransformerEncoderLayer(2, 1), block())
    assert repeated_blocks(model) == [model.blocks[0], model.blocks[2]]


def test_blocks_inside_blocks_are_not_found_twice() -> None:
    model = Stack(Nest(), Nest())
    assert repeated_blocks(model) == list(model.blocks)


def test_lone_layers_are_no_blocks() -> None:
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_cannot_be_compiled() -> None:
    class Stepwise(nn.Module):
        def forward(self, x: Any) -> Any:
            yield x

    assert "TorchScript" in uncompilable(torch.jit.script(nn.ReLU()))
    assert "DataParallel" in uncompilable(nn.DataParallel(nn.ReLU()))

    class Awaited(nn.Module):
        async def forward(self, x: Any) -> Any:
            return x

    class AwaitedStepwise(nn.Module):
        async def forward(self, x: Any) -> Any:
            yield x

    assert uncompilable(Stepwise()) == uncompilable(AwaitedStepwise()) == GENERATOR
    assert uncompilable(Awaited()) == COROUTINE
    assert uncompilable(block()) == ""


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("import torch\ng = grad(y, x, create_graph=True)", 2),
        ("g = grad(\n    y,\n    x,\n    create_graph = True,\n)", 4),
        ("g = grad(y, x, create_graph=False)", None),
        ("# g = grad(y, x, create_graph=True)", None),
        ("'g = grad(y, x, create_graph=True)'", None),
        ("loss.backward(create_graph=create_graph)", None),
    ],
)
def test_second_derivatives_of_the_scripts_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, line: int | None
) -> None:
    monkeypatch.setattr(sys, "modules", {})
    path = tmp_path / "physics.py"
    path.write_text(code)
    module = ModuleType("physics")
    module.__file__ = str(path)
    sys.modules["physics"] = module
    found = second_derivatives()
    assert found.endswith(f"physics.py:{line}") if line else found == ""


def test_installed_modules_are_not_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.autograd.functional differentiates twice, which says nothing of the script
    monkeypatch.setattr(sys, "modules", {"f": torch.autograd.functional})
    assert second_derivatives() == ""


def test_a_loop_is_told_with_the_users_line() -> None:
    """Of the frames of a trace the innermost that is neither torch's nor fasttrain's."""
    trace = (
        '  File "/home/me/train.py", line 7, in <module>\n    model(x)\n'
        '  File "/home/me/net.py", line 12, in forward\n    x = self.cell(x)\n'
        f'  File "{nn.__file__}", line 99, in forward\n    return input\n'
    )
    assert targets._where(trace) == "/home/me/net.py:12"
    assert targets._where(None) == "an unknown line"
