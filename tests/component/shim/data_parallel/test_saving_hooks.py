"""Whether a script has hooks on saved tensors, which would see what verifying a call computes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from fasttrain.shim.data_parallel.split.observers import saving_hook, watch_saving_hooks


def keep(tensor: Any) -> Any:
    return tensor


@pytest.mark.parametrize("asks", [True, False])
def test_hooks_of_the_scripts_own_are_known(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not asks:  # torch 2.7
        monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks", raising=False)
    elif not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        pytest.skip("this torch can't be asked")
    plain = saved_tensors_hooks.__enter__
    with ExitStack() as undo:
        watch_saving_hooks(undo)
        assert not saving_hook()
        with saved_tensors_hooks(keep, keep):
            assert saving_hook()
            with saved_tensors_hooks(keep, keep):
                pass
            assert saving_hook()
        with save_on_cpu():
            assert not saving_hook()
        assert not saving_hook()
    assert saved_tensors_hooks.__enter__ is plain
