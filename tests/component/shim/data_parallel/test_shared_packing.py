"""A message of a DataLoader's worker is the same behind a memory file, and the reader's own."""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.shim.data_parallel.loading import transport
from fasttrain.shim.data_parallel.loading.transport import packed, unpacked

Pair = namedtuple("Pair", "x y")


@pytest.fixture(params=["copied", "mapped"])
def through(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that packs and unpacks, by either kind of memory."""
    monkeypatch.setattr(transport, "MAPPED", 1 if request.param == "mapped" else 1 << 40)

    def through_file(value: Any) -> Any:
        descriptor = packed(value)
        try:
            return unpacked(descriptor)
        finally:
            os.close(descriptor)

    return through_file


def same(found: Tensor, given: Tensor) -> bool:
    form = (found.dtype, found.shape, found.stride(), found.requires_grad, type(found))
    if form != (given.dtype, given.shape, given.stride(), given.requires_grad, type(given)):
        return False
    return torch.equal(found.detach(), given.detach())


WIDE = torch.arange(48.0).view(2, 3, 8)
TENSORS = {
    **{str(d): torch.arange(7).to(d) for d in (
        torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16,
        torch.float64, torch.complex64, torch.complex128,
    )},
    "uint16": torch.arange(7).to(torch.uint16),
    "float8": torch.arange(7.0).to(torch.float8_e5m2).view(torch.uint8),
    "number": torch.tensor(3.5), "empty": torch.empty(3, 0, 2), "none": torch.empty(0),
    "transposed": WIDE.transpose(0, 2), "slice": WIDE[:, 1:, 2:5], "row": WIDE[1, 2],
    "channels": WIDE[None].contiguous(memory_format=torch.channels_last),
    "expanded": torch.ones(1, 3).expand(5, 3), "leaf": torch.ones(3, requires_grad=True),
    "parameter": nn.Parameter(torch.ones(3)),
    "conjugate": torch.complex(WIDE, WIDE).conj(), "odd": torch.arange(9, dtype=torch.uint8)[3:],
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_keep_values_and_form(name: str, through: Callable[..., Any]) -> None:
    assert same(through(TENSORS[name]), TENSORS[name])


def test_other_objects_come_as_pickle_has_them(through: Callable[..., Any]) -> None:
    given = (3, {"a": [None, "é", b"\0", 1.5, Pair(1, {2})]}, range(3), ValueError("x"))
    found = through(given)
    assert str(found) == str(given)
    assert type(found[1]["a"][-1]) is Pair
    sparse = WIDE[0].to_sparse()
    assert torch.equal(through(sparse).to_dense(), WIDE[0])
    assert through(torch.Size([1])) == torch.Size([1])


def test_arrays_keep_values_and_can_be_written(through: Callable[..., Any]) -> None:
    np = pytest.importorskip("numpy")
    given = [np.arange(100_000), np.zeros((2, 0)), np.arange(12).reshape(3, 4).T, np.float32(2)]
    found = through([*given, np.array([None, "a"], dtype=object)])
    for one, other in zip(found, given, strict=False):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    found[0][3] = 7
    frozen = np.arange(3)
    frozen.flags.writeable = False
    assert not through(frozen).flags.writeable


def test_tensors_that_share_memory_share_it_behind(through: Callable[..., Any]) -> None:
    base = torch.zeros(4, 6)
    found = through({"again": [base, base], "row": base[2], "other": torch.zeros(24)})
    assert found["again"][0] is found["again"][1]
    found["row"].add_(1)
    assert found["again"][0][2].tolist() == [1.0] * 6
    assert not found["other"].any()
    assert (
        found["again"][0].data_ptr() % transport.ALIGNMENT == base.data_ptr() % transport.ALIGNMENT
    )


def test_bytes_of_another_type_at_an_odd_place_are_copied(through: Callable[..., Any]) -> None:
    np = pytest.importorskip("numpy")
    odd = torch.from_numpy(np.frombuffer(bytearray(33), dtype=np.uint8)[1:].view(np.float64))
    assert same(through(odd), odd)
    halves = torch.arange(8, dtype=torch.int32)
    found = through([halves[1:], halves[2:].view(torch.int64)])
    assert same(found[1], halves[2:].view(torch.int64))


def test_a_small_view_of_much_memory_takes_no_more_than_itself() -> None:
    column = torch.zeros(1000, 1000)[:, 3]
    far = torch.zeros(1_000_000)
    for value in (column, [far[:10], far[-10:]]):
        descriptor = packed(value)
        assert os.fstat(descriptor).st_size < 10_000
        os.close(descriptor)


def test_what_a_reader_changes_is_its_own(through: Callable[..., Any]) -> None:
    given = torch.zeros(3)
    descriptor = packed(given)
    first, second = unpacked(descriptor), unpacked(descriptor)
    first.add_(1)
    assert not second.any()
    assert not given.any()
    with pytest.raises(OSError, match="not permitted"):  # nobody can change or cut what was sent
        os.ftruncate(descriptor, 1)
    os.close(descriptor)


def test_what_cannot_be_pickled_leaves_no_file_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(Exception, match="pickle"):
        packed(lambda: None)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
