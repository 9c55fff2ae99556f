"""Merge all layers into one `Settings`: flag > environment > file > preset > default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasttrain.config.environ import CONFIG_VARIABLE, PRESET_VARIABLE, option_values
from fasttrain.config.options import (
    BY_NAME,
    OPTIONS,
    SLURM_OPTIONS,
    OptionSpec,
    OptionValue,
    exit_code,
    parse_setting,
    place,
    suggest,
    variable_name,
)
from fasttrain.config.yaml_file import Entries, YamlFile, file_source, read_yaml
from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.errors import FasttrainError
from fasttrain.model.levers import LEVERS
from fasttrain.model.settings import Settings, SlurmSettings

# Named sets of options, weaker than any option that is set by itself.


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
    "fast": _preset("fast", "the defaults, and the model compiled from its first step on"),
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


# Merge all layers into one `Settings`: flag > environment > file > preset > default.


FILE_NAMES = ("fasttrain.yaml", "fasttrain.yml")

Layer = Mapping[str, Setting[OptionValue]]


@dataclass(frozen=True, slots=True)
class Resolved:
    """The merged options.

    Attributes:
        settings: Every option with its source.
        script: Script that the file names; None if it names none.
        with_args: The files that have arguments for a script, the strongest first.
        config_path: The file that was read; None without one.
        slurm: Options of SLURM; the defaults unless the command is for SLURM.
    """

    settings: Settings
    script: str | None = None
    with_args: tuple[YamlFile, ...] = ()
    config_path: Path | None = None
    slurm: SlurmSettings = field(default_factory=SlurmSettings)


def resolve(
    flags: Mapping[str, object],
    *,
    environ: Mapping[str, str],
    cwd: Path,
    config: str | None = None,
    beside: Path | None = None,
    preset: str | None = None,
    slurm: bool = False,
) -> Resolved:
    """Return each option with the value of the strongest layer that names it.

    Args:
        flags: Options from the command line, by name; None counts as not given.
        environ: The environment.
        cwd: Directory that is searched for fasttrain.yaml, and to which paths are relative.
        config: Value of ``--config``.
        beside: Folder of the script; a file there is stronger than the one in ``cwd``.
        preset: Value of ``--preset``.
        slurm: Whether the file's section ``slurm`` counts, with the profile that is named.

    Raises:
        FasttrainError: If a layer is wrong: see `read_yaml`, `option_values`, `preset_values` and
            `parse_value`; ``config-ambiguous`` if both file names exist; ``slurm-cluster`` for a
            profile that the file doesn't have.
    """
    named = environ.get(CONFIG_VARIABLE) or None if config is None else config
    files = [read_yaml(cwd / named, name=named)] if named is not None else _found(cwd, beside)
    said = [_flag_layer(flags), option_values(environ, slurm=slurm)]
    sections = _slurm_layers(files, said) if slurm else []
    entries = [_layer(file, file.entries) for file in files]
    # Strongest first. The presets come last, whoever chose one: a flag --preset must not override
    # an option of the file.
    layers = [*said, *sections, *entries, _preset_layer(preset, environ, files)]
    settings = Settings(**_strongest(layers, OPTIONS))
    on_slurm = SlurmSettings(**_strongest(layers, SLURM_OPTIONS))
    if not files:
        return Resolved(settings, slurm=on_slurm)
    file = next((file for file in files if file.script), files[0])
    with_args = tuple(file for file in files if file.args)
    return Resolved(settings, file.script, with_args, file.path, on_slurm)


def _slurm_layers(files: Sequence[YamlFile], stronger: Sequence[Layer]) -> list[Layer]:
    """Return the sections ``slurm``, preceded by the profile that they or stronger layers name."""
    sections = [_layer(file, file.slurm) for file in files]
    named = [layer["cluster"] for layer in (*stronger, *sections) if "cluster" in layer]
    if not named or named[0].value is None:
        return sections
    name, there = str(named[0].value), [cluster for file in files for cluster in file.clusters]
    if name not in there:
        listed = ", ".join(there) or "none"
        raise FasttrainError(
            f"{place('cluster', named[0].source)}: there is no profile {name!r}",
            why=f"the profiles of {files[0].name if files else FILE_NAMES[0]} are: {listed}",
            fix=suggest(name, there, "add one under slurm: clusters:"),
            slug="slurm-cluster",
            exit_code=exit_code(named[0].source),
        )
    profiles = [_layer(file, file.clusters[name]) for file in files if name in file.clusters]
    return [*profiles, *sections]


def _found(cwd: Path, beside: Path | None) -> list[YamlFile]:
    """Return the configuration files in the default places, that of the script's folder first."""
    folders = [cwd] if beside is None or (cwd / beside).samefile(cwd) else [cwd / beside, cwd]
    return [file for folder in folders for file in _file_in(folder, cwd)]


def _file_in(folder: Path, cwd: Path) -> Iterator[YamlFile]:
    found = [folder / name for name in FILE_NAMES if (folder / name).exists()]
    names = [str(path.relative_to(cwd) if path.is_relative_to(cwd) else path) for path in found]
    if len(found) > 1:
        raise FasttrainError(
            f"there are both {' and '.join(path.name for path in found)} in {folder}",
            why="only one of them would be used",
            fix=f"remove one, or name one with --config {names[0]}",
            slug="config-ambiguous",
        )
    for path, name in zip(found, names, strict=True):
        yield read_yaml(path, name=name)


def _flag_layer(flags: Mapping[str, object]) -> Layer:
    return {
        name: parse_setting(BY_NAME[name], raw, Source(SourceKind.FLAG, BY_NAME[name].flag))
        for name, raw in flags.items()
        if raw is not None
    }


def _layer(file: YamlFile, entries: Entries) -> Layer:
    return {
        name: parse_setting(BY_NAME[name], raw, file_source(file.name, line))
        for name, (raw, line) in entries.items()
    }


def _preset_layer(flag: str | None, environ: Mapping[str, str], files: Sequence[YamlFile]) -> Layer:
    if flag is not None:
        return preset_values(flag, Source(SourceKind.FLAG, "--preset"))
    if variable := environ.get(PRESET_VARIABLE):
        return preset_values(variable, Source(SourceKind.ENV, PRESET_VARIABLE))
    for file in files:
        if file.preset is not None:
            return preset_values(file.preset, file_source(file.name, file.preset_line))
    return {}


def _strongest(layers: Sequence[Layer], specs: Sequence[OptionSpec]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for spec in specs:
        said = [layer[spec.name] for layer in layers if spec.name in layer]
        # None is a key without a value, such as `max_steps:`, which leaves the option unset.
        said = [setting for setting in said if setting.value is not None]
        if said:
            chosen[spec.name] = _merge(said) if spec.pairs else said[0]
    return chosen


def _merge(said: Sequence[Setting[Any]]) -> Setting[tuple[str, ...]]:
    """Merge lists of ``NAME=VALUE``: for each name the strongest layer's last value wins."""
    by_name = {variable_name(item): item for setting in reversed(said) for item in setting.value}
    where = ", ".join(str(setting.source) for setting in said)
    return Setting(tuple(by_name.values()), Source(said[0].source.kind, where))
