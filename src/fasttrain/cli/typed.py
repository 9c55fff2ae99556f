"""The words of a command line: fasttrain's, the script's, what they start, and usage errors."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from fasttrain.cli.requests import (
    CommandLine,
    RunRequest,
    SlurmRequest,
    TuneRequest,
    declared_flags,
)
from fasttrain.config.environ import CONFIG_VARIABLE, read_environ
from fasttrain.config.options import OPTIONS, SLURM_OPTIONS, OptionSpec, nearest
from fasttrain.config.resolve import Resolved, resolve
from fasttrain.launch.start import working_directory
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.plan import Target, TargetKind
from fasttrain.model.secrets import mask_args

_REQUESTS = {"run": RunRequest, "slurm": SlurmRequest, "tune": TuneRequest}
# torchrun accepts both spellings; the documentation of scripts uses this one.
_TORCHRUN = {
    f"--{name}": f"--{name.replace('_', '-')}"
    for name in (
        *("nproc_per_node", "node_rank", "master_addr", "master_port"),
        *("rdzv_endpoint", "rdzv_backend", "rdzv_id", "rdzv_conf", "max_restarts"),
    )
}


@dataclass(slots=True)
class Typed:
    """The parts of a command line.

    Attributes:
        before: fasttrain's options before SCRIPT.
        script: The script, or the module after ``-m``; empty if no word can be one.
        kind: ``script``, ``module`` or ``command``.
        after: The words from there to ``--``, those of fasttrain's options with their values.
        passed_on: The words after ``--``.
    """

    before: list[str] = field(default_factory=list)
    script: str = ""
    kind: str = "script"
    after: list[tuple[str, ...]] = field(default_factory=list)
    passed_on: list[str] = field(default_factory=list)

    def shared(self, command: str, environ: Mapping[str, str], *, unread: bool) -> dict[str, str]:
        """Return fasttrain's options after SCRIPT that the script may take, too, with the place.

        Args:
            command: The sub-command.
            environ: The environment.
            unread: Whether to return all of them if the source can't be read.
        """
        known = [group for group in self.after if _option(group[0]) in takes(command)]
        if not known:
            return {}
        found = self._options(environ)
        if found is None:
            return {group[0]: "" for group in known} if unread else {}
        names = {group[0]: _name(group[0]) for group in known}
        return {word: found[name] for word, name in names.items() if name in found}

    def misses(self, option: str, environ: Mapping[str, str]) -> bool:
        """Return True if the script was read, and nothing in it takes this option."""
        found = self._options(environ)
        return found is not None and _name(option) not in found

    def _options(self, environ: Mapping[str, str]) -> Mapping[str, str] | None:
        from fasttrain.source.read import read_options  # deferred: few command lines need it

        try:
            cwd = str(Path.cwd())
        except FileNotFoundError:
            return None
        if self.kind == "command" or not self.script:
            return None
        kind: TargetKind = "module" if self.kind == "module" else "script"
        return read_options(Target(kind, self.script), cwd, environ)

    def _config_names_script(self) -> bool:
        """Return True if the configuration file, named or found here, names a script."""
        options = (iter(self.before), iter(word for group in self.after for word in group))
        named = [value for words in options for value in _values(words, "--config")]
        # Without the other variables: a wrong one must not keep the fix from being shown.
        environ = {k: v for k, v in os.environ.items() if k == CONFIG_VARIABLE}
        try:
            found = resolve({}, environ=environ, cwd=Path.cwd(), config=named[0] if named else None)
        except (FasttrainError, OSError):
            return False
        return found.script is not None

    def separated(self, command: str, shared: Mapping[str, str]) -> str:
        """Return the command line, for pasting, with all that may be the script's after ``--``."""
        ours: list[str] = []
        theirs: list[str] = []
        for group in self.after:
            known = _option(group[0]) in takes(command) and group[0] not in shared
            (ours if known else theirs).extend(group)
        name = ["-m", self.script] if self.kind == "module" else [self.script or "SCRIPT"]
        if not self.script and self._config_names_script():
            name = []
        passed_on = [*theirs, *self.passed_on]
        line = [*mask_args(self.before), *name, *mask_args(ours), "--", *mask_args(passed_on)]
        return shlex.join(["fasttrain", command, *line])


def takes(command: str) -> Mapping[str, bool]:
    """Return fasttrain's options, each with True if a value follows."""
    specs: tuple[OptionSpec, ...] = (*OPTIONS, *(SLURM_OPTIONS if command == "slurm" else ()))
    switches = [spec.flag for spec in specs if spec.kind == "bool"]
    switches += [f"--no-{flag.removeprefix('--')}" for flag in switches]
    valued = [spec.flag for spec in specs if spec.kind != "bool"]
    known = dict.fromkeys((*switches, "-h", "--help"), False) | dict.fromkeys(valued, True)
    return known | declared_flags(_REQUESTS[command])


def as_ours(word: str) -> str:
    """Return a word in fasttrain's spelling of an option, given in torchrun's."""
    name, equals, value = word.partition("=")
    return _TORCHRUN.get(name, name) + equals + value


def split(words: Sequence[str], command: str) -> Typed:
    """Return the parts of a command line, given the words after the sub-command."""
    at = words.index("--") if "--" in words else len(words)
    typed = Typed(passed_on=list(words[at + 1 :]))
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
        # After an unknown option, a word may be its value; only .py shows that it is the script.
        elif word.endswith(".py") or not (typed.after or word.startswith("-")):
            typed.script = word
        else:
            typed.after.append(group)  # an option of the script before its name, or its value
    return typed


def choose_target(line: CommandLine, wanted: Resolved) -> Target:
    """Return what to start, from the command line or else from the configuration.

    A file's arguments for it come before those of the command line.

    Raises:
        FasttrainError: ``script-missing`` if neither names a script; ``target-contradiction``.
    """
    words = tuple(line.words or ())
    if line.module:
        if line.no_python:
            raise _contradiction()
        return _with_args(Target("module", line.module, (*words, *line.passed_on)), wanted)
    kind: TargetKind = "command" if line.no_python else "script"
    if words:
        return _with_args(Target(kind, words[0], (*words[1:], *line.passed_on)), wanted)
    if line.no_python and line.passed_on:
        return _with_args(Target(kind, line.passed_on[0], line.passed_on[1:]), wanted)
    if wanted.script is None:
        raise FasttrainError(
            "there is no script to run",
            why="neither the command line nor a fasttrain.yaml names one",
            fix=f"fasttrain {line.command} train.py, or write `script: train.py` into"
            " fasttrain.yaml",
            slug="script-missing",
            exit_code=ExitCode.USAGE,
        )
    return _with_args(Target(kind, wanted.script, line.passed_on), wanted)


def _with_args(target: Target, wanted: Resolved) -> Target:
    """Return a target with the arguments that a file has for it; report those for another one."""
    files = wanted.with_args
    for file in files:
        if file.script is None or _is_same(target, file.script, file.path.parent):
            return replace(target, args=(*file.args, *target.args))
    if files and not wanted.settings.quiet.value:
        sys.stderr.write(
            f"fasttrain: warning: args of {files[0].name}:{files[0].args_line} are for"
            f" {files[0].script}, and are not passed to {target.name}\n"
        )
    return target


def _is_same(target: Target, script: str, folder: Path) -> bool:
    """Return True if a target is a script, named from the working directory or from a folder."""
    if target.kind == "module":
        return False
    if target.name == script:
        return True
    for there in (Path(script), folder / script):
        with suppress(OSError, ValueError):  # one of the two doesn't exist, or can't
            if there.samefile(target.name):
                return True
    return False


def _contradiction() -> FasttrainError:
    return FasttrainError(
        "-m and --no-python exclude each other",
        why="-m names a module for Python to run, and --no-python excludes Python",
        fix="leave one of them out",
        slug="target-contradiction",
        exit_code=ExitCode.USAGE,
    )


def script_folder(script: str, cwd: Path) -> Path | None:
    """Return the folder of a script; None if there is no such file."""
    there = os.path.isfile(cwd / script)  # noqa: PTH113 - Path.is_file raises for names too long
    return (cwd / script).parent if there else None


def resolve_options(line: CommandLine, environ: Mapping[str, str]) -> Resolved:
    """Return the options; report those that fasttrain took although the script may take them."""
    cwd = working_directory()
    names_script = line.words and not (line.module or line.no_python)
    try:
        wanted = resolve(
            line.flags,
            environ=environ,
            cwd=cwd,
            config=line.config,
            beside=script_folder(line.words[0], cwd) if line.words and names_script else None,
            preset=line.preset,
            slurm=line.command == "slurm",
        )
    except FasttrainError:  # perhaps because of an option that was meant for the script: --config
        report_shared(line.typed, line.command, environ)
        raise
    if not wanted.settings.quiet.value:
        report_shared(line.typed, line.command, environ)
    return wanted


def report_shared(words: Sequence[str], command: str, environ: Mapping[str, str]) -> None:
    """Print to stderr which options fasttrain took although the script may take them, too."""
    typed = split(words, command)
    shared = typed.shared(command, environ, unread=False)
    if shared:
        names = ", ".join(dict.fromkeys(word.split("=")[0] for word in shared))
        sys.stderr.write(
            f"fasttrain: note: {names} went to fasttrain, but the script may take the same option"
            f" ({next(iter(shared.values()))}); to pass it on: {typed.separated(command, shared)}\n"
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
    """Return the name of an option in fasttrain's spelling."""
    return as_ours(word).split("=", maxsplit=1)[0]


def _name(option: str) -> str:
    return option.split("=", maxsplit=1)[0].removeprefix("--").removeprefix("no-").replace("-", "_")


def translate(error: Exception, argv: list[str], commands: set[str]) -> FasttrainError:
    """Return typer's usage error as a FasttrainError, with the nearest option or a fix to type.

    Args:
        error: A usage error of typer.
        argv: The command line.
        commands: Names of the sub-commands.
    """
    command = argv[0] if argv and argv[0] in commands else ""
    # By name: typer 0.16 uses click's exceptions, later versions have their own.
    option = getattr(error, "option_name", None)
    if option and command in _REQUESTS and type(error).__name__ == "NoSuchOption":
        return unknown_option(option, argv[1:], command)
    script = next((word for word in argv if word.endswith(".py")), None)
    named = argv[:1] == [script] or argv[0].startswith("-") if script else False
    if script and named and not commands.intersection(argv):
        return _no_command(script, argv)
    words = getattr(error, "format_message", error.__str__)()  # str(error) may be empty
    message = " ".join(words.split()).rstrip(".")
    return FasttrainError(
        message[:1].lower() + message[1:],
        why="the command line can't be parsed",
        fix=f"see {' '.join(('fasttrain', command)).strip()} --help",
        slug="usage",
        exit_code=ExitCode.USAGE,
    )


def _no_command(script: str, argv: list[str]) -> FasttrainError:
    return FasttrainError(
        f"{script} is a script, not a command of fasttrain",
        why="the command run starts scripts",
        fix=_run_line(argv),
        slug="usage",
        exit_code=ExitCode.USAGE,
    )


def _run_line(argv: list[str]) -> str:
    typed = split(argv, "run")
    known = takes("run")
    if all(
        as_ours(group[0]).split("=")[0] in known or group[0][:1] != "-" for group in typed.after
    ):
        return f"fasttrain run {shlex.join(mask_args(argv))}"
    return typed.separated("run", typed.shared("run", read_environ(), unread=True))


def unknown_option(option: str, words: list[str], command: str = "run") -> FasttrainError:
    """Return the error for an unknown option, with the nearest one and the line with ``--``.

    Args:
        option: The option.
        words: The words after the sub-command.
        command: The sub-command.
    """
    if option in takes(command) and option != "-m":
        return FasttrainError(
            f"{option} is not an option of fasttrain {command}",
            why="SLURM chooses the nodes and their GPUs, and the ranks meet on the first node",
            fix="set their numbers with --nodes and --gpus-per-node",
            slug="slurm-option",
            exit_code=ExitCode.USAGE,
        )
    near = nearest(option, (name for name in takes(command) if name.startswith("--")))
    typed = split(words, command)
    shared = typed.shared(command, read_environ(), unread=True)
    shared |= {"-m": ""} if option == "-m" else {}  # after a script it is the script's
    line = typed.separated(command, shared)
    misspelt = near and typed.misses(option, read_environ())
    return FasttrainError(
        f"{option} is not an option of fasttrain {command}",
        why="options of the script itself go after --"
        + (f"; the nearest of fasttrain's is {near}" if near else ""),
        fix=f"did you mean {near}? if it is the script's: {line}" if misspelt else line,
        slug="unknown-option",
        exit_code=ExitCode.USAGE,
    )
