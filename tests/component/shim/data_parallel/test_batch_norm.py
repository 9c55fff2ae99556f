"""BatchNorm in a split call: that of the whole batch, by torch's kernels or without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.shim.data_parallel.split import batch_norm
from fasttrain.shim.data_parallel.split.rows import reduced_by
from support import sync_batch_norm
from support.run_ahead import OnDevice

RANKS = 2
AGAIN = True  # differentiate twice
AT = (0, 5, 12)  # the ranks have 5 and 7 rows
SHAPES = {1: (12, 3), 2: (12, 3, 4, 2), 3: (12, 3, 2, 2, 2)}
KINDS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


class Counting(TorchDispatchMode):  # type: ignore[misc]
    """Counts operators; none may read a number, for which a GPU would be waited for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


class Ranks:
    """Two ranks, which are threads."""

    world_size = RANKS

    def __init__(self) -> None:
        self.sums = 0
        self._own = threading.local()
        self._parts: dict[int, Tensor] = {}
        self._barrier = threading.Barrier(RANKS, timeout=20)

    @property
    def rank(self) -> int:
        return int(self._own.rank)

    def reduce(self, part: Tensor, of_loss: bool) -> Tensor:
        assert not of_loss
        self._parts[self.rank] = part
        self._barrier.wait()
        whole = sum(self._parts.values(), torch.zeros_like(part))
        self._barrier.wait()
        self.sums += self.rank == 0
        return whole

    def run(self, act: Callable[[int], Any]) -> list[Any]:
        """Return what both ranks return, inside of a split call."""

        def start(rank: int) -> Any:
            self._own.rank = rank
            return act(rank)

        with ThreadPoolExecutor(RANKS) as pool, ExitStack() as undo:
            undo.enter_context(reduced_by(self.reduce))
            active: Any = SimpleNamespace(active=True)
            batch_norm.install(active, self, undo)  # type: ignore[arg-type]
            return list(pool.map(start, range(RANKS)))


@pytest.fixture(params=["operators", "cuda", "cpu"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "operators":
        monkeypatch.setattr(batch_norm, "_kernels_for", lambda _: None)
    elif request.param == "cuda":
        monkeypatch.setattr(batch_norm, "_kernels_for", lambda _: batch_norm._Cuda)
        for kernel in sync_batch_norm.KERNELS:
            monkeypatch.setattr(torch, kernel.__name__, kernel)
    return str(request.param)


def module(dims: int, **how: Any) -> nn.Module:
    norm: nn.Module = KINDS[dims](3, **how)
    with torch.no_grad():
        for at, parameter in enumerate(norm.parameters()):
            parameter.copy_(torch.linspace(0.5, 2.0, 3) - at)
    return norm


def batch(dims: int) -> Tensor:
    values = torch.arange(float(torch.Size(SHAPES[dims]).numel())).reshape(SHAPES[dims])
    return (values * 0.7).sin() * 2 + values / values.numel()


def results(norm: nn.Module, values: Tensor, gradient: Tensor, *, scale: float = 1) -> Any:
    values = values.clone().requires_grad_()
    output = norm(values)
    output.backward(gradient * scale)
    return [output.detach(), values.grad, *(p.grad for p in norm.parameters())], norm.state_dict()


@pytest.mark.parametrize(
    ("dims", "how"),
    [(1, {}), (2, {}), (3, {}), (2, {"affine": False}), (2, {"track_running_stats": False}),
     (1, {"momentum": None}), (2, {"eps": 0.1, "momentum": 0.5})],
)  # fmt: skip
def test_rows_come_out_as_in_the_whole_batch(way: str, dims: int, how: dict[str, Any]) -> None:
    values, gradient = batch(dims), batch(dims).cos()
    expected, state = results(module(dims, **how), values, gradient)

    def of(rank: int) -> Any:
        own = slice(AT[rank], AT[rank + 1])
        return results(module(dims, **how), values[own], gradient[own], scale=RANKS)

    ranks = Ranks()
    found = ranks.run(of)
    assert ranks.sums == 2, "one in each direction"
    rows = [torch.cat([one[0][at] for one in found]) for at in range(2)]
    torch.testing.assert_close([rows[0], rows[1] / RANKS], expected[:2], rtol=1e-4, atol=1e-5)
    for at in range(2, len(expected)):  # of weight and bias
        mean = sum(one[0][at] for one in found) / RANKS
        torch.testing.assert_close(mean, expected[at], rtol=1e-4, atol=1e-4)
    for _, kept in found:
        torch.testing.assert_close(dict(kept), dict(state), rtol=1e-4, atol=1e-5)


def test_it_can_be_differentiated_twice(way: str) -> None:
    values = batch(1)

    def penalty(norm: nn.Module, own: Tensor, scale: float) -> Tensor:
        own = own.clone().requires_grad_()
        loss = norm(own).pow(3).sum() * scale
        (slope,) = torch.autograd.grad(loss, own, create_graph=AGAIN)
        (slope / scale).square().sum().mul(scale).backward()
        assert own.grad is not None
        return own.grad

    expected = penalty(module(1), values, 1)
    found = Ranks().run(lambda rank: penalty(module(1), values[AT[rank] : AT[rank + 1]], RANKS))
    torch.testing.assert_close(torch.cat(found) / RANKS, expected, rtol=1e-3, atol=1e-3)


def test_a_module_in_low_precision(way: str) -> None:
    values = batch(2).bfloat16()
    found = Ranks().run(lambda rank: module(2).bfloat16()(values[AT[rank] : AT[rank + 1]]))
    expected = module(2).bfloat16()(values)
    torch.testing.assert_close(torch.cat(found), expected, rtol=2e-2, atol=2e-2)


def test_memory_in_channels_last_is_kept(way: str) -> None:
    values = batch(2).contiguous(memory_format=torch.channels_last)
    found = Ranks().run(lambda rank: module(2)(values[AT[rank] : AT[rank + 1]]))
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in found)


def test_low_precision_has_moments_in_full(way: str) -> None:
    values = batch(2).bfloat16()
    expected = module(2)(values.float())
    found = Ranks().run(lambda rank: module(2)(values[AT[rank] : AT[rank + 1]]))
    assert {one.dtype for one in found} == {torch.bfloat16}
    torch.testing.assert_close(torch.cat(found).float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("affine", [True, False])
def test_gradients_in_low_precision(way: str, affine: bool) -> None:
    values, gradient = batch(2).bfloat16(), batch(2).cos().bfloat16()
    expected, _ = results(module(2, affine=affine), values.float(), gradient.float())

    def of(rank: int) -> Any:
        own = slice(AT[rank], AT[rank + 1])
        return results(module(2, affine=affine), values[own], gradient[own], scale=RANKS)[0]

    found = Ranks().run(of)
    rows = torch.cat([one[1] for one in found])
    assert rows.dtype is torch.bfloat16
    torch.testing.assert_close(rows.float() / RANKS, expected[1], rtol=2e-2, atol=1e-2)
    for at in range(2, len(expected)):
        mean = (found[0][at] + found[1][at]) / RANKS
        torch.testing.assert_close(mean, expected[at], rtol=2e-2, atol=2e-2)


def test_a_large_mean_costs_no_precision_of_the_statistics(way: str) -> None:
    values = batch(2).double() + 1e4
    exact = values.var((0, 2, 3), correction=0)

    def of(rank: int) -> Tensor:
        norm: Any = module(2, momentum=1.0)
        norm(values[AT[rank] : AT[rank + 1]].float())
        count = values.numel() // 3
        return norm.running_var.double() * (count - 1) / count

    for found in Ranks().run(of):
        torch.testing.assert_close(found, exact, rtol=1e-2, atol=0)


def _operators(rank: int) -> int:
    norm, own = module(2), batch(2)[AT[rank] : AT[rank + 1]].requires_grad_()
    with Counting() as counting:
        norm(own).backward(own.detach())
    return counting.count


@pytest.mark.parametrize("of", ["cuda", "cpu"])
def test_kernels_take_few_operators(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each costs some microseconds, of which small layers have no more to give."""
    kernels = [kernel.__name__ for kernel in sync_batch_norm.KERNELS] if of == "cuda" else []
    if of == "cuda":
        monkeypatch.setattr(batch_norm, "_kernels_for", lambda _: batch_norm._Cuda)
        for kernel in sync_batch_norm.KERNELS:
            monkeypatch.setattr(torch, kernel.__name__, _uncounted(kernel))
    own = max(Ranks().run(_operators)) + len(kernels)
    monkeypatch.setattr(batch_norm, "_kernels_for", lambda _: None)
    assert own <= (25 if of == "cuda" else 42)
    assert own < max(Ranks().run(_operators)) * 0.65


def test_kernels_are_those_of_the_device() -> None:
    assert batch_norm._kernels_for(torch.ones(1).as_subclass(OnDevice)) is batch_norm._Cuda
    assert batch_norm._kernels_for(torch.ones(1)) is batch_norm._Cpu
    assert batch_norm._kernels_for(torch.ones(1, device="meta")) is None


def test_compiled_code_takes_no_kernels_and_has_no_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo can't trace what a kernel's function keeps for its backward pass."""
    monkeypatch.setattr(batch_norm, "_kernels_for", lambda _: pytest.fail("kernels"))
    norm, values = module(1), batch(1)
    expected = module(1)(torch.cat([values, values]))[: len(values)]
    with ExitStack() as undo:
        # The other rank has the same rows.
        undo.enter_context(reduced_by(lambda part, _: part + part.flip(0)))
        ranks: Any = SimpleNamespace(rank=0, world_size=RANKS)
        splits: Any = SimpleNamespace(active=True)
        batch_norm.install(splits, ranks, undo)
        call: Any = torch.compile(norm, backend="aot_eager", fullgraph=True)
        found = call(values)
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _uncounted(kernel: Any) -> Any:
    def run(*args: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return kernel(*args)

    return run


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_model_with_batch_norm_can_be_compiled_by_torchscript() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    values = torch.rand(4, 3)
    with ExitStack() as undo:
        inactive: Any = SimpleNamespace(active=False)
        batch_norm.install(inactive, Ranks(), undo)
        scripted: Any = torch.jit.script(model)
        assert torch.equal(scripted(values), model(values))
