"""The table of options, derived from the fields of `Settings` and `SlurmSettings`."""

from __future__ import annotations

import re
import shlex
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.settings import OPTION_NAMES, Settings, SlurmSettings

# Check and convert the raw value of one option, from any layer.


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most similar to a misspelt word; None if none is similar.

    Case is ignored, and so are leading dashes: they would make any two short options look alike.
    """
    folded = {_folded(candidate): candidate for candidate in candidates}
    matches = get_close_matches(_folded(word), folded, n=1)
    return folded[matches[0]] if matches else None


def _folded(word: str) -> str:
    return word.casefold().lstrip("-")


def suggest(word: str, candidates: Iterable[str], otherwise: str) -> str:
    """Return the text of a fix: ``did you mean ...?`` for the nearest candidate, or `otherwise`."""
    match = nearest(word, candidates)
    return f"did you mean {match}?" if match else otherwise


_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
# No underscores, bases or leading zeros: YAML 1.1 reads 010 as eight and 1:30 as ninety.
_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"[A-Za-z_][A-Za-z0-9_.+-]*")  # of a script, Hydra's included, or of sbatch
_SHOWN_CHARACTERS = 60

EMPTY = "it is empty"
ONE_VALUE = "it takes one value"
WHOLE_NUMBER = "it takes a whole number"


def parse_setting(spec: OptionSpec, raw: object, source: Source) -> Setting[OptionValue]:
    """Return the checked value with its source."""
    return Setting(parse_value(spec, raw, source), source)


def parse_value(spec: OptionSpec, raw: object, source: Source) -> OptionValue:
    """Return the typed value of an option from the raw value of one layer.

    Args:
        spec: The option.
        raw: A text, a typed flag (bool, int, tuple), a YAML list or mapping; None for "not set".
        source: Where the value is set; the error names it, and only a flag is a usage error.

    Raises:
        FasttrainError: ``option-value`` for a value of the wrong type or outside the choices;
            ``env-value`` for a ``NAME=VALUE`` without a valid name.
    """
    if raw is None:
        if spec.optional or spec.kind == "list":
            return None
        raw = ""  # fails below as an empty value
    if spec.kind == "list":
        return _parse_list(spec, raw, source)
    if spec.comma_list and isinstance(raw, list) and all(_is_scalar(item) for item in raw):
        raw = ",".join(str(item) for item in raw)
    if not _is_scalar(raw):
        raise bad_value(spec.name, raw, source, ONE_VALUE)
    return _parse_text(spec, str(raw), source)


def bad_value(
    name: str, raw: object, source: Source, why: str, fix: str = "see fasttrain run --help"
) -> FasttrainError:
    """Return the error for a value that an option or key doesn't allow; it names the place."""
    return FasttrainError(
        f"{place(name, source)} can't be {shown(raw)}",
        why=why,
        fix=fix,
        slug="option-value",
        exit_code=exit_code(source),
    )


def shown(raw: object) -> str:
    """Return a value as it is shown in errors: quoted, and truncated if it is long."""
    text = repr(raw)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def place(name: str, source: Source) -> str:
    """Return where a value is set, for a user: ``--amp`` or ``fasttrain.yaml:3: amp``."""
    return f"{source}: {name}" if source.kind is SourceKind.FILE else str(source)


def exit_code(source: Source) -> ExitCode:
    """Return the exit code for a wrong value: USAGE for a flag, else CONTRADICTION."""
    return ExitCode.USAGE if source.kind is SourceKind.FLAG else ExitCode.CONTRADICTION


def variable_name(assignment: str) -> str:
    """Return NAME of a checked ``NAME=VALUE``."""
    return assignment.partition("=")[0]


def _is_scalar(raw: object) -> bool:
    return isinstance(raw, str | int)


def _parse_text(spec: OptionSpec, text: str, source: Source) -> OptionValue:
    if not text.strip():
        raise bad_value(spec.name, text, source, EMPTY, "set a value, or leave the option out")
    if spec.choices:
        return _parse_choice(spec, text.strip(), source)
    if spec.kind == "bool":
        return _parse_bool(spec, text.strip(), source)
    if spec.kind == "int":
        return _parse_int(spec, text.strip(), source)
    return text


def _parse_choice(spec: OptionSpec, text: str, source: Source) -> str:
    if text in spec.choices:
        return text
    # YAML 1.1 reads a bare `off` as the bool False, so a tool that rewrites the file leaves
    # `amp: false` where the user wrote `amp: off`. No lever has an "on", so true stays an error.
    if "off" in spec.choices and text.lower() in _FALSE:
        return "off"
    listed = ", ".join(spec.choices)
    fix = suggest(text, spec.choices, f"use one of {listed}")
    raise bad_value(spec.name, text, source, f"it takes one of {listed}", fix)


def _parse_bool(spec: OptionSpec, text: str, source: Source) -> bool:
    word = text.lower()
    if word not in _TRUE | _FALSE:
        raise bad_value(spec.name, text, source, "it is a switch", "use true or false")
    return word in _TRUE


def _parse_int(spec: OptionSpec, text: str, source: Source) -> int:
    if not _WHOLE_NUMBER.fullmatch(text):
        raise bad_value(spec.name, text, source, WHOLE_NUMBER, "write only decimal digits")
    if spec.minimum is not None and int(text) < spec.minimum:
        why = f"the smallest number allowed is {spec.minimum}"
        raise bad_value(spec.name, int(text), source, why, f"use {spec.minimum} or more")
    if spec.maximum is not None and int(text) > spec.maximum:
        why = f"the largest number allowed is {spec.maximum}"
        raise bad_value(spec.name, int(text), source, why, f"use {spec.maximum} or less")
    return int(text)


def _parse_list(spec: OptionSpec, raw: object, source: Source) -> tuple[str, ...]:
    """Return the checked texts of a list; errors don't show values, which may be secrets."""
    # A flag is repeated and YAML has lists, but a variable has to hold all values in one text.
    if isinstance(raw, str) and source.kind is SourceKind.ENV:
        raw = _split(spec, raw, source)
    if isinstance(raw, Mapping) and spec.pairs:
        several = spec.metavar.endswith("=VALUES")
        pairs = [(name, _one(value, several=several)) for name, value in raw.items()]
    elif not isinstance(raw, list | tuple):
        what = f"{place(spec.name, source)} is not a list"
        why = "it takes a list of texts"
        if spec.pairs:
            why = f"it takes a list of {spec.metavar}, or a mapping of NAME: VALUE"
        raise _list_error(spec, what, why, "option-value", source)
    elif not spec.pairs:
        return _texts(spec, raw, source)
    else:
        pairs = [_pair(item) for item in raw]
    return tuple(_assignment(spec, name, value, source) for name, value in pairs)


def _one(value: object, *, several: bool) -> str | None:
    """Return a scalar as text; with `several`, also a list of scalars, joined by commas."""
    if several and isinstance(value, list) and value and all(_is_scalar(item) for item in value):
        return ",".join(str(item) for item in value)
    return str(value) if _is_scalar(value) else None


def _texts(spec: OptionSpec, raw: Sequence[object], source: Source) -> tuple[str, ...]:
    if all(isinstance(item, str) and item.strip() for item in raw):
        return tuple(str(item) for item in raw)
    what = f"{place(spec.name, source)} has an entry that is not a text"
    raise _list_error(spec, what, f"{EMPTY}, or a list itself", "option-value", source)


def _split(spec: OptionSpec, raw: str, source: Source) -> list[str]:
    try:
        return shlex.split(raw)
    except ValueError as error:
        what = f"{place(spec.name, source)} can't be split into words as a shell would"
        raise _list_error(spec, what, str(error).lower(), "option-value", source) from error


def _pair(item: object) -> tuple[str, str | None]:
    name, equals, value = str(item).partition("=") if isinstance(item, str) else ("", "", "")
    return name, value if equals else None


def _assignment(spec: OptionSpec, name: str, value: str | None, source: Source) -> str:
    what = f"{place(spec.name, source)} has an entry that is not {spec.metavar}"
    if value is None:
        raise _list_error(spec, what, "it has no value, or more than one", "env-value", source)
    of_variable = spec.metavar.startswith("NAME")
    if not (_VARIABLE if of_variable else _OPTION).fullmatch(name.removeprefix("--")):
        noun = "a variable" if of_variable else "an option"
        raise _list_error(spec, what, f"{name!r} can't name {noun}", "env-value", source)
    return f"{name}={value}"


def _list_error(spec: OptionSpec, what: str, why: str, slug: str, source: Source) -> FasttrainError:
    fix = f"write a list, as in [{spec.metavar}, {spec.metavar}]"
    if spec.pairs:
        fix = f'write {spec.metavar}; an empty value is NAME= (in a YAML mapping, NAME: "")'
    return FasttrainError(what, why=why, fix=fix, slug=slug, exit_code=exit_code(source))


# The table of options, derived from the fields of `Settings` and `SlurmSettings`.


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
