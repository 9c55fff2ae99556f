"""The table of options, derived from the fields of `Settings`; nothing is written here twice."""

from __future__ import annotations

import types
from dataclasses import dataclass, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fasttrain.model.settings import OPTION_NAMES, Settings
from fasttrain.model.slurm import SlurmSettings

OptionKind = Literal["bool", "int", "str", "list"]
OptionValue = bool | int | str | tuple[str, ...] | None

# The placeholder in --help says what a text holds; these two are lists written with commas.
_COMMA_LISTS = frozenset({"LIST", "RANKS"})


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """One option, as the command line, the environment and the file spell it.

    Attributes:
        name: Field of `Settings`, and key in fasttrain.yaml.
        kind: Type of one value; ``list`` is a tuple of texts, repeatable as a flag.
        choices: The only texts allowed; empty for any.
        optional: Whether None stands for "not set".
        default: Value when no layer names one.
        help: One line.
        panel: Heading in ``--help``.
        metavar: Placeholder in ``--help``; empty for the usual one.
        minimum: Smallest whole number allowed.
        maximum: Largest one.
        slurm: Whether it is an option of `SlurmSettings`.
    """

    name: str
    kind: OptionKind
    choices: tuple[str, ...]
    optional: bool
    default: OptionValue
    help: str
    panel: str
    metavar: str
    minimum: int | None
    maximum: int | None
    slurm: bool

    @property
    def flag(self) -> str:
        """Its flag, such as ``--nproc-per-node``."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """Its environment variable, such as ``FASTTRAIN_NPROC_PER_NODE``."""
        return ("FASTTRAIN_SLURM_" if self.slurm else "FASTTRAIN_") + self.name.upper()

    @property
    def pairs(self) -> bool:
        """Return whether its list holds ``NAME=VALUE``, of which layers can each say some."""
        return self.kind == "list" and "=" in self.metavar

    @property
    def comma_list(self) -> bool:
        """True if its text is a list such as ``0,3``, which YAML may write as ``[0, 3]`` too."""
        return self.kind == "str" and self.metavar in _COMMA_LISTS


def _unwrap(kind: Any) -> tuple[Any, bool]:
    """Return the type inside ``X | None``, and whether None was there."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind, False
    (inner,) = (arm for arm in get_args(kind) if arm is not type(None))
    return inner, True


def _kind_and_choices(kind: Any) -> tuple[OptionKind, tuple[str, ...]]:
    if get_origin(kind) is Literal:
        return "str", get_args(kind)
    known: dict[Any, OptionKind] = {bool: "bool", int: "int", str: "str", tuple[str, ...]: "list"}
    return known[kind], ()


def _derive(table: type[Settings] | type[SlurmSettings]) -> tuple[OptionSpec, ...]:
    hints, slurm = get_type_hints(table), table is SlurmSettings
    specs = []
    for field in fields(table):
        inner, optional = _unwrap(get_args(hints[field.name])[0])
        kind, choices = _kind_and_choices(inner)
        default = field.default.value
        spec = OptionSpec(
            field.name, kind, choices, optional, default, **field.metadata, slurm=slurm
        )
        specs.append(spec)
    return tuple(specs)


OPTIONS: tuple[OptionSpec, ...] = _derive(Settings)
SLURM_OPTIONS: tuple[OptionSpec, ...] = _derive(SlurmSettings)
# Of an option of both tables (`python`) that of `Settings`, which may stand anywhere in a file.
BY_NAME: dict[str, OptionSpec] = {
    **{spec.name: spec for spec in OPTIONS},
    **{spec.name: spec for spec in SLURM_OPTIONS if spec.name not in OPTION_NAMES},
}
