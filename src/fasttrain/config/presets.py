"""Named sets of options, weaker than any option that is set by itself."""

from __future__ import annotations

from dataclasses import dataclass

from fasttrain.config.options import BY_NAME, OptionValue
from fasttrain.config.values import exit_code, parse_setting, place, suggest
from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.errors import FasttrainError
from fasttrain.model.levers import LEVERS


@dataclass(frozen=True, slots=True)
class Preset:
    """One line of help, and the values of the options that the preset sets."""

    description: str
    values: dict[str, str]


def _preset(name: str, description: str, **others: str) -> Preset:
    """Return a preset of what the levers say of it, and of what else it sets."""
    values = {lever: row.presets[name] for lever, row in LEVERS.items() if name in row.presets}
    return Preset(description, values | others)


PRESETS: dict[str, Preset] = {
    "exact": _preset("exact", "results bit for bit as without fasttrain", on_nan="off"),
    "fast": _preset("fast", "the defaults, and the model compiled"),
    "max": _preset("max", "the fastest kernels, for a long compilation first"),
}


def preset_values(name: str, source: Source) -> dict[str, Setting[OptionValue]]:
    """Return the settings of a preset.

    Args:
        name: The preset.
        source: Who chose it, for the error.

    Raises:
        FasttrainError: ``preset`` for an unknown name; the error suggests the nearest.
    """
    if preset := PRESETS.get(name):
        origin = Source(SourceKind.PRESET, f"preset {name}")
        return {
            option: parse_setting(BY_NAME[option], value, origin)
            for option, value in preset.values.items()
        }
    listed = ", ".join(PRESETS)
    raise FasttrainError(
        f"{place('preset', source)}: there is no preset {name!r}",
        why=f"the presets are {listed}",
        fix=suggest(name, PRESETS, f"use one of {listed}"),
        slug="preset",
        exit_code=exit_code(source),
    )
