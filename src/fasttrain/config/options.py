"""The table of options, derived from the fields of `Settings` and `SlurmSettings`."""

from __future__ import annotations

import types
from dataclasses import dataclass, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fasttrain.model.settings import OPTION_NAMES, Settings
from fasttrain.model.slurm import SlurmSettings

OptionKind = Literal["bool", "int", "str", "list"]
OptionValue = bool | int | str | tuple[str, ...] | None

# The metavars of texts that are lists with commas.
_COMMA_LISTS = frozenset({"LIST", "RANKS"})


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """One option, as spelled on the command line, in the environment and in the file.

    Attributes:
        name: Field of `Settings`, and key in fasttrain.yaml.
        kind: Type of its value; ``list`` is a tuple of texts, repeatable as a flag.
        choices: The only texts allowed; empty for any.
        optional: Whether None means "not set".
        default: Value if no layer names one.
        help: One line.
        panel: Heading in ``--help``.
        metavar: Placeholder in ``--help``; empty for typer's own.
        minimum: Smallest integer allowed.
        maximum: Largest integer allowed.
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
        """Flag of the option, such as ``--nproc-per-node``."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """Environment variable of the option, such as ``FASTTRAIN_NPROC_PER_NODE``."""
        return ("FASTTRAIN_SLURM_" if self.slurm else "FASTTRAIN_") + self.name.upper()

    @property
    def pairs(self) -> bool:
        """True if it is a list of ``NAME=VALUE``, which is merged over the layers by name."""
        return self.kind == "list" and "=" in self.metavar

    @property
    def comma_list(self) -> bool:
        """True if its text is a list such as ``0,3``, for which YAML also allows ``[0, 3]``."""
        return self.kind == "str" and self.metavar in _COMMA_LISTS


def _unwrap(kind: Any) -> tuple[Any, bool]:
    """Return the type X of ``X | None``, and True if None was allowed."""
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
# An option of both tables (`python`) is that of `Settings`, which a file may set in any section.
BY_NAME: dict[str, OptionSpec] = {
    **{spec.name: spec for spec in OPTIONS},
    **{spec.name: spec for spec in SLURM_OPTIONS if spec.name not in OPTION_NAMES},
}
