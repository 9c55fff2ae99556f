"""Which calls of a script are worth compiling, by their forms."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fasttrain.shim.compile_auto.calls import MOST_ROOTS, Calls, CallsOfRank
from fasttrain.shim.hooks.roots import Root, RootCalls
from fasttrain.shim.levers.compile.repetitions import form_of


def root_of(module: nn.Module) -> Root:
    calls = RootCalls()
    root = calls._root_of(module)
    assert root is not None
    return root


def seen(module: nn.Module, *batches: torch.Tensor) -> tuple[Any, str]:
    calls, root = Calls(), root_of(module)
    for batch in batches:
        calls.see(root, (batch,), {})
    return calls.usual(len(batches))


def test_a_form_is_what_a_graph_depends_on() -> None:
    net = nn.Linear(2, 2)
    x = torch.randn(3, 2)
    form = form_of(net, (x, 1), {"mask": None})
    assert form == form_of(net, (torch.randn(3, 2), 2), {"mask": None})
    others = [
        form_of(net, (torch.randn(4, 2), 1), {"mask": None}),
        form_of(net, (x.double(), 1), {"mask": None}),
        form_of(net, (x.clone().requires_grad_(), 1), {"mask": None}),
        form_of(net, (x, 1.0), {"mask": None}),
        form_of(net, (x, 1), {"mask": True}),
        form_of(net, ([x], 1), {"mask": None}),
        form_of(net.eval(), (x, 1), {"mask": None}),
    ]
    net.train()
    with torch.no_grad():
        others.append(form_of(net, (x, 1), {"mask": None}))
    assert len({form, *others}) == 1 + len(others)


def test_names_of_rows_make_no_other_form() -> None:
    net, x = nn.Linear(2, 2), torch.randn(3, 2)
    for names in (["a.png", "b.png"], ("a.png", "b.png")):
        others = type(names)(["c.png", "d.png"])
        form = form_of(net, ({"image": x, "name": names},), {})
        assert form == form_of(net, ({"image": x, "name": others},), {})
        assert form != form_of(net, ({"image": x, "name": others[:1]},), {})
        assert form_of(net, (x, names), {}) == form_of(net, (x, others), {})
    assert form_of(net, (x, "mean"), {}) != form_of(net, (x, "sum"), {})
    assert form_of(net, (x,), {"how": "mean"}) != form_of(net, (x,), {"how": "sum"})


def test_a_container_that_can_not_be_read_has_a_form_too() -> None:
    class Fragile(list[int]):
        def __iter__(self) -> Any:
            raise RuntimeError("not now")

    assert form_of(nn.Linear(2, 2), (Fragile(),), {}) == (True, True, None, None)


def test_what_a_checkpoint_repeats_is_no_call() -> None:
    calls, net = Calls(), nn.Linear(2, 2)
    root, x = root_of(net), torch.randn(3, 2)

    def forward(x: torch.Tensor) -> Any:
        calls.see(root, (x,), {})
        return net(x)

    checkpoint(forward, x, use_reentrant=False).sum().backward()
    assert [forms.total() for forms in calls._seen.values()] == [1]


def test_the_usual_form_is_found_beside_a_last_batch() -> None:
    net = nn.Linear(2, 2)
    forms, why = seen(net, *[torch.randn(8, 2)] * 9, torch.randn(3, 2))
    assert why == ""
    assert [*forms.values()] == [form_of(net, (torch.randn(8, 2),), {})]


def test_changing_shapes_are_told() -> None:
    forms, why = seen(nn.Linear(2, 2), *(torch.randn(rows, 2) for rows in range(1, 11)))
    assert forms == {}
    assert "10 shapes in 10 calls" in why


def test_what_does_not_train_is_not_compiled() -> None:
    net = nn.Linear(2, 2)
    with torch.no_grad():
        assert seen(net, *[torch.randn(8, 2)] * 10) == ({}, "no module is called at each step")
    assert seen(net.requires_grad_(False), torch.randn(8, 2))[0] == {}
    assert seen(nn.Linear(2, 2), torch.randn(8, 2))[0] != {}


def test_many_modules_are_too_many() -> None:
    calls = Calls()
    roots = [root_of(nn.Linear(2, 2)) for _ in range(3)]
    assert calls.usual(1)[0] == {}
    nets = [nn.Linear(2, 2) for _ in range(MOST_ROOTS + 1)]
    for root in map(root_of, nets):
        calls.see(root, (torch.randn(8, 2),), {})
    assert str(MOST_ROOTS + 1) in calls.usual(1)[1]
    assert all(root.ref() is None for root in roots), "nobody holds these"


@pytest.mark.parametrize("splits", [True, False])
def test_the_form_of_a_whole_batch_counts_where_ranks_split_it(splits: bool) -> None:
    """Ranks have 16 rows of 32, but of 31 one has 16 and the other 15."""
    roots, net, forms = RootCalls(), nn.Linear(2, 2), list[Any]()
    heard = CallsOfRank(roots, splits=splits)

    def hear(root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forms.append(heard.form(net, args, kwargs))

    with ExitStack() as undo:
        roots.install(undo)
        around: Any = lambda _root, _module, call: lambda batch: call(batch[:16])  # noqa: E731
        roots.around = around
        heard.install(undo)
        heard.on_call.append(hear)
        for rows in (32, 31, 32):
            assert net(torch.ones(rows, 2)).shape == (16, 2)
    assert roots.around is around
    assert forms[0] == forms[2]
    assert (forms[0] == forms[1]) is not splits
