"""Measures how far results with a lever are from those without, against results in fp64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Found by experiment on the architectures and levers of tests/component/shim/tune/test_parity.py.
MULTIPLE = 3.0  # of the largest distance of results that are rounded as the lever may round
COMMON = 1.0  # unit roundoffs by which all numbers may be off together, as by a rounded factor
NOISE = 6.0  # standard deviations
FEW = 16  # numbers, of which a common factor can't be told from rounding
TINY = 0.02  # the smallest part of a group may be off by this part of the group's own distance
PLAIN_ROUNDOFF = 2.0**-24  # of fp32
_NOTHING = 64 * PLAIN_ROUNDOFF  # relative norm of what is zero but for rounding
_BY_ROWS = ("output", "gradient of argument")  # each row of a batch matters by itself
VALUE = "value of"  # parameters that a call writes to: whole numbers are stored, and rounded
_COUNTING = ("buffer", "state")  # integers in them are the same, while those of outputs may differ
_ONE_BY_ONE = ("output", "buffer", "state")  # each tensor may have a factor of its own
Tensors = Mapping[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class Results:
    """What a call or a step comes to, in groups of one kind, such as the gradients of parameters.

    Attributes:
        groups: The tensors by name, by name of the group.
        before: What those were before that are changed by the call or step; their change counts.
            One that is missing after it is as it was before.
    """

    groups: Mapping[str, Tensors]
    before: Mapping[str, Tensors] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one part of the results is from its reference in fp64.

    Attributes:
        what: The part, such as ``gradient of 0.weight``.
        changed: The relative distance with the lever.
        rounded: The largest of those that nothing but rounding explains.
        allowed: The most that it may be with the lever.
        whole: Whether it is of a whole group.
    """

    what: str
    changed: float
    rounded: float
    allowed: float
    whole: bool = False

    @property
    def share(self) -> float:
        """The distance as a multiple of what is allowed."""
        if not self.changed:
            return 0.0
        return self.changed / self.allowed if self.allowed else math.inf

    def __str__(self) -> str:
        """Return the numbers in one line."""
        return f"{self.what}: {self.changed:.2g} from fp64, {self.allowed:.2g} allowed"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results with a lever, and what they are compared with.

    Attributes:
        changed: The results with the lever.
        exact: Those in fp64.
        rounded: Those without the lever, and others that differ from fp64 by rounding alone.
        unit_roundoff: What the lever may round by.
        scale: How much more the lever may round than the rounded results.
    """

    changed: Results
    exact: Results
    rounded: Sequence[Results]
    unit_roundoff: float
    scale: float = 1.0

    def distances(self) -> list[Distance]:
        """Return how far each part is from its reference, the worst first."""
        found = [distance for group in self.exact.groups for distance in self._of_group(group)]
        return sorted(found, key=lambda distance: -distance.share)

    def _of_group(self, group: str) -> Iterator[Distance]:
        parts = []
        everywhere = [r.groups[group] for r in (self.exact, *self.rounded, self.changed)]
        for name in dict.fromkeys(name for tensors in everywhere for name in tensors):
            part = self._part(group, name)
            if part is not None:
                parts.append(part)
            elif group in _COUNTING:
                plain, changed = (
                    r.groups[group].get(name) for r in (self.rounded[0], self.changed)
                )
                differs = float(not same_bits(plain, changed))
                yield Distance(f"{group} {name}, of integers", differs, 0.0, 0.0)
        yield from self._of_parts(group, parts)

    def _part(self, group: str, name: str) -> _Part | None:
        """Return one part of a group, with zeros where it is missing; None for integers."""
        everywhere = [r.groups[group].get(name) for r in (self.exact, *self.rounded, self.changed)]
        like = next((t for t in everywhere if t is not None), None)
        if like is None or not (like.is_floating_point() or like.is_complex()):
            return None
        exact, *rounded, changed = [
            _change(like, results, group, name)
            for results in (self.exact, *self.rounded, self.changed)
        ]
        stored = float(_wide(like).norm())
        size = stored if group == VALUE else float(exact.norm())
        return _Part(f"{group} {name}", changed, exact, rounded, stored=stored, size=size)

    def _of_parts(self, group: str, parts: list[_Part]) -> Iterator[Distance]:
        size = math.hypot(*(part.size for part in parts))
        rounded = math.hypot(*(part.error for part in parts)) / (size or 1.0)
        floor = max(rounded, PLAIN_ROUNDOFF)
        scale = MULTIPLE * self.scale
        for part in parts:
            yield part.left_out(size)
            yield part.distance(scale, floor, size)
            if group in _BY_ROWS:
                yield from part.rows(scale, floor)
        if size:
            off = math.hypot(*(part.off for part in parts)) / size
            yield Distance(f"all of {group}", off, rounded, scale * floor, whole=True)
        for together in [[part] for part in parts] if group in _ONE_BY_ONE else [parts]:
            yield from self._factor(group, together)

    def _factor(self, group: str, parts: list[_Part]) -> Iterator[Distance]:
        """Yield how far the factor is from 1 that the lever has multiplied all numbers by.

        Rounding errors go both ways, so that a common factor is seen far below them.
        """
        squares = sum(part.moved**2 for part in parts)
        fourths = sum(float(part.exact.abs().pow(4).sum()) for part in parts)
        if not fourths or squares**2 / fourths < FEW:
            return
        numbers = squares**2 / fourths  # so many of one size would be alike
        factor = sum(_along(part.changed, part.exact) for part in parts) / squares
        sides = range(len(self.rounded))
        rounded = max(
            abs(sum(_along(part.rounded[side], part.exact) for part in parts)) for side in sides
        )
        off = sum(part.off**2 for part in parts) / squares
        scatter = NOISE * math.sqrt(max(0.0, off - factor**2) / numbers)
        own = MULTIPLE * self.scale * rounded / squares
        allowed = max(COMMON * self.unit_roundoff, own, scatter)
        name = parts[0].name if len(parts) == 1 else f"all of {group}"
        yield Distance(f"a common factor of {name}", abs(factor), rounded / squares, allowed)


class _Part:
    """One tensor of a group, in fp64.

    Attributes:
        error: The largest norm of a difference of the rounded ones from the exact one.
        off: That of the changed one's.
        moved: Norm of the exact one.
        size: Norm of what its distances are relative to.
        stored: Norm of what was rounded when it was stored, which is more than a small change.
    """

    def __init__(
        self,
        name: str,
        changed: Tensor,
        exact: Tensor,
        rounded: list[Tensor],
        *,
        stored: float,
        size: float,
    ) -> None:
        self.name, self.stored, self.size = name, stored, size
        self.changed, self.exact, self.rounded = changed, exact, rounded
        self.error = max(float((one - exact).norm()) for one in rounded)
        self.off = float((changed - exact).norm())
        self.moved = float(exact.norm())

    def distance(self, scale: float, floor: float, size: float) -> Distance:
        """Return the distance of the whole part.

        Args:
            scale: How often the error of the rounded ones is allowed.
            floor: The relative error that they have at least.
            size: Norm of the group.
        """
        least = max(self.size * floor, self.stored * PLAIN_ROUNDOFF, size * floor * TINY)
        allowed = scale * max(self.error, least)
        # What is zero but for rounding has no size of its own.
        unit = self.size if self.size > _NOTHING * size else size
        return _relative(self.name, self.off, self.error, allowed, unit)

    def left_out(self, size: float) -> Distance:
        """Return a distance of 1 if there is nothing where there is something without the lever."""
        something = self.moved > _NOTHING * max(size, self.stored) and bool(self.rounded[0].any())
        left_out = something and not self.changed.any()
        return Distance(f"{self.name}, which is left out", float(left_out), 0.0, 0.0)

    def rows(self, scale: float, floor: float) -> Iterator[Distance]:
        """Yield the largest distance of any row, relative to a typical one."""
        for dim in range(min(2, self.exact.dim() - 1)):
            typical = self.size / math.sqrt(self.exact.shape[dim] or 1)
            error = max(_largest_row(one - self.exact, dim) for one in self.rounded)
            off = _largest_row(self.changed - self.exact, dim)
            allowed = scale * max(error, typical * floor)
            yield _relative(f"a row of {self.name}", off, error, allowed, typical)


def _change(like: Tensor, results: Results, group: str, name: str) -> Tensor:
    """Return a part in fp64, or its change where that counts."""
    now, before = results.groups[group].get(name), results.before.get(group, {}).get(name)
    if now is None:
        return torch.zeros_like(_wide(like))
    return _wide(now) if before is None else _wide(now) - _wide(before)


def _relative(what: str, off: float, error: float, allowed: float, size: float) -> Distance:
    unit = size or 1.0
    return Distance(what, off / unit, error / unit, allowed / unit)


def _along(tensor: Tensor, exact: Tensor) -> float:
    """Return the product of a tensor's difference from the exact one with the exact one."""
    return float(((tensor - exact).conj() * exact).sum().real)


def _largest_row(difference: Tensor, dim: int) -> float:
    rows = difference.movedim(dim, 0).flatten(1).norm(dim=1)
    return float(rows.max()) if rows.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _tensors(results: Results) -> Iterator[tuple[str, str, Tensor]]:
    for group, tensors in results.groups.items():
        yield from ((group, name, t) for name, t in tensors.items() if t is not None)


def nan_in(results: Results) -> str:
    """Return the first part with a NaN; empty if there is none."""
    with_nan = (f"{group} {name}" for group, name, t in _tensors(results) if t.isnan().any())
    return next(with_nan, "")


def missing_in(other: Results, one: Results) -> str:
    """Return the first part that is not zero in one and missing in the other; empty if none is."""
    parts = ((group, name) for group, name, t in _tensors(one) if group != VALUE and t.any())
    absent = (f"{g} {name}" for g, name in parts if other.groups[g].get(name) is None)
    return next(absent, "")


def otherwise_infinite(one: Results, other: Results) -> str:
    """Return the first part that isn't infinite in the same places; empty if there is none."""
    for group, name, tensor in _tensors(one):
        theirs = other.groups[group].get(name)
        if not torch.equal(_infinite(tensor), _infinite(0 * tensor if theirs is None else theirs)):
            return f"{group} {name}"
    return ""


def without_infinite(results: Results) -> Results:
    """Return the results with zeros in the places of infinite numbers."""
    return Results(_finite(results.groups), _finite(results.before))


def _finite(groups: Mapping[str, Tensors]) -> dict[str, Tensors]:
    return {
        group: {name: None if t is None else _without_infinite(t) for name, t in tensors.items()}
        for group, tensors in groups.items()
    }


def _without_infinite(tensor: Tensor) -> Tensor:
    infinite = tensor.isinf()
    return tensor.masked_fill(infinite, 0) if infinite.any() else tensor


def _infinite(tensor: Tensor) -> Tensor:
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return (parts.isinf() * parts.sgn()).nan_to_num().to(torch.int8)


def other_bits(one: Results, other: Results) -> str:
    """Return the first part that hasn't the same bits; empty if there is none."""
    for group, tensors in one.groups.items():
        theirs = other.groups[group]
        for name in {**tensors, **theirs}:
            if not same_bits(tensors.get(name), theirs.get(name)):
                return f"{group} {name}"
    return ""


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """True if two tensors are equal bit by bit, NaN included, or are both missing."""
    if one is None or other is None:
        return one is other
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return dense(tensor.detach()).contiguous().flatten().view(torch.uint8)


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor with strides, as it is or made from a sparse one."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
