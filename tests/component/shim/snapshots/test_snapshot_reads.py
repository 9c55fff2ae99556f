"""Numbers that the script reads are recorded, and given again in a replay."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fasttrain.shim.data_parallel.context import LeverState
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.snapshots import scalar_reads
from fasttrain.shim.snapshots.files import packed, unpacked
from fasttrain.shim.snapshots.scalar_reads import (
    ARRAYS,
    FUNCTIONS,
    READS,
    GradientHooks,
    ScalarReads,
)
from fasttrain.shim.snapshots.writer import LoopState


@pytest.fixture
def reads() -> Iterator[Any]:
    with ExitStack() as undo:
        reads = ScalarReads(lambda: False, GradientHooks())
        reads.install(undo)
        yield reads


def replay_from_the_start(reads: Any) -> None:
    """Have the reads so far returned again, from what a snapshot holds of them."""
    reads.replay(unpacked(packed(reads.state())))
    reads.kinds, reads.values, reads._large = bytearray(), [], bytearray()
    reads.training, reads.left_out = False, ""


def ask(tensor: Tensor) -> list[Any]:
    return [
        tensor.item(), float(tensor), int(tensor), bool(tensor), f"{tensor:.2f}", tensor.tolist(),
        [0, 1, 2, 3][tensor.long()], tensor.is_nonzero(), torch.is_nonzero(tensor),
        2.5 in tensor, tensor.equal(torch.tensor(2.5)), torch.equal(tensor, torch.tensor(2.5)),
        tensor.allclose(torch.tensor(2.0), atol=0.5), torch.allclose(tensor, other=tensor + 1),
    ]  # fmt: skip


def test_every_way_is_recorded_and_given_again(reads: Any) -> None:
    told = ask(torch.tensor(2.5))
    assert told == [2.5, 2.5, 2, True, "2.50", 2.5, 2, *[True] * 6, False]
    assert reads.values == told
    replay_from_the_start(reads)
    assert ask(torch.tensor(0.0)) == told
    reads.arrive()
    assert torch.tensor(1.0).item() == 1.0


def test_a_list_stays_as_it_was_read(reads: Any) -> None:
    torch.arange(3).tolist().append(7)
    assert reads.values == [[0, 1, 2]]


def arrays(scale: float) -> list[Any]:
    loss, hits = torch.tensor(2.5) * scale, torch.arange(6).reshape(2, 3) * int(scale)
    return [loss.numpy(), hits.numpy(force=True), np.asarray(loss), np.mean([loss, loss])]


def test_arrays_are_recorded_and_given_again(reads: Any) -> None:
    told = arrays(1)
    replay_from_the_start(reads)
    again = arrays(0)
    reads.arrive()
    assert all(map(np.array_equal, again, told))
    assert arrays(0)[0] == 0


def test_an_array_is_the_tensors_own_memory(reads: Any) -> None:
    tensor = torch.ones(2)
    tensor.numpy()[0] = 3
    replay_from_the_start(reads)
    tensor = torch.zeros(2)
    tensor.numpy()[1] = 5
    reads.arrive()
    assert tensor.tolist() == [1, 5]


def test_what_a_large_array_holds_is_kept_in_a_training(reads: Any) -> None:
    assert torch.ones(1025).numpy().sum() == 1025  # computed again
    assert reads.values == [None]
    reads.training = True
    found = [torch.arange(2000.0).numpy(), torch.ones(2, dtype=torch.int8).numpy()]
    found.append(torch.full((2, 3000), -1).numpy())
    replay_from_the_start(reads)
    assert torch.ones(1025).numpy().sum() == 1025
    reads.training = True
    again = [torch.ones(n).numpy() for n in (2000, 2, 5)]  # of other types, and another shape
    reads.arrive()
    assert all(map(np.array_equal, again, found))
    assert [array.dtype for array in again[1:]] == [np.int8, np.int64]
    assert reads.left_out == ""


def test_too_large_arrays_are_left_out_and_reported(
    reads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scalar_reads, "LARGE_BYTES", 12_000)
    monkeypatch.setattr(scalar_reads, "ALL_LARGE_BYTES", 20_000)
    torch.ones(3001).numpy()
    assert (reads.values, reads.left_out) == ([None], "")
    reads.training = True
    torch.ones(3001).numpy()
    kept = torch.arange(3000).float().numpy()
    torch.ones(3000).numpy()  # all of them would be too large
    assert re.fullmatch(r".*test_snapshot_reads\.py:\d+", reads.left_out)
    assert [value is not None for value in reads.values] == [False, False, True, False]
    replay_from_the_start(reads)
    reads.training = True
    assert torch.zeros(3001).numpy().sum() == torch.zeros(2).numpy().sum() == 0
    assert np.array_equal(torch.zeros(3000).numpy(), kept)
    assert torch.zeros(2).numpy().sum() == 0  # by chance small enough: not what was read
    assert [value is not None for value in reads.values] == [False, False, True, False]
    assert reads.left_out
    reads.arrive()


def test_an_array_has_the_shape_that_it_had(reads: Any) -> None:
    """A shape such as that of `x[keep]` follows from contents, which a replay doesn't compute."""
    torch.arange(3).numpy()
    torch.ones(0).numpy()
    replay_from_the_start(reads)
    again = torch.zeros(2).numpy()
    assert (again.tolist(), again.dtype) == ([0, 1, 2], np.int64)
    again += 1  # as an array of the script's
    assert torch.ones(2000).numpy().size == 0
    reads.arrive()


def test_torchs_own_reads_do_not_count(reads: Any) -> None:
    list(torch.utils.data.RandomSampler(range(4)))
    repr(torch.ones(2))
    torch.nn.utils.clip_grad_norm_([torch.ones(1, requires_grad=True)], 1.0)
    assert reads.values == []


def test_what_is_left_out_of_a_replay_does_not_count() -> None:
    with ExitStack() as undo:
        reads = ScalarReads(lambda: True, GradientHooks())
        reads.install(undo)
        assert torch.tensor(3).item() == 3
    assert reads.values == []


def test_reads_in_a_root_whose_parts_are_split_do_not_count() -> None:
    roots = RootCalls()
    with ExitStack() as undo:
        loop = LoopState(0, roots, LeverState())
        loop.reads.install(undo)
        roots.inside.part = lambda module, args, kwargs: module(*args, **kwargs)
        assert torch.tensor(3).item() == 3
        assert loop.reads.values == []
        roots.inside.part = None
        assert torch.tensor(3).item() == 3
        assert loop.reads.values == [3]


def test_gradscaler_reads_for_the_script(reads: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert reads.values == [0.0]  # no inf was found


def test_a_scheduler_reads_for_the_script(reads: Any) -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    schedule.step(torch.tensor(2.5))
    assert reads.values == [2.5]


def test_tensorboard_reads_for_the_script(reads: Any) -> None:
    path = Path(torch.__file__).parent / "utils/tensorboard/_convert_np.py"
    spec: Any = importlib.util.spec_from_file_location("convert_np", path)
    convert = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(convert)
    convert.make_np(torch.tensor(2.5))
    assert len(reads.values) == 1


@pytest.mark.parametrize("values", [[], [1.0, 2.0, 3.0]])
def test_another_number_of_reads_is_refused(reads: Any, capfd: Any, values: list[float]) -> None:
    def replayed() -> None:
        torch.tensor(1.0).item()
        reads.arrive()

    reads.replay({"kinds": bytes(len(values)), "values": values, "large": b""})
    with pytest.raises(SystemExit) as end:
        replayed()
    assert end.value.code == 78
    assert "[snapshot-diverged]" in capfd.readouterr().err


def test_nothing_is_left_behind() -> None:
    before = {name: Tensor.__dict__.get(name) for name in (*READS, *ARRAYS)}
    functions = [getattr(torch, name) for name in FUNCTIONS]
    with ExitStack() as undo:
        ScalarReads(lambda: False, GradientHooks()).install(undo)
        assert Tensor.item is not torch._C.TensorBase.item
    assert {name: Tensor.__dict__.get(name) for name in (*READS, *ARRAYS)} == before
    assert [getattr(torch, name) for name in FUNCTIONS] == functions
