"""Every container that a model may return keeps its type, and holds fp32 where it held bf16."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, fields
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from fasttrain.shim.hooks.containers import to_float32

LOW = torch.bfloat16


def low(*shape: int) -> torch.Tensor:
    return torch.full(shape or (2,), 1.5, dtype=LOW)


def cast(value: Any) -> Any:
    return to_float32(value, LOW)


class Pair(NamedTuple):
    first: Any
    second: Any


class Stamped(tuple):
    """A tuple that is not made from one sequence."""

    def __new__(cls, first: Any, second: Any) -> Any:
        made = super().__new__(cls, (first, second))
        made.stamp = "made"
        return made


class Outputs(list):
    name = "outputs"


@dataclass
class Plain:
    logits: Any
    loss: Any = None


@dataclass(frozen=True)
class Frozen:
    logits: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    logits: Any


@dataclass
class ModelOutput(OrderedDict):
    """As in transformers: items and attributes are the same values."""

    logits: Any = None

    def __post_init__(self) -> None:
        for field in fields(self):
            super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        made = super().__reduce__()
        return (made[0], tuple(getattr(self, f.name) for f in fields(self)), *made[2:])


@dataclass
class Both(OrderedDict):
    """An output that holds its items as attributes, too, and links them at its creation only."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


@dataclass
class Required(OrderedDict):
    """One that `copy.copy` can't copy, as it makes an OrderedDict without arguments."""

    logits: Any

    def __post_init__(self) -> None:
        self["logits"] = self.logits


def test_a_tensor() -> None:
    result = cast(low())
    assert result.dtype is torch.float32
    assert result.tolist() == [1.5, 1.5]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1, 2]),
        torch.tensor([True]),
        torch.tensor([1j]),
        torch.tensor([1.0]),
        torch.tensor([1.0], dtype=torch.float64),
        torch.tensor([1.0], dtype=torch.float16),
    ],
)
def test_other_tensors_are_the_same_objects(tensor: torch.Tensor) -> None:
    assert cast(tensor) is tensor


@pytest.mark.parametrize("value", [None, "text", 3, 2.5, object(), Plain, low])
def test_what_is_no_container_is_the_same_object(value: Any) -> None:
    assert cast(value) is value


@pytest.mark.parametrize(
    "value",
    [
        (torch.ones(1), 2),
        [torch.ones(1)],
        {"a": torch.ones(1)},
        Plain(torch.ones(1)),
        SimpleNamespace(a=1),
        torch.Size([2, 3]),
        (),
        [],
        {},
    ],
)
def test_a_container_without_low_precision_is_the_same_object(value: Any) -> None:
    assert cast(value) is value


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ((low(), 7), lambda v: v[0]),
        ([low(), 7], lambda v: v[0]),
        ({"a": low()}, lambda v: v["a"]),
        (OrderedDict(a=low()), lambda v: v["a"]),
        (defaultdict(list, a=low()), lambda v: v["a"]),
        (Pair(low(), 7), lambda v: v.first),
        (namedtuple("Point", "x")(low()), lambda v: v.x),
        (Stamped(low(), 7), lambda v: v[0]),
        (Outputs([low(), 7]), lambda v: v[0]),
        (torch.max(low(2, 2), dim=0), lambda v: v.values),
        (Plain(low()), lambda v: v.logits),
        (Frozen(low()), lambda v: v.logits),
        (Slotted(low()), lambda v: v.logits),
        (ModelOutput(low()), lambda v: v.logits),
        (ModelOutput(low()), lambda v: v["logits"]),
        (Both(low()), lambda v: v.logits),
        (Both(low()), lambda v: v["logits"]),
        (Required(low()), lambda v: v.logits),
        (Required(low()), lambda v: v["logits"]),
        (SimpleNamespace(a=low()), lambda v: v.a),
        ({"a": [(Plain(low()),)]}, lambda v: v["a"][0][0].logits),
        (pack_padded_sequence(low(3, 2, 1), torch.tensor([3, 2])), lambda v: v.data),
        (torch.distributions.Normal(low(), low()), lambda v: v.loc),
        (torch.distributions.Categorical(logits=low(2, 3)), lambda v: v.logits),
        (
            torch.distributions.Independent(torch.distributions.Normal(low(), low()), 1),
            lambda v: v.base_dist.scale,
        ),
    ],
)  # fmt: skip
def test_a_container_keeps_its_type(value: Any, read: Any) -> None:
    before = read(value)
    result = cast(value)
    assert type(result) is type(value)
    assert read(result).dtype is torch.float32
    assert read(value) is before  # the model may have kept the container itself
    assert before.dtype is LOW


def test_the_rest_of_a_container_stays() -> None:
    index = torch.tensor([1])
    assert cast((low(), index, "x"))[1:] == (index, "x")
    assert cast(Stamped(low(), 7)).stamp == "made"
    assert cast(torch.max(low(2, 2), dim=0)).indices.dtype is torch.int64
    assert cast(Plain(low(), loss="kept")).loss == "kept"
    assert list(cast({"b": 1, "a": low()})) == ["b", "a"]
    assert cast(defaultdict(list, a=low())).default_factory is list


def test_a_read_only_mapping_is_left_alone() -> None:
    value = MappingProxyType({"a": low()})
    assert cast(value) is value


class Settings(UserDict):
    """As in OmegaConf: values are computed when they are read, and some can't be."""

    def __getitem__(self, key: str) -> Any:
        if (value := super().__getitem__(key)) == "???":
            raise MissingError(key)
        return f"{value}!" if isinstance(value, str) else value


class MissingError(Exception):
    pass


@pytest.mark.parametrize("values", [{"a": "???", "b": 2}, {"a": "1", "b": "x y"}])
def test_a_mapping_that_computes_its_values_is_the_same_object(values: Any) -> None:
    value = Settings(values)
    assert cast(value) is value
    assert cast((value, low()))[0] is value


def test_a_sample_of_a_distribution_goes_to_numpy() -> None:
    sample = cast(torch.distributions.Normal(low(), low())).sample()
    assert sample.numpy().shape == (2,)


def test_gradients_pass_through_the_cast() -> None:
    source = torch.ones(2, dtype=LOW, requires_grad=True)
    cast({"a": source * 2})["a"].sum().backward()
    assert source.grad is not None
    assert source.grad.tolist() == [2.0, 2.0]
