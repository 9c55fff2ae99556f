"""Read fasttrain.yaml: its keys, each with the value as it is written and its line."""

from __future__ import annotations

import errno
import os
import re
import select
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from yaml.error import MarkedYAMLError
from yaml.reader import ReaderError

from fasttrain.config.options import BY_NAME, bad_value, shown, suggest
from fasttrain.files import without_waiting
from fasttrain.model.decision import Source, SourceKind
from fasttrain.model.errors import FasttrainError

# Read and parse YAML text: strictly, with limits, and with the line of every error.


NO_ANCHORS = "anchors (&) and aliases (*) are not allowed; quote a text that starts with one"

_MAX_DEPTH = 8
_MAX_NODES = 20_000
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses dangerous and unbounded YAML.

    Anchors and aliases let a small file expand to gigabytes, deep nesting exhausts the stack, and
    PyYAML's parser takes seconds for 100,000 values.
    """

    depth = 0
    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if problem := _problem(event, self.depth, self.nodes):
            raise MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        self.nodes += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _problem(event: yaml.Event, depth: int, nodes: int) -> str:
    """Return why the node that starts at this event is refused; empty if it is allowed."""
    if getattr(event, "anchor", None) is not None:
        return NO_ANCHORS
    if getattr(event, "tag", None) is not None:
        return "tags (!) are not allowed; quote a text that starts with one"
    if depth == _MAX_DEPTH:
        return f"it is nested more than {_MAX_DEPTH} deep"
    if nodes == _MAX_NODES:
        return f"it has more than {_MAX_NODES} values"
    text = getattr(event, "value", "")
    if "\0" in text or _SURROGATE.search(text):
        return "a NUL or half a character can't be passed to a process"
    return ""


def compose(data: bytes, name: str) -> yaml.Node | None:
    """Return the root node of a YAML document; None if it is empty.

    Args:
        data: The file's bytes.
        name: The file's name in errors.

    Raises:
        FasttrainError: ``config-syntax``, with the line.
    """
    try:
        text = data.decode("utf-8")
        loader = _Loader(text)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise syntax_error(name, line, "it is not UTF-8 text") from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise syntax_error(name, line, "it has control characters") from error
    try:
        return loader.get_single_node()
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else loader.line + 1
        raise syntax_error(name, line, error.problem or "it is not YAML") from error
    except (ValueError, OverflowError) as error:
        # PyYAML 6.0 passes the digits of "\UFFFFFFFF" to chr() unchecked.
        raise syntax_error(name, loader.line + 1, str(error)) from error
    finally:
        loader.dispose()


_QUOTE = "correct that line; put a text with special characters into quotes"


def syntax_error(name: str, line: int, why: str, fix: str = _QUOTE) -> FasttrainError:
    """Return the error for text that is not valid YAML, or not allowed."""
    return FasttrainError(
        f"{name}:{line}: can't be read as YAML",
        why=why,
        fix=fix,
        slug="config-syntax",
    )


# The file may be a pipe: ``--config <(command)`` is one. A shell's pipe has its writer already; a
# named pipe may wait for one this long.
WRITER_S = 1.0
POLL_S = 0.01
NOBODY_WRITES = "nobody writes to this pipe"


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Return the first bytes of a file or a pipe, at most `most_bytes`.

    Raises:
        OSError: If it can't be read, or is a pipe without a writer.
    """
    with open(path, "rb", buffering=0, opener=without_waiting) as file:
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            return _written_to(file.fileno(), most_bytes, path)
        data = b""
        while (left := most_bytes - len(data)) and (piece := file.read(left)):
            data += piece
        return data


def _written_to(pipe: int, most_bytes: int, path: Path) -> bytes:
    """Return what is written to a pipe, until its last writer closes it.

    Source: pipe(7): a non-blocking read returns nothing if the pipe has no writer, and fails with
    EAGAIN if it has one that hasn't written yet.
    """
    data, deadline_s = b"", time.monotonic() + WRITER_S
    while len(data) < most_bytes:
        try:
            piece = os.read(pipe, most_bytes - len(data))
        except BlockingIOError:
            select.select([pipe], [], [])
            continue
        data += piece
        if data and not piece:
            break
        if time.monotonic() > deadline_s and not data:
            raise OSError(errno.EPIPE, NOBODY_WRITES, str(path))
        if not piece:
            time.sleep(POLL_S)
    return data


# Read fasttrain.yaml: its keys, each with the value as it is written and its line.


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
        args: Arguments of the script, or of any script if the file names none.
        args_line: Their line; 0 without any.
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
    args_line: int = 0
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
        items["args"][1] if "args" in items else 0,
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
