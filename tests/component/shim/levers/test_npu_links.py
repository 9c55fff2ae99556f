"""Whatever a script changes about its parameters or their state is seen before the next step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.shim.levers.npu_optimizer.guard import OTHER_GRADIENTS, Counters, Links

Change = Callable[[Any, list[nn.Parameter]], object]


def _optimizer() -> tuple[torch.optim.Adam, list[nn.Parameter]]:
    """Return an optimizer that has made a step, whose last parameter has no gradient."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(3, 3)) for _ in range(4)]
    optimizer = torch.optim.Adam(params)
    for parameter in params[:-1]:
        parameter.grad = torch.randn(3, 3)
    optimizer.step()
    return optimizer, params


def _group_added(optimizer: Any, _: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def _parameter_exchanged(optimizer: Any, _: Any) -> None:
    optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.zeros(3, 3))


def _dropped(_: Any, params: list[nn.Parameter]) -> None:
    params[1].grad = None


def _arrived(_: Any, params: list[nn.Parameter]) -> None:
    params[-1].grad = torch.zeros(3, 3)


def _copied(_: Any, params: list[nn.Parameter]) -> None:
    params[1].data = params[1].data.clone()


def _transposed(_: Any, params: list[nn.Parameter]) -> None:
    params[1].data = params[1].data.t()  # of the same shape, in the same memory


def _narrowed(_: Any, params: list[nn.Parameter]) -> None:
    params[1].data = params[1].data[:2]
    params[1].grad = torch.zeros(2, 3)


def _sparse(_: Any, params: list[nn.Parameter]) -> None:
    params[1].grad = torch.zeros(3, 3).to_sparse()


def _loaded(optimizer: Any, _: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _loaded_from_itself(optimizer: Any, _: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())  # other dicts, of the same tensors


def _moment_replaced(optimizer: Any, params: list[nn.Parameter]) -> None:
    optimizer.state[params[1]]["exp_avg"] = optimizer.state[params[1]]["exp_avg"].clone()


def _moment_deleted(optimizer: Any, params: list[nn.Parameter]) -> None:
    del optimizer.state[params[2]]["exp_avg_sq"]


def _cleared(optimizer: Any, _: Any) -> None:
    optimizer.state.clear()


CHANGES: list[tuple[Change, str]] = [
    (_group_added, "groups"),
    (_parameter_exchanged, "groups"),
    (_dropped, OTHER_GRADIENTS),
    (_arrived, OTHER_GRADIENTS),
    (_copied, "moved"),
    (_transposed, "moved"),
    (_narrowed, "moved"),
    (_sparse, "sparse"),
    (_loaded, "state"),
    (_loaded_from_itself, "state"),
    (_moment_replaced, "state"),
    (_moment_deleted, "state"),
    (_cleared, "state"),
]


@pytest.mark.parametrize(("change", "told"), CHANGES, ids=[c.__name__ for c, _ in CHANGES])
def test_a_change_is_seen(change: Change, told: str) -> None:
    optimizer, params = _optimizer()
    links = Links(optimizer, params[:-1])
    assert links.misfit(optimizer) == ""
    change(optimizer, params)
    assert told in links.misfit(optimizer)


def test_what_training_does_is_no_change() -> None:
    optimizer, params = _optimizer()
    links = Links(optimizer, params[:-1])
    optimizer.zero_grad()
    for parameter in params[:-1]:
        parameter.grad = torch.ones(3, 3)
    optimizer.param_groups[0]["lr"] = 0.5
    assert not optimizer.state[params[-1]]  # an empty entry came in
    assert links.misfit(optimizer) == ""


def test_the_gradients_are_those_of_the_moment() -> None:
    optimizer, params = _optimizer()
    links = Links(optimizer, params[:-1])
    for _ in range(2):
        links.misfit(optimizer)
        assert all(g is p.grad for g, p in zip(links.gradients(), params[:-1], strict=True))
        params[0].grad = torch.ones(3, 3)


def test_steps_are_counted_in_the_scripts_own_tensors() -> None:
    optimizer, params = _optimizer()
    steps = [optimizer.state[p]["step"] for p in params[:-1]]
    counters = Counters([optimizer.state[p] for p in params[:-1]])
    assert not counters.advance()
    assert [float(step) for step in steps] == [2.0, 2.0, 2.0]
    assert counters.misfit() == ""
    steps[1].zero_()
    assert counters.misfit()


def test_steps_that_are_numbers_are_written_into_the_state() -> None:
    states: list[dict[str, Any]] = [{"step": 3}, {"step": 3}]
    counters = Counters(states)
    assert counters.advance()
    assert states == [{"step": 4}, {"step": 4}]
