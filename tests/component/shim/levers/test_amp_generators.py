"""A call is repeated with the random numbers of the device that the model is on."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fasttrain.shim.hooks.call_state import Backup
from support.run_ahead import running_ahead


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_generator_of_the_models_device_is_put_back(kind: str) -> None:
    generators = (torch.Generator(), torch.Generator())
    root = nn.Linear(2, 2)
    backup = Backup(root)

    def drawn() -> list[Tensor]:
        return [torch.rand(2, generator=generator) for generator in generators]

    module = mock.patch.object(getattr(torch, kind), "default_generators", generators)
    with running_ahead(kind) as host, module:
        host.current = 0
        backup.take((), {}, torch.device(kind, 1))
        first = drawn()
        backup.put_back()
        again = drawn()
    assert [torch.equal(*pair) for pair in zip(first, again, strict=True)] == [False, True]


def test_nothing_is_asked_of_a_generator_while_a_graph_is_captured() -> None:
    with running_ahead() as host, mock.patch.object(torch.cuda, "default_generators", [None]):
        host.capturing = True
        root = nn.Linear(2, 2)
        Backup(root).take((), {}, torch.device("cuda", 0))
