"""What every lever promises: it is installed, takes effect, is undone, and tells the truth."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fasttrain.model.outcome import State
from fasttrain.shim.levers.amp.lever import AmpLever
from fasttrain.shim.levers.compile.lever import UNUSED, CompileLever
from fasttrain.shim.levers.matmul import MatmulLever
from fasttrain.shim.levers.optimizer import OptimizerLever
from support.rig import MACHINE, backend, rig


@dataclass(frozen=True)
class Case:
    """One lever: how it is chosen, where it lives, and its counts after three steps."""

    name: str
    choice: str
    kind: Any
    unused: str  # what the reason says at least when the script never used it
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def chosen(self) -> dict[str, str]:
        return {self.name: self.choice}


CASES = [
    Case("amp", "bfloat16", AmpLever, "fp32", {"forwards": 3}),
    Case(
        "compile",
        "default",
        CompileLever,
        UNUSED,
        {"targets": 1, "graphs": 1, "breaks": 0, "recompiles": 0, "failures": 0, "limits": 0},
    ),
    Case("optimizer", "fused", OptimizerLever, "optimizer", {"steps": 3}),
    Case("matmul", "high", MatmulLever, ""),
]
lever = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


class Torch:
    """All that a lever may touch in torch, as it is now."""

    def __init__(self) -> None:
        places: list[tuple[Any, tuple[str, ...]]] = [
            (nn.Module, ("__call__", "_call_impl", "__init__", "__setattr__")),
            (torch.optim.Optimizer, ("__init__", "state_dict", "load_state_dict")),
            (torch.optim.SGD, ("__init__", "step")),
            (torch.amp.autocast, ("__init__", "__enter__", "__exit__")),
            (torch.amp.GradScaler, ("__init__", "step", "scale")),
            (torch, ("compile", "set_float32_matmul_precision")),
            (torch.jit, ("trace", "trace_module", "_get_trace_graph", "script")),
            (nn.functional, ("binary_cross_entropy", "linear")),
            (torch._C._nn, ("binary_cross_entropy",)),
            (type(torch.backends.cuda.matmul), ("__setattr__",)),
        ]
        self.objects = [(o, n, getattr(o, n)) for o, names in places for n in names]
        self.values = {
            "hooks": (*_global_optimizer_pre_hooks, *_global_optimizer_post_hooks),
            "module hooks": len(nn.modules.module._global_forward_hooks),
            "matmul": torch.get_float32_matmul_precision(),
            "dynamo": torch._dynamo.config.get_config_copy(),
            "functorch": torch._functorch.config.get_config_copy(),
            "metrics": torch._dynamo.utils._compilation_metrics.maxlen,
            "builtins": len(torch.jit._builtins._get_builtin_table()),
        }

    def assert_unchanged(self) -> None:
        changed = [f"{owner}.{name}" for owner, name, was in self.objects
                   if getattr(owner, name) is not was]  # fmt: skip
        assert changed == []
        assert Torch().values == self.values


def train(model: nn.Module, steps: int = 3) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.fixture(autouse=True)
def _quick() -> Any:
    with backend("eager"):
        train(nn.Linear(4, 4), 1)  # torch patches the optimizer's class when it is first used
        yield


@lever
def test_it_takes_effect(case: Case) -> None:
    with rig(**case.chosen) as runtime:
        train(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        outcome = runtime.outcomes()[case.name]
    assert (outcome.state, outcome.reason) == (State.APPLIED, "")
    assert (outcome.asked, outcome.explicit) == (case.choice, True)
    # Whether a graph is in the cache depends on what was run before.
    assert {**outcome.counts, "cached graphs": 0} == {**case.counts, "cached graphs": 0}
    assert len(outcome.sites) == 1
    assert outcome.notes == ()


@lever
def test_torch_is_as_before(case: Case) -> None:
    before = Torch()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    attributes = set(vars(model))
    with rig(**case.chosen):
        optimizer = train(model)
    before.assert_unchanged()
    assert set(vars(model)) == attributes
    assert optimizer._optimizer_state_dict_post_hooks == {}
    assert optimizer._optimizer_load_state_dict_post_hooks == {}
    assert model(torch.ones(2, 4)).dtype is torch.float32


def test_torch_is_as_before_with_all_of_them() -> None:
    before = Torch()
    with rig(**{case.name: case.choice for case in CASES}) as runtime:
        train(nn.Linear(4, 4))
        states = {name: outcome.state for name, outcome in runtime.outcomes().items()}
    assert states == dict.fromkeys(("amp", "compile", "optimizer", "matmul"), State.APPLIED)
    before.assert_unchanged()


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)  # matmul is just set
def test_never_used_it_ends_armed_and_says_why(case: Case) -> None:
    with rig(**case.chosen) as runtime:
        outcome = runtime.outcomes()[case.name]
    assert outcome.state is State.ARMED
    assert case.unused in outcome.reason


@lever
def test_not_chosen_it_says_so(case: Case) -> None:
    with rig() as runtime:
        train(nn.Linear(4, 4))
        asked = runtime.outcomes()[case.name]
    with rig(MACHINE) as runtime:
        decided = runtime.outcomes()[case.name]
    assert (asked.state, decided.state) == (State.OFF, State.SKIPPED)
    assert decided.reason == "a test wants it"


def fail_behind(install: Callable[..., None]) -> Callable[..., None]:
    def failing(self: Any, undo: ExitStack) -> None:
        install(self, undo)
        raise OSError("half-way")

    return failing


@lever
def test_an_install_that_fails_rolls_back_alone(case: Case) -> None:
    before = Torch()
    broken = mock.patch.object(case.kind, "install", fail_behind(case.kind.install))
    with broken, rig(**{case.name: case.choice for case in CASES}) as runtime:
        train(nn.Linear(4, 4))
        outcomes = runtime.outcomes()
    assert outcomes[case.name].state is State.FAILED
    assert outcomes[case.name].reason == "OSError: half-way"
    assert outcomes[case.name].counts == {}
    others = {o.state for name, o in outcomes.items() if name != case.name}
    assert others == {State.APPLIED}
    before.assert_unchanged()


@lever
def test_no_random_number_is_taken(case: Case) -> None:
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    with rig(**case.chosen):
        assert torch.equal(torch.randn(3), expected)
        model = nn.Linear(4, 4)
        torch.manual_seed(0)
        train(model)
        assert torch.equal(torch.randn(3), expected)
