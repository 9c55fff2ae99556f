"""Read fasttrain.yaml: its keys, each with the value as it is written and its line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from fasttrain.config.options import BY_NAME
from fasttrain.config.values import bad_value, shown, suggest
from fasttrain.config.yaml_text import compose, read_bounded, syntax_error
from fasttrain.model.decision import Source, SourceKind
from fasttrain.model.errors import FasttrainError

NOT_A_WORD = "a key is not a word"

MAX_BYTES = 1 << 20
OTHER_KEYS = ("script", "args", "preset")
SLURM, CLUSTERS = "slurm", "clusters"
TOP_KEYS = (*(name for name, spec in BY_NAME.items() if not spec.slurm), *OTHER_KEYS, SLURM)

Entries = dict[str, tuple[object, int]]
_NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True, slots=True)
class YamlFile:
    """The content of one configuration file.

    Attributes:
        path: Path of the file.
        name: Its name in messages.
        entries: Option name to value and line. Scalars are the text as written (None if empty), so
            that ``off``, ``1:4`` and ``0123`` mean what they look like.
        script: Script to run, if the file names one.
        args: Arguments of the script.
        preset: Name of a preset, unchecked.
        preset_line: Its line; 0 without one.
        slurm: Options in the section ``slurm``, as in ``entries``.
        clusters: Options in each of its profiles, by the name of the profile.
    """

    path: Path
    name: str
    entries: Entries = field(default_factory=dict)
    script: str | None = None
    args: tuple[str, ...] = ()
    preset: str | None = None
    preset_line: int = 0
    slurm: Entries = field(default_factory=dict)
    clusters: dict[str, Entries] = field(default_factory=dict)


def file_source(name: str, line: int) -> Source:
    """Return the source of a value in a file, such as ``fasttrain.yaml:3``."""
    return Source(SourceKind.FILE, f"{name}:{line}")


def read_yaml(path: Path, *, name: str = "") -> YamlFile:
    """Read a configuration file; an empty one sets nothing.

    Args:
        path: The file.
        name: Its name in messages; by default its path.

    Raises:
        FasttrainError: ``config-missing`` if it can't be opened, ``config-syntax``,
            ``config-mapping``, ``config-key`` for an unknown or repeated key, ``option-value``
            for a script, args or preset of the wrong type.
    """
    name = name or str(path)
    root = compose(_read_bytes(path, name), name)
    if root is None or (isinstance(root, yaml.ScalarNode) and _value(root, name) is None):
        return YamlFile(path, name)
    if not isinstance(root, yaml.MappingNode):
        raise FasttrainError(
            f"{name}:{root.start_mark.line + 1}: the file is not a mapping",
            why="a configuration consists of lines such as `option: value`",
            fix="write, for example, `amp: bf16`, with a space after the colon",
            slug="config-mapping",
        )
    return _fill(path, name, _items(root, name, TOP_KEYS))


def _read_bytes(path: Path, name: str) -> bytes:
    """Return the file's bytes; the read is bounded, since the file may be a pipe or a device."""
    try:
        data = read_bounded(path, MAX_BYTES + 1)
    except OSError as error:
        raise FasttrainError(
            f"the configuration file {name} can't be read",
            why=error.strerror or str(error),
            fix="check --config, FASTTRAIN_CONFIG and the file's permissions",
            slug="config-missing",
        ) from error
    if len(data) > MAX_BYTES:  # MAX_BYTES + 1 were read, so that this shows
        why = f"it is larger than {MAX_BYTES >> 20} MiB"
        raise syntax_error(name, 1, why, "check that this is the intended file")
    return data


def _items(
    mapping: yaml.MappingNode, name: str, known: Sequence[str] = ()
) -> dict[str, tuple[yaml.Node, int]]:
    """Return key to value node and line; with `known`, other keys are errors."""
    items: dict[str, tuple[yaml.Node, int]] = {}
    for key_node, node in mapping.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            why = "it is a list or a mapping"
            raise _key_error(name, line, NOT_A_WORD, why, "write option: value")
        key = str(key_node.value)
        if known:
            key = _known_key(key, known, name, line)
        if key in items:
            # PyYAML itself would silently keep the last one.
            why = f"line {items[key][1]} sets it too, and one of the two would be ignored"
            raise _key_error(name, line, f"{key} is set twice", why, "keep one of them")
        items[key] = (node, line)
    return items


def _known_key(written: str, known: Sequence[str], name: str, line: int) -> str:
    key = written.replace("-", "_")  # keys may be written like flags
    if key in known:
        return key
    what, fix = f"unknown key {shown(written)}", "fasttrain run --help lists the options"
    if key in BY_NAME:
        why = "it is an option of fasttrain slurm"
        raise _key_error(name, line, what, why, "write it under slurm:, indented")
    fix = suggest(written, known, fix)
    raise _key_error(name, line, what, "it is not an option", fix)


def _key_error(name: str, line: int, what: str, why: str, fix: str) -> FasttrainError:
    return FasttrainError(f"{name}:{line}: {what}", why=why, fix=fix, slug="config-key")


def _fill(path: Path, name: str, items: dict[str, tuple[yaml.Node, int]]) -> YamlFile:
    slurm = _section(items.pop(SLURM), name, (*BY_NAME, CLUSTERS)) if SLURM in items else {}
    profiles = _section(slurm.pop(CLUSTERS), name, ()) if CLUSTERS in slurm else {}
    return YamlFile(
        path,
        name,
        _entries(items, name),
        _word("script", items, name),
        _args(items, name),
        _word("preset", items, name),
        items["preset"][1] if "preset" in items else 0,
        _entries(slurm, name),
        {
            key: _entries(_section(item, name, tuple(BY_NAME)), name)
            for key, item in profiles.items()
        },
    )


def _entries(items: dict[str, tuple[yaml.Node, int]], name: str) -> Entries:
    return {
        key: (_value(node, name), line)
        for key, (node, line) in items.items()
        if key not in OTHER_KEYS
    }


def _section(
    item: tuple[yaml.Node, int], name: str, known: Sequence[str]
) -> dict[str, tuple[yaml.Node, int]]:
    """Return the items of a section, which may be empty."""
    node, line = item
    if isinstance(node, yaml.MappingNode):
        return _items(node, name, known)
    if _value(node, name) is None:
        return {}
    why = "a section consists of indented lines such as option: value"
    fix = "indent the lines of the section"
    raise _key_error(name, line, "this section is not a mapping", why, fix)


def _word(key: str, items: dict[str, tuple[yaml.Node, int]], name: str) -> str | None:
    """Return the text of a key that takes one; None if it is absent or empty."""
    if key not in items:
        return None
    node, line = items[key]
    value = _value(node, name)
    if value is None or (isinstance(value, str) and value):
        return value
    raise bad_value(key, value, file_source(name, line), "it takes one text")


def _args(items: dict[str, tuple[yaml.Node, int]], name: str) -> tuple[str, ...]:
    """Return the script's arguments as written: ``1e-3``, ``010`` and ``yes`` stay texts."""
    if "args" not in items:
        return ()
    node, _ = items["args"]
    if isinstance(node, yaml.SequenceNode):
        return tuple(_argument(item, name) for item in node.value)
    if _value(node, name) is None:
        return ()
    raise _args_error(node, name)


def _argument(node: yaml.Node, name: str) -> str:
    blank = isinstance(node, yaml.ScalarNode) and not node.value and node.style is None
    if blank or not isinstance(node, yaml.ScalarNode):
        raise _args_error(node, name)
    return str(node.value)


def _args_error(node: yaml.Node, name: str) -> FasttrainError:
    return FasttrainError(
        f"{name}:{node.start_mark.line + 1}: args is not a list of texts",
        why="each entry is one argument of the script, passed on as it is written",
        fix='write args: [--lr, 0.1], and "" for an empty argument',
        slug="option-value",
    )


def _value(node: yaml.Node, name: str) -> object:
    """Return a node's value: a scalar's text (None if empty), or a list or dict of values."""
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, name) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key: _value(item, name) for key, (item, _) in _items(node, name).items()}
    return None if node.tag == _NULL else str(node.value)
