"""All layers into one `Settings`: flag > environment > file > preset > default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrain.config.environ import CONFIG_VARIABLE, PRESET_VARIABLE, option_values
from fasttrain.config.options import BY_NAME, OPTIONS, OptionValue
from fasttrain.config.presets import preset_values
from fasttrain.config.values import parse_setting, variable_name
from fasttrain.config.yaml_file import YamlFile, file_source, read_yaml
from fasttrain.spec.decision import Setting, Source, SourceKind
from fasttrain.spec.errors import FasttrainError
from fasttrain.spec.settings import Settings

FILE_NAMES = ("fasttrain.yaml", "fasttrain.yml")

Layer = Mapping[str, Setting[OptionValue]]


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the user wants.

    Attributes:
        settings: Every option with its source.
        script: Script that the file names; None when it names none.
        args: Arguments that the file gives it.
        config_path: The file that was read; None when there was none.
    """

    settings: Settings
    script: str | None = None
    args: tuple[str, ...] = ()
    config_path: Path | None = None


def resolve(
    flags: Mapping[str, object],
    *,
    environ: Mapping[str, str],
    cwd: Path,
    config: str | None = None,
    preset: str | None = None,
) -> Resolved:
    """Give each option the value of the strongest layer that names it.

    Args:
        flags: Options given on the command line, by name; None counts as not given.
        environ: The environment.
        cwd: Directory in which fasttrain.yaml is looked for, and from which paths are taken.
        config: Value of ``--config``.
        preset: Value of ``--preset``.

    Raises:
        FasttrainError: Something in some layer is wrong; see `read_yaml`, `option_values`,
            `preset_values` and `parse_value`. ``config-ambiguous`` when both file names exist.
    """
    file = _read_file(environ.get(CONFIG_VARIABLE) or None if config is None else config, cwd)
    layers = [
        _flag_layer(flags),
        option_values(environ),
        _file_layer(file),
        _preset_layer(preset, environ, file),
    ]
    settings = Settings(**_strongest(layers))
    if file is None:
        return Resolved(settings)
    return Resolved(settings, file.script, file.args, file.path)


def _read_file(named: str | None, cwd: Path) -> YamlFile | None:
    if named is not None:
        return read_yaml(cwd / named, name=named)
    found = [name for name in FILE_NAMES if (cwd / name).exists()]
    if len(found) > 1:
        raise FasttrainError(
            f"there are both {' and '.join(found)} in {cwd}",
            why="only one of them would be used",
            fix=f"remove one, or name one with --config {found[0]}",
            slug="config-ambiguous",
        )
    return read_yaml(cwd / found[0], name=found[0]) if found else None


def _flag_layer(flags: Mapping[str, object]) -> Layer:
    return {
        name: parse_setting(BY_NAME[name], raw, Source(SourceKind.FLAG, BY_NAME[name].flag))
        for name, raw in flags.items()
        if raw is not None
    }


def _file_layer(file: YamlFile | None) -> Layer:
    if file is None:
        return {}
    return {
        name: parse_setting(BY_NAME[name], raw, file_source(file.name, line))
        for name, (raw, line) in file.entries.items()
    }


def _preset_layer(flag: str | None, environ: Mapping[str, str], file: YamlFile | None) -> Layer:
    if flag is not None:
        return preset_values(flag, Source(SourceKind.FLAG, "--preset"))
    if variable := environ.get(PRESET_VARIABLE):
        return preset_values(variable, Source(SourceKind.ENV, PRESET_VARIABLE))
    if file is not None and file.preset is not None:
        return preset_values(file.preset, file_source(file.name, file.preset_line))
    return {}


def _strongest(layers: Sequence[Layer]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for spec in OPTIONS:
        said = [layer[spec.name] for layer in layers if spec.name in layer]
        said = [setting for setting in said if setting.value is not None]
        if said:
            chosen[spec.name] = _merge(said) if spec.kind == "list" else said[0]
    return chosen


def _merge(said: Sequence[Setting[Any]]) -> Setting[tuple[str, ...]]:
    """Join lists of ``NAME=VALUE``: for each name the strongest layer, and its last word, wins."""
    by_name = {variable_name(item): item for setting in reversed(said) for item in setting.value}
    where = ", ".join(str(setting.source) for setting in said)
    return Setting(tuple(by_name.values()), Source(said[0].source.kind, where))
