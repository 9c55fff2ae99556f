"""The words of a command line as they were typed: which are fasttrain's, and which the script's."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasttrain.cli.target import Starts, script_folder
from fasttrain.config.environ import CONFIG_VARIABLE
from fasttrain.config.options import OPTIONS, SLURM_OPTIONS, OptionSpec
from fasttrain.config.resolve import Resolved, resolve
from fasttrain.launch.start import working_directory
from fasttrain.model.errors import FasttrainError
from fasttrain.model.plan import Target, TargetKind
from fasttrain.model.secrets import mask_args

_WITH_VALUE = {
    "run": ("-m", "--config", "--preset", "--machine"),
    "slurm": ("-m", "--config", "--preset"),
}
_SWITCHES = {
    "run": ("-h", "--help", "--no-python", "--dry-run", "--explain", "--json"),
    "slurm": (
        *("-h", "--help", "--no-python", "--dry-run", "--json"),
        *("--wait", "--follow", "--check"),
    ),
}
# torchrun takes both forms; scripts that are started by it are documented with this one.
_TORCHRUN = {
    f"--{name}": f"--{name.replace('_', '-')}"
    for name in (
        *("nproc_per_node", "node_rank", "master_addr", "master_port"),
        *("rdzv_endpoint", "rdzv_backend", "rdzv_id", "rdzv_conf", "max_restarts"),
    )
}


@dataclass(slots=True)
class Typed:
    """A command line in parts.

    Attributes:
        before: fasttrain's options before SCRIPT.
        script: The script, or the module behind ``-m``; empty if no word can be one.
        kind: What it is.
        after: What follows it up to ``--``, options that fasttrain knows with their values.
        behind: What follows ``--``.
    """

    before: list[str] = field(default_factory=list)
    script: str = ""
    kind: str = "script"
    after: list[tuple[str, ...]] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)

    def shared(self, command: str, environ: Mapping[str, str], *, unread: bool) -> dict[str, str]:
        """Return fasttrain's options after SCRIPT which that may take too, with the place.

        Args:
            command: The sub-command.
            environ: The environment.
            unread: Whether to return all of them where the source can't be read.
        """
        known = [group for group in self.after if _option(group[0]) in takes(command)]
        if not known:
            return {}
        found = self._options(environ)
        if found is None:
            return {group[0]: "" for group in known} if unread else {}
        names = {group[0]: _name(group[0]) for group in known}
        return {word: found[name] for word, name in names.items() if name in found}

    def _options(self, environ: Mapping[str, str]) -> Mapping[str, str] | None:
        from fasttrain.source.read import read_options  # reads files, which few lines need

        try:
            cwd = str(Path.cwd())
        except FileNotFoundError:
            return None
        if self.kind == "command" or not self.script:
            return None
        kind: TargetKind = "module" if self.kind == "module" else "script"
        return read_options(Target(kind, self.script), cwd, environ)

    def _config_names_script(self) -> bool:
        """True if the configuration that the line names, or the one that is here, has a script."""
        options = (iter(self.before), iter(word for group in self.after for word in group))
        named = [value for words in options for value in _values(words, "--config")]
        environ = {k: v for k, v in os.environ.items() if k == CONFIG_VARIABLE}
        try:
            found = resolve({}, environ=environ, cwd=Path.cwd(), config=named[0] if named else None)
        except (FasttrainError, OSError):
            return False
        return found.script is not None

    def separated(self, command: str, shared: Mapping[str, str]) -> str:
        """Return the command line with all behind ``--`` that may be the script's, to be pasted."""
        ours: list[str] = []
        theirs: list[str] = []
        for group in self.after:
            known = _option(group[0]) in takes(command) and group[0] not in shared
            (ours if known else theirs).extend(group)
        name = ["-m", self.script] if self.kind == "module" else [self.script or "SCRIPT"]
        if not self.script and self._config_names_script():
            name = []
        behind = [*theirs, *self.behind]
        line = [*mask_args(self.before), *name, *mask_args(ours), "--", *mask_args(behind)]
        return shlex.join(["fasttrain", command, *line])


def takes(command: str) -> Mapping[str, bool]:
    """Return fasttrain's options, and whether a value follows each."""
    specs: tuple[OptionSpec, ...] = (*OPTIONS, *(SLURM_OPTIONS if command == "slurm" else ()))
    switches = [spec.flag for spec in specs if spec.kind == "bool"]
    switches += [f"--no-{flag.removeprefix('--')}" for flag in switches]
    valued = [spec.flag for spec in specs if spec.kind != "bool"]
    known = dict.fromkeys((*switches, *_SWITCHES[command]), False)
    return known | dict.fromkeys((*valued, *_WITH_VALUE[command]), True)


def as_ours(word: str) -> str:
    """Return a word with torchrun's spelling of an option as fasttrain's."""
    name, equals, value = word.partition("=")
    return _TORCHRUN.get(name, name) + equals + value


def split(words: Sequence[str], command: str) -> Typed:
    """Return the words behind the sub-command in parts."""
    at = words.index("--") if "--" in words else len(words)
    typed = Typed(behind=list(words[at + 1 :]))
    if "--no-python" in words[:at]:
        typed.kind = "command"
    known = takes(command)
    for group in _groups(words[:at], known):
        word = group[0]
        if typed.script:
            typed.after.append(group)
        elif word == "-m":
            typed.kind, typed.script = "module", group[-1]
        elif _option(word) in known:
            typed.before.extend(group)
        elif word.endswith(".py") or not (typed.after or word.startswith("-")):
            typed.script = word
        else:
            typed.after.append(group)  # an option of the script's before its name, or its value
    return typed


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What the command lines of ``run`` and ``slurm`` have in common, parsed.

    Attributes:
        words: Words without a dash: the script and arguments of its own.
        behind: Words behind ``--``.
        typed: All words as they were typed.
        starts: What kind of target it is.
        config: Value of ``--config``.
        preset: Value of ``--preset``.
        flags: The options of `Settings`, and on SLURM of `SlurmSettings`; None for those not given.
    """

    words: tuple[str, ...]
    behind: tuple[str, ...]
    typed: tuple[str, ...]
    starts: Starts
    config: str | None
    preset: str | None
    flags: Mapping[str, Any]


def resolve_told(line: CommandLine, command: str, environ: Mapping[str, str]) -> Resolved:
    """Return what is wanted, and tell of options that went to fasttrain and may be the script's."""
    cwd = working_directory()
    try:
        wanted = resolve(
            line.flags,
            environ=environ,
            cwd=cwd,
            config=line.config,
            beside=script_folder(line.words, line.starts, cwd),
            preset=line.preset,
            slurm=command == "slurm",
        )
    except FasttrainError:  # what was meant for the script may be why: --config, say
        tell_shared(line.typed, command, environ)
        raise
    if not wanted.settings.quiet.value:
        tell_shared(line.typed, command, environ)
    return wanted


def tell_shared(words: Sequence[str], command: str, environ: Mapping[str, str]) -> None:
    """Print to stderr which options went to fasttrain although the script has them as well."""
    typed = split(words, command)
    shared = typed.shared(command, environ, unread=False)
    if shared:
        names = ", ".join(dict.fromkeys(word.split("=")[0] for word in shared))
        sys.stderr.write(
            f"fasttrain: note: {names} went to fasttrain, and the script may take the same"
            f" ({next(iter(shared.values()))}); to hand it on: {typed.separated(command, shared)}\n"
        )


def _groups(words: Sequence[str], known: Mapping[str, bool]) -> Iterator[tuple[str, ...]]:
    rest = iter(words)
    for word in rest:
        value = next(rest, None) if known.get(as_ours(word)) else None
        yield (word,) if value is None else (word, value)


def _values(words: Iterator[str], option: str) -> Iterator[str]:
    for word in words:
        name, equals, value = word.partition("=")
        if name == option:
            yield value if equals else next(words, "")


def _option(word: str) -> str:
    """Return the name of an option as fasttrain spells it."""
    return as_ours(word).split("=", maxsplit=1)[0]


def _name(option: str) -> str:
    return option.split("=", maxsplit=1)[0].removeprefix("--").removeprefix("no-").replace("-", "_")
