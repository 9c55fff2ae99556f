"""Calls of ranks are repeated inside of DDP, and what is wrong on one rank is refused by all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from fasttrain.model.tuning import Parity
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.roots import Root, RootCalls
from fasttrain.shim.tune.confirmed import LOOKS, MOST_LOOKS, confirmed
from fasttrain.shim.tune.ranks import Together
from fasttrain.shim.tune.repeats import NO_CALL, Repeats
from support.forked_ranks import Ended, on_ranks

BF16 = 2.0**-8
ROWS, WIDTH = 64, 16
Plant = Callable[[nn.Module], AbstractContextManager[Any]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 32), nn.BatchNorm1d(32)
        self.dropout, self.last = nn.Dropout(0.2), nn.Linear(32, 4)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.last(self.dropout(torch.tanh(self.norm(self.first(x)))))  # type: ignore[no-any-return]


class Reduces(Net):
    """A model that communicates itself."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        dist.all_reduce(mean)
        return super().forward(x - mean / 2)


class Holds(nn.Module):
    """A model with DDP inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = DistributedDataParallel(Net())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


# What a lever may do.


def bf16(_: nn.Module) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@contextmanager
def scales(net: nn.Module) -> Iterator[None]:
    """Multiply what the first layer gives by a little more than 1."""
    handle = net.get_submodule("first").register_forward_hook(lambda *of: of[2] * 1.03)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def drops_nothing(net: nn.Module) -> Iterator[None]:
    net.get_submodule("dropout").eval()
    yield


@contextmanager
def forgets_statistics(net: nn.Module) -> Iterator[None]:
    norm: Any = net.get_submodule("norm")
    norm.momentum = 0.0
    try:
        yield
    finally:
        norm.momentum = 0.1


@contextmanager
def raises(net: nn.Module) -> Iterator[None]:
    raise ValueError("no kernel")
    yield


class Script:
    """The training of one rank."""

    def __init__(self, ranks: Ranks, folder: Path, kind: type[nn.Module], **how: Any) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/group", rank=ranks.rank, world_size=2
        )
        torch.manual_seed(0)
        made = kind()
        self.inner: nn.Module = made
        self.model = made if kind is Holds else DistributedDataParallel(made, **how)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(ranks.rank)
        self.undo = ExitStack()
        self.roots = RootCalls()
        self.roots.install(self.undo)
        self.discovered = 0
        self.roots.on_discover.append(self._on_discover)

    def _on_discover(self, *_: Any) -> None:
        self.discovered += 1

    def step(self) -> None:
        x, y = torch.randn(ROWS, WIDTH), torch.randint(0, 4, (ROWS,))
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def state(self) -> list[float]:
        """Return a number for each tensor, counts of calls and roots, and what is drawn next."""
        tensors = [t.double().sum().item() for t in self.model.state_dict().values()]
        steps: Any = getattr(self.inner, "steps", 0)
        return [*tensors, steps, self.discovered, torch.rand(()).item()]


def looked(script: Script, agree: Together, plant: Plant) -> Parity:
    """Compare a plain call with one under a lever, at as many steps as it takes."""
    on = [False]

    def region(root: Root, call: Any, args: Any, kwargs: Any) -> Any:
        module = root.ref()
        assert module is not None
        with plant(module) if on[0] else nullcontext():
            return call(*args, **kwargs)

    script.roots.region = region
    repeats = Repeats(script.roots, nullcontext)
    looks: list[list[Parity]] = []
    while (found := confirmed(looks)) is None:
        with repeats.of_calls(BF16, eager=True) as compare:
            script.step()
        own = compare(lambda: on.__setitem__(0, False), lambda: on.__setitem__(0, True))
        on[0] = False
        looks.append(agree.findings(own))
    return found


def compared(
    folder: Path, plant: Callable[[int], Plant], kind: type[nn.Module] = Net, **how: Any
) -> list[Parity]:
    """Return what both ranks say of a lever, having seen that training goes on undisturbed."""

    def act(ranks: Ranks) -> Any:
        script = Script(ranks, folder, kind, **how)
        agree = Together(ranks, SimpleNamespace(steps=0), 0.0)  # type: ignore[arg-type]
        for _ in range(4):
            script.step()
        found = looked(script, agree, plant(ranks.rank))
        for _ in range(3):
            script.step()
        return [found.right, found.reason, LOOKS if found.right is False else 1, script.state()]

    def plainly(ranks: Ranks) -> Any:
        script = Script(ranks, folder / "plain", kind, **how)
        for _ in range(7 + steps):
            script.step()
        return script.state()

    ended: list[Ended] = on_ranks(folder, act)
    goods = [one.good for one in ended]
    steps = goods[0][2]
    assert [one.good for one in on_ranks(folder / "plain", plainly)] == [it[3] for it in goods]
    return [Parity(right, reason) for right, reason, *_ in goods]


def test_bf16_is_right_on_two_ranks(tmp_path: Path) -> None:
    first, second = compared(tmp_path, lambda _: bf16)
    assert first == second
    assert first.right is True, first.reason


@pytest.mark.parametrize("plant", [scales, drops_nothing, forgets_statistics, raises])
def test_what_is_wrong_on_one_rank_is_refused_by_both(tmp_path: Path, plant: Plant) -> None:
    first, second = compared(tmp_path, lambda rank: plant if rank else bf16)
    assert first == second
    assert first.right is False, first.reason
    assert first.reason.startswith("on rank 1: ")


def test_a_reducer_that_looks_for_unused_parameters_is_left_alone(tmp_path: Path) -> None:
    first, second = compared(tmp_path, lambda _: bf16, find_unused_parameters=True)
    assert first == second
    assert first.right is True, first.reason


@pytest.mark.parametrize(
    ("kind", "why"), [(Reduces, "communicates with other ranks"), (Holds, "is inside of it")]
)
def test_what_other_ranks_are_needed_for_is_not_repeated(
    tmp_path: Path, kind: type[nn.Module], why: str
) -> None:
    first, second = compared(tmp_path, lambda _: bf16, kind)
    assert first == second
    assert first.right is None
    assert why in first.reason


# What the findings of several steps come to.

YES, NO, UNKNOWN = Parity(True, "near"), Parity(False, "far", 2.0, 1.0), Parity(None, "NaN")
NOTHING = Parity(None, f"on rank 1: {NO_CALL}")


@pytest.mark.parametrize(
    ("looks", "right"),
    [
        ([[YES]], True),
        ([[UNKNOWN]], None),
        ([[NO], [NO], [NO]], False),
        ([[NO], [YES], [YES]], True),
        ([[NO], [YES], [NO]], None),
        ([[NOTHING], [YES]], True),
        ([[NOTHING]] * MOST_LOOKS, None),
        ([[YES, NO], [NO, NO], [NO, NO]], False),
        ([[YES, NO], [NO, YES], [NO, YES]], True),
        ([[YES, UNKNOWN]], None),
    ],
)
def test_findings_are_confirmed(looks: list[list[Parity]], right: bool | None) -> None:
    for so_far in range(len(looks)):
        assert confirmed(looks[:so_far]) is None, "another step is needed"
    found = confirmed(looks)
    assert found is not None
    assert found.right is right


def test_without_time_for_another_step_a_wrong_one_is_wrong() -> None:
    found = confirmed([[YES, NO]], last=True)
    assert found is not None
    assert found.right is False
