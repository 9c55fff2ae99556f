"""Steps are fused, and outside of them the optimizer is what the script made."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fasttrain.model.outcome import State
from fasttrain.shim.levers import optimizer
from fasttrain.shim.levers.optimizer import NO_KERNEL


@pytest.fixture
def fused(rig: Any) -> Iterator[Any]:
    with rig(optimizer="fused") as runtime:
        yield lambda: runtime.outcomes()["optimizer"]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape or (3,)))


def step(optimizer: Any, gradient: float = 1.0) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, gradient)
    optimizer.step()


def test_it_is_really_fused(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    original = torch._fused_adam_

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "_fused_adam_", watched)
    optimizer = torch.optim.Adam([parameter()])
    step(optimizer)
    assert len(calls) == 1
    assert optimizer.param_groups[0]["fused"] is None
    assert optimizer.defaults["fused"] is None


OWN = [
    ("foreach=True", lambda p: torch.optim.SGD(p, lr=0.1, foreach=True)),
    ("foreach=False", lambda p: torch.optim.Adam(p, foreach=False)),
    ("fused=True", lambda p: torch.optim.AdamW(p, fused=True)),
    ("fused=False", lambda p: torch.optim.AdamW(p, fused=False)),
    ("differentiable=True", lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True)),
    ("capturable=True", lambda p: torch.optim.Adam(p, capturable=True)),
]


@pytest.mark.parametrize(("choice", "make"), OWN)
def test_the_scripts_own_choice(fused: Any, choice: str, make: Any) -> None:
    optimizer = make([parameter()])
    before = [dict(group) for group in optimizer.param_groups]
    optimizer.step()  # without gradients: every choice can do that on a CPU
    outcome = fused()
    assert outcome.state is State.CEDED
    assert choice in outcome.reason
    assert re.search(r"test_optimizer_lever\.py:\d+", outcome.reason)
    assert [dict(group) for group in optimizer.param_groups] == before


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.optim.RMSprop([parameter()]), NO_KERNEL),
        (lambda: torch.optim.Adam([parameter()], lr=torch.tensor(0.1)), "tensor"),
        (lambda: torch.optim.SGD([nn.Parameter(torch.ones(2) * 1j)], lr=0.1), "complex64"),
        (lambda: type("Mine", (torch.optim.Adam,), {})([parameter()]), NO_KERNEL),
    ],
)
def test_what_has_no_fused_kernel_is_left_alone(fused: Any, make: Any, reason: str) -> None:
    optimizer = make()
    step(optimizer)
    outcome = fused()
    assert outcome.state is State.SKIPPED
    assert reason in outcome.reason
    assert optimizer.param_groups[0].get("fused") is None


def test_a_class_that_refuses_cuda_has_no_fused_kernel_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adagrad of torch 2.11: its kernel for CUDA is there, and its step raises."""

    def init_group(self: Any, *_: Any) -> None:
        for p in self.params:
            torch.optim.optimizer._device_dtype_check_for_fused(p, cuda_unsupported=True)

    kernels = torch.utils._foreach_utils._get_fused_kernels_supported_devices()
    assert "cuda" in kernels
    monkeypatch.setattr(optimizer, "_has_kernel", lambda *_: True)
    with FakeTensorMode():
        made = torch.optim.Adagrad([nn.Parameter(torch.ones(3, device="cuda"))])
    assert optimizer.unfusible(made) == ""
    monkeypatch.setattr(torch.optim.Adagrad, "_init_group", init_group)
    assert "no fused kernel for cuda" in optimizer.unfusible(made)


class _ForeachByDefault(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1, foreach: bool = True) -> None:
        super().__init__(params, {"lr": lr, "foreach": foreach, "capturable": True})

    def step(self, closure: Any = None) -> None:
        """Train nothing."""


@pytest.mark.parametrize(
    ("chosen", "state", "reason"),
    [({}, State.SKIPPED, NO_KERNEL), ({"foreach": False}, State.CEDED, "foreach=False")],
)
def test_a_default_of_the_class_is_no_choice(
    fused: Any, chosen: dict[str, bool], state: State, reason: str
) -> None:
    _ForeachByDefault([parameter()], **chosen).step()
    assert fused().state is state
    assert reason in fused().reason


def test_lbfgs_and_its_closure(fused: Any) -> None:
    p = parameter()
    optimizer = torch.optim.LBFGS([p])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p - 3).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert torch.allclose(p, torch.full((3,), 3.0))
    assert fused().state is State.SKIPPED


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), State.SKIPPED),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), State.SKIPPED),
        (lambda p: torch.optim.SparseAdam(p, lr=0.1), State.SKIPPED),
    ],
)
@pytest.mark.parametrize("with_closure", [True, False])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_gradients(fused: Any, make: Any, state: State, with_closure: bool) -> None:
    def train() -> torch.Tensor:
        torch.manual_seed(0)
        embedding = nn.Embedding(4, 2, sparse=True)
        optimizer = make(embedding.parameters())
        for _ in range(3):
            optimizer.zero_grad()

            def closure() -> torch.Tensor:
                loss = embedding(torch.tensor([1, 1, 3])).sum()
                loss.backward()
                return loss

            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        return embedding.weight.detach()

    weights = train()
    assert fused().state is state
    torch.manual_seed(0)
    untouched = nn.Embedding(4, 2).weight
    assert torch.equal(weights[[0, 2]], untouched[[0, 2]])
    assert not torch.equal(weights[1], untouched[1])


@pytest.mark.parametrize("positional", [True, False])
def test_a_closure_of_a_model_with_matrices(fused: Any, positional: bool) -> None:
    """Frameworks pass one to every step; that its gradients are dense is only known behind it."""
    p, other = parameter(3, 2), parameter(3, 2)
    optimizer, plain = (torch.optim.SGD([q], lr=0.1, momentum=0.9) for q in (p, other))
    seen = []

    def closure(q: Any = p) -> Any:
        q.grad = None
        loss = (q - 3).square().sum()
        loss.backward()
        seen.append(optimizer.param_groups[0]["fused"])
        return loss

    for _ in range(3):
        optimizer.step(closure) if positional else optimizer.step(closure=closure)
        closure(other)
        plain.step()
    assert torch.allclose(p, other)
    assert seen == [None] * 6  # the script meets its own choice there
    assert fused().counts["steps"] == 6


def test_gradients_that_become_sparse_later(fused: Any) -> None:
    p = parameter(3, 2)
    optimizer = torch.optim.SGD([p], lr=1.0)
    step(optimizer)
    p.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 2), (3, 2),
                                     check_invariants=False)  # fmt: skip
    optimizer.step()
    assert p.tolist() == [[-1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]
    assert fused().counts == {"steps": 1}
    assert any("sparse" in note for note in fused().notes)


def test_groups_that_are_added_later(fused: Any) -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    step(optimizer)
    optimizer.add_param_group({"params": [parameter()], "lr": 0.5})
    step(optimizer)
    assert [group["params"][0][0].item() for group in optimizer.param_groups] == pytest.approx(
        [0.8, 0.5]
    )
    assert [group["fused"] for group in optimizer.param_groups] == [None, None]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1) * 1j)]})
    step(optimizer)  # now it can't be fused
    assert fused().counts == {"steps": 2}


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=8),
    ],
)
def test_schedulers_warn_no_more_than_without(rig: Any, schedule: Any) -> None:
    def rates() -> tuple[list[float], list[str]]:
        optimizer = torch.optim.SGD([parameter()], lr=0.5, momentum=0.9)
        found = []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            scheduler = schedule(optimizer)
            for _ in range(4):
                step(optimizer)
                scheduler.step()
                found.append(optimizer.param_groups[0]["lr"])
        return found, [str(warning.message) for warning in told]

    plain = rates()
    with rig(optimizer="fused"):
        assert rates() == plain
    assert plain[1] == []


def test_some_fused_and_some_not(fused: Any) -> None:
    step(torch.optim.SGD([parameter()], lr=0.1, foreach=True))
    assert fused().state is State.CEDED
    step(torch.optim.SGD([parameter()], lr=0.1))
    step(torch.optim.SGD([parameter()], lr=0.1, foreach=False))
    assert fused().state is State.APPLIED
    assert any("foreach=False" in note for note in fused().notes)


def test_what_torch_npu_does_not_take_gets_torchs_own_fused_steps(rig: Any) -> None:
    """As where parameters are not on an NPU; without torch_npu every parameter is such a one."""
    with rig(optimizer="npu") as runtime:
        adam, rprop = torch.optim.Adam([parameter()]), torch.optim.Rprop([parameter()])
        for _ in range(3):
            step(adam)
            step(rprop)
        outcome = runtime.outcomes()["optimizer"]
    assert outcome.state is State.APPLIED
    assert outcome.counts["steps"] == 2  # the first one showed that torch_npu's can't make it
    told = " ".join(outcome.notes)
    assert "Adam" in told
    assert "Rprop" in told
