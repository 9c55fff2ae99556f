"""One root of a run of several ranks: what averages its gradients, and when."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.modules.module import register_module_forward_hook

from fasttrain.shim.data_parallel.replica import PROBES, Replica
from support.fake_ranks import on_ranks

X = torch.linspace(-1, 1, 8).reshape(2, 4)
AGAIN = True  # differentiate twice; by its name, since nothing is compiled where a source has it


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


def train(replica: Replica, module: nn.Module, x: Tensor = X) -> None:
    """Make one pass as the lever does."""
    train_by(replica, replica.call(module, (x,), {}).sum())


def train_by(replica: Replica, loss: Tensor) -> None:
    replica.begin_pass()
    loss.backward()
    replica.after_backward()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the only rank of a group, for what DistributedDataParallel asks of one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    (ranks,) = on_ranks(1, lambda ranks: ranks)
    yield ranks
    dist.destroy_process_group()


def handed_over(ranks: Any, module: Any = None) -> tuple[Replica, Any]:
    """Return a root whose gradients torch's object averages, and none of whom has one."""
    module = module or Net()
    replica = Replica(module, ranks)
    for _ in range(PROBES + 1):
        module.zero_grad()
        train(replica, module)
    module.zero_grad()
    return replica, module


def test_first_passes_are_averaged_by_hand() -> None:
    modules = [Net(), Net()]
    modules[1].load_state_dict(modules[0].state_dict())

    def act(ranks: Any) -> list[Tensor | None]:
        module = modules[ranks.rank]
        train(Replica(module, ranks), module, X + ranks.rank)
        return [p.grad for p in module.parameters()]

    first, second = on_ranks(2, act)
    whole = Net()
    whole.load_state_dict(modules[0].state_dict())
    (whole(torch.cat([X, X + 1])).sum() / 2).backward()
    torch.testing.assert_close(first, [p.grad for p in whole.parameters()])
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_gradient_that_one_rank_lacks_counts_as_zeros() -> None:
    module = nn.Linear(4, 1)
    modules = [module, copy.deepcopy(module)]

    def act(ranks: Any) -> Any:
        replica = Replica(modules[ranks.rank], ranks)
        weight = modules[ranks.rank].weight
        out = replica.call(modules[ranks.rank], (X,), {})
        (weight.sum() if ranks.rank else out.sum()).backward()
        replica.after_backward()
        return modules[ranks.rank].bias.grad

    assert [float(grad) for grad in on_ranks(2, act)] == [1.0, 1.0]  # (2 + none) / 2


def test_torchs_object_takes_over_when_every_parameter_has_had_a_gradient(alone: Any) -> None:
    replica, module = handed_over(alone)
    sums = alone.sums
    assert not replica.watching
    train(replica, module)
    assert alone.sums == sums, "averaged by hand as well"
    assert all(p.grad is not None for p in module.parameters())


def test_a_gradient_in_another_memory_order_is_averaged_without_a_warning(alone: Any) -> None:
    """Which is an error in a script that takes warnings for errors."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            critic = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
            replica, _ = handed_over(alone, critic)
            x = X.clone().requires_grad_(True)
            scores = replica.call(critic, (x,), {}).sum()
            (slope,) = torch.autograd.grad(scores, x, create_graph=AGAIN)
            train_by(replica, scores + slope.square().sum())
            with pytest.raises(UserWarning, match="the script's"):
                warnings.warn("the script's", UserWarning, stacklevel=1)
    finally:
        torch.set_warn_always(before)
    assert not replica.watching


def test_torchs_object_is_not_made_of_parameters_on_two_types_of_devices(alone: Any) -> None:
    """Whose constructor would raise an error; a table on meta stands in for one on the host."""
    module: Any = Net()
    module.table = nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
    replica = Replica(module, alone)
    for _ in range(PROBES + 2):
        module.zero_grad()
        assert not replica.calls_together
        sums = alone.sums
        train(replica, module)
        assert alone.sums > sums


@pytest.mark.parametrize("before", [0, PROBES + 2])
def test_passes_inside_of_a_call_are_averaged_by_hand(alone: Any, before: int) -> None:
    """torch's object expects the pass of a call after it, and fails at the second such call."""
    module = Net()
    replica = Replica(module, alone)
    for _ in range(before):
        train(replica, module)

    def trains(x: Tensor) -> Tensor:
        module.zero_grad()
        train_by(replica, module(x).sum())
        return module(x)

    for _ in range(PROBES + 3):
        sums = alone.sums
        replica.call(trains, (X,), {})
        assert alone.sums > sums
        assert not replica.calls_together


def test_passes_of_several_calls_are_averaged_one_by_one(alone: Any) -> None:
    replica, module = handed_over(alone)
    for calls in (3, 1, 2):
        module.zero_grad()
        losses = [replica.call(module, (X,), {}).sum() for _ in range(calls)]
        for at, loss in enumerate(losses):
            sums = alone.sums
            replica.begin_pass()
            loss.backward()
            replica.after_backward()
            assert (alone.sums > sums) == (at > 0), "by torch's object if it is the first one only"
        sums = alone.sums
        replica.begin_pass()
        nn.Linear(4, 1)(X).sum().backward()
        replica.after_backward()
        assert alone.sums == sums, "a pass through another module"


def test_calls_of_which_one_pass_gives_all_gradients_are_averaged_once(alone: Any) -> None:
    replica, module = handed_over(alone)
    for _ in range(3):
        module.zero_grad()
        sums = alone.sums
        loss = sum(replica.call(module, (X,), {}).sum() for _ in range(2))
        replica.begin_pass()
        loss.backward()  # type: ignore[union-attr]
        replica.after_backward()
        assert alone.sums == sums


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_parameters_of_another_form_are_averaged_by_hand(alone: Any, change: str) -> None:
    replica, module = handed_over(alone)
    x = X
    if change == "dtype":
        module.double()
        x = X.double()
    else:
        for parameter in module.second.parameters():
            parameter.data = torch.cat([parameter.data, parameter.data])
    for _ in range(PROBES):
        module.zero_grad()
        sums = alone.sums
        train(replica, module, x)
        assert alone.sums > sums
    module.zero_grad()
    sums = alone.sums
    train(replica, module, x)
    assert alone.sums == sums, "torch's object has taken over again"
    assert all(p.grad is not None for p in module.parameters())


def test_hooks_on_all_modules_see_the_scripts_modules_only(alone: Any) -> None:
    replica, module = handed_over(alone)
    seen = []
    hook = register_module_forward_hook(lambda module, args, output: seen.append(type(module)))
    try:
        train(replica, module)
    finally:
        hook.remove()
    assert seen == [nn.Linear, nn.Linear, Net]


class Heads(nn.Module):
    """Has a parameter that is only used outside of its call, and heads that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))
        self.outside = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return sum((h(x) for h in self.heads), x.new_zeros(1)) if head > 1 else self.heads[head](x)


def train_heads(replica: Replica, module: Heads, head: int) -> list[bool]:
    """Make one pass, and return which parameters got a gradient."""
    module.zero_grad()
    loss = replica.call(module, (X, head), {}).sum() * module.outside
    replica.begin_pass()
    loss.backward()
    replica.after_backward()
    return [p.grad is not None for p in module.parameters()]


def test_passes_that_leave_parameters_out_are_averaged_by_hand(alone: Any) -> None:
    module = Heads()
    replica = Replica(module, alone)
    both, first = 2, 0
    for _ in range(PROBES):
        assert train_heads(replica, module, both) == [True] * 5
    sums = alone.sums
    assert train_heads(replica, module, both) == [True] * 5
    assert alone.sums == sums, "torch's object has taken over"
    assert train_heads(replica, module, first) == [True] * 3 + [False] * 2
    assert alone.sums > sums
    assert replica.watching
    for head in (1, 0, both, both, both):
        sums = alone.sums
        train_heads(replica, module, head)
        assert alone.sums > sums
    train_heads(replica, module, both)
    sums = alone.sums
    train_heads(replica, module, both)
    assert alone.sums == sums, "twice as many whole passes later it has taken over again"


def test_tensors_in_the_places_of_parameters_are_not_its_own(alone: Any) -> None:
    module, given = nn.Linear(4, 1), torch.randn(1, 4, requires_grad=True)
    replicas = []

    def call(module: nn.Module, x: Tensor) -> Tensor:
        replicas.append(Replica(module, alone))
        out: Tensor = replicas[-1].call(lambda x: module._call_impl(x), (x,), {})
        return out

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Tensor:
            return call(self.inner, x)

    weights = {"inner.weight": given * 2}
    torch.func.functional_call(Caller(), weights, (X,)).sum().backward()
    assert [id(p) for p in replicas[0].parameters] == [id(module.bias)]


def test_torchs_object_is_not_made_for_parameters_of_one_call(alone: Any) -> None:
    module = Net()
    replica = Replica(module, alone)
    for _ in range(PROBES):
        module.zero_grad()
        train(replica, module)
    given = {name: nn.Parameter(p.detach() * 2) for name, p in module.named_parameters()}

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Any:
            return replica.call(module._call_impl, (x,), {})

    torch.func.functional_call(Caller(), {f"inner.{k}": p for k, p in given.items()}, (X,))
    assert replica.watching, "torch's object averages what the call had"
    module.zero_grad()
    train(replica, module)
    assert not replica.watching


def test_the_module_stays_the_scripts_own(alone: Any) -> None:
    replica, module = handed_over(alone)
    assert type(module) is Net
    assert sorted(module.state_dict()) == sorted(Net().state_dict())
    twin = copy.deepcopy(module)
    torch.testing.assert_close(twin(X), replica.call(module, (X,), {}))
    ref = weakref.ref(module)
    del module
    gc.collect()
    assert ref() is None


def test_gradients_that_are_there_already_are_averaged_by_hand(alone: Any) -> None:
    replica, module = handed_over(alone)
    module.second.bias.grad = torch.ones(1)
    sums = alone.sums
    train(replica, module)
    assert alone.sums > sums


def test_a_hook_of_the_script_sees_the_mean() -> None:
    modules = [Net(), Net()]
    modules[1].load_state_dict(modules[0].state_dict())
    seen: list[list[Tensor]] = [[], []]

    def act(ranks: Any) -> Tensor | None:
        module = modules[ranks.rank]
        replica = Replica(module, ranks)
        module.first.weight.register_hook(lambda g: seen[ranks.rank].append(g.clone()))
        module.first.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
        train(replica, module, X + ranks.rank)
        return module.first.weight.grad

    first, second = on_ranks(2, act)
    whole = Net()
    whole.load_state_dict(modules[0].state_dict())
    (whole(torch.cat([X, X + 1])).sum() / 2).backward()
    expected = whole.first.weight.grad
    assert expected is not None
    for (mine,) in seen:
        torch.testing.assert_close(mine, expected)
    torch.testing.assert_close([first, second], 2 * [expected.clamp(-0.1, 0.1)])


def test_what_a_hook_of_the_script_sees_can_be_differentiated_again() -> None:
    modules = [Net(), Net(), Net()]
    for module in modules:
        module.load_state_dict(modules[2].state_dict())
        module.first.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))

    def second(module: Net, x: Tensor) -> Tensor | None:
        loss = module(x).square().sum() / len(x)
        weight = module.first.weight
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=AGAIN)
        (gradient.square().sum() + 0 * module(x).sum()).backward()
        return module.second.weight.grad

    def act(ranks: Any) -> Tensor | None:
        module = modules[ranks.rank]
        replica = Replica(module, ranks)
        replica.begin_pass()
        second(module, X[ranks.rank : ranks.rank + 1])
        replica.after_backward()
        return module.second.weight.grad

    expected = second(modules[2], X)
    torch.testing.assert_close(on_ranks(2, act), 2 * [expected])


def test_a_part_that_is_frozen_is_left_out_from_the_next_call_on(alone: Any) -> None:
    replica, module = handed_over(alone)
    module.first.requires_grad_(requires_grad=False)
    train(replica, module)
    assert [id(p) for p in replica.parameters] == [id(p) for p in module.second.parameters()]
    assert module.second.weight.grad is not None
    assert replica.watching, "it begins anew, by hand"


def test_as_many_that_are_frozen_and_thawed_at_once_are_noticed() -> None:
    def act(ranks: Any) -> list[Any]:
        torch.manual_seed(0)
        module = Net()
        replica = Replica(module, ranks)
        module.first.requires_grad_(requires_grad=False)
        train(replica, module, X[ranks.rank :][:1])
        module.first.requires_grad_(requires_grad=True)
        module.second.requires_grad_(requires_grad=False)
        module.zero_grad()
        train(replica, module, X[ranks.rank :][:1])
        assert module.first.weight.grad is not None
        return module.first.weight.grad.tolist()

    one, other = on_ranks(2, act)
    assert one == other


def test_a_root_that_is_first_called_in_a_backward_pass_is_averaged_after_it() -> None:
    def act(ranks: Any) -> Tensor | None:
        module = nn.Linear(4, 1)
        replicas = []

        class Calling(torch.autograd.Function):
            @staticmethod
            def forward(_: Any, x: Tensor) -> Tensor:
                return x.sum()

            @staticmethod
            def backward(_: Any, gradient: Tensor) -> Any:
                replicas.append(Replica(module, ranks))
                return gradient.expand(4)

        late = Calling.apply(torch.zeros(4, requires_grad=True))  # type: ignore[no-untyped-call]
        (late + module.weight.sum() * ranks.rank).backward()
        replicas[0].after_backward()
        return module.weight.grad

    for found in on_ranks(2, act):
        assert found is not None
        assert found.tolist() == [[0.5] * 4]
