"""Compiled models refuse the numbers that torch's own kernels refuse, with the same exceptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import decomposition, lowering
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from fasttrain.shim.levers.compile.repairs import repair

# dynamo warns while it compiles; here that would be an error inside the compiler
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

# Without threads that wait for the next compilation.
OPTIONS = {"fallback_random": True, "fx_graph_cache": False, "compile_threads": 1}
TABLE = torch.linspace(-1, 1, 20).view(5, 4)
GOOD = {
    "ids": torch.tensor([0, 4, 2, 2, 1, 3]),
    "classes": torch.tensor([3, 0, -100, 1, 2, 2]),
    "pixels": torch.tensor([[[0, 1], [3, 2], [1, 1]]]),
    "chances": torch.tensor([0.0, 0.25, 1.0]),
}
BAD = {
    "an id": {"ids": torch.tensor([0, 4, 2, 5, 1, 3])},
    "a class": {"classes": torch.tensor([3, 0, 4, 1, 2, 2])},
    "a pixel's class": {"pixels": torch.tensor([[[0, 1], [4, 2], [1, 1]]])},
    "a chance above 1": {"chances": torch.tensor([0.0, 1.5, 1.0])},
    "a chance that is NaN": {"chances": torch.tensor([torch.nan, 0.5, 1.0])},
}


def loss_of(table: Tensor, ids: Tensor, classes: Tensor, pixels: Tensor, chances: Tensor) -> Tensor:
    scores = F.embedding(ids, table).tanh()
    images = scores.t().reshape(1, 4, 3, 2)
    of_classes = F.cross_entropy(scores, classes) + F.cross_entropy(images, pixels)
    of_chances = F.binary_cross_entropy(scores.sigmoid(), torch.full_like(scores, 0.5))
    return of_classes + of_chances + F.binary_cross_entropy(chances, chances.round())


def outcome(call: Callable[..., Tensor], **numbers: Tensor) -> Any:
    """Return loss and gradient, or the exception that the call raises."""
    table = TABLE.clone().requires_grad_()
    try:
        loss = call(table, **{**GOOD, **numbers})
    except Exception as error:  # noqa: BLE001 - which one is what the test is about
        return type(error), str(error)
    loss.backward()
    return loss.detach(), table.grad


@pytest.fixture(scope="module")
def compiled() -> Iterator[Callable[..., Tensor]]:
    tables = decomposition.decompositions, lowering.lowerings
    before = [dict(table) for table in tables]
    with ExitStack() as undo:
        repair(undo)
        yield torch.compile(loss_of, options=OPTIONS, fullgraph=True)
    torch._dynamo.reset()
    assert [dict(table) for table in tables] == before


@pytest.mark.parametrize("name", BAD)
def test_what_torch_refuses_is_refused(compiled: Callable[..., Tensor], name: str) -> None:
    expected = outcome(loss_of, **BAD[name])
    assert outcome(compiled, **BAD[name]) == expected
    assert issubclass(expected[0], IndexError if "chance" not in name else RuntimeError)


def test_other_numbers_are_taken(compiled: Callable[..., Tensor]) -> None:
    torch.testing.assert_close(outcome(compiled), outcome(loss_of))
