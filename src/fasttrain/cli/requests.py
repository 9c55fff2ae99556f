"""The arguments and options of ``run``, ``tune`` and ``slurm``, declared once.

typer's parameters are made from them, and so is the list of flags by which fasttrain tells its own
words on a command line from the script's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import typer
import typer.core
from typer.models import OptionInfo

from fasttrain.config.environ import read_environ
from fasttrain.config.options import OptionSpec

# Make typer's commands from the places that declare options: request classes and `Settings`.
#
# Light on purpose: ``fasttrain --help`` imports it.


class GroupedCommand(typer.core.TyperCommand):
    """Lists the options in ``--help`` under the headings of the table.

    typer's own headings need rich's, which imports a Markdown parser and a highlighter: that takes
    longer than all the rest of ``--help``.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section per heading, those without a heading first."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                heading = getattr(parameter, "rich_help_panel", None) or "Options"
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            # Bold on a terminal; click strips the style from other output.
            plain = read_environ().get("NO_COLOR")
            with formatter.section(heading if plain else typer.style(heading, bold=True)):
                formatter.write_dl(records)


def with_options(
    command: Callable[..., Any], request: type, specs: Sequence[OptionSpec] = ()
) -> Callable[..., Any]:
    """Return a command whose parameters are declared elsewhere; it gets them as ``**given``.

    Args:
        command: The command. Its only other parameter may be typer's context.
        request: A dataclass; each field that is annotated for typer is an argument or an option.
        specs: Options of the table. Each is None if it was not given, because the defaults are the
            table's, not typer's.
    """
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    parameters = [*own, *_declared(request), *map(_parameter, specs)]

    @functools.wraps(command)
    def with_all(*args: Any, **kwargs: Any) -> Any:
        return command(*args, **kwargs)

    # On a wrapper: the signature of the command itself could be set only once.
    with_all.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_all.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_all


def declared_flags(request: type) -> dict[str, bool]:
    """Return the flags that a request declares, each with True if a value follows."""
    flags: dict[str, bool] = {}
    for parameter in _declared(request):
        kind, declared = get_args(parameter.annotation)
        if isinstance(declared, OptionInfo):
            # Inside Annotated, typer.Option takes the first flag for the default; typer itself
            # corrects that when it makes the command.
            named = (declared.default, *(declared.param_decls or ()))
            given = [flag for flag in named if isinstance(flag, str)]
            names = given or [f"--{parameter.name.replace('_', '-')}"]
            flags |= dict.fromkeys(names, kind is not bool)
    return flags


def _declared(request: type) -> list[inspect.Parameter]:
    hints = get_type_hints(request, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(request)
        if get_origin(hints[field.name]) is Annotated
    ]


def _parameter(spec: OptionSpec) -> inspect.Parameter:
    declarations = [spec.flag]
    kind: Any = str | None
    settings: dict[str, Any] = {"metavar": spec.metavar or "|".join(spec.choices) or "TEXT"}
    if spec.kind == "bool":
        declarations = [f"{spec.flag}/--no-{spec.flag.removeprefix('--')}"]
        kind, settings = bool | None, {}
    elif spec.kind == "list":
        kind = list[str] | None
    elif spec.choices:
        settings["autocompletion"] = lambda: list(spec.choices)
    option = typer.Option(
        *declarations,
        help=spec.help + (f" (default: {spec.default})" if spec.choices else ""),
        rich_help_panel=spec.panel,
        show_default=False,
        **settings,
    )
    return inspect.Parameter(
        spec.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


# The arguments and options of ``run``, ``tune`` and ``slurm``, declared once.


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The arguments and options that ``run``, ``tune`` and ``slurm`` share.

    Attributes:
        command: Name of the sub-command.
        words: Words without a dash: the script and its own arguments.
        passed_on: Words after ``--``.
        typed: All words, as they were typed.
        flags: Options of `Settings`, and on SLURM of `SlurmSettings`; None if not given.
    """

    command: ClassVar[str] = "run"

    words: list[str] | None = None
    passed_on: tuple[str, ...]
    typed: tuple[str, ...]
    module: Annotated[
        str | None, typer.Option("-m", metavar="MODULE", help="Run a module, as python -m does.")
    ] = None
    no_python: Annotated[
        bool, typer.Option("--no-python", help="SCRIPT is any command; no lever reaches it.")
    ] = False
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Configuration file (default: fasttrain.yaml)."),
    ] = None
    preset: Annotated[
        str | None, typer.Option(metavar="exact|fast|max", help="A named set of options.")
    ] = None
    flags: Mapping[str, Any]


ScriptAndArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT [ARGS]... [-- ARGS...]",
        help="The training script and its own arguments; those with a dash go after --.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest(CommandLine):
    """The arguments and options of ``fasttrain run``, but for those of `Settings`."""

    words: ScriptAndArguments = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan as a shell script; start nothing.")
    ] = False
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Print every decision with reason and source; start nothing."
        ),
    ] = False
    prove: Annotated[
        bool,
        typer.Option(
            "--prove",
            help="Compare losses and speed with those of plain python in 200 steps, or --max-steps;"
            " keep nothing of it.",
        ),
    ] = False
    keep_writes: Annotated[
        bool,
        typer.Option(
            "--keep-writes", help="With --prove: let all runs that it compares write their files."
        ),
    ] = False
    json: Annotated[bool, typer.Option("--json", help="Print the plan or the receipt as JSON.")] = (
        False
    )
    machine: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Plan for a described machine (with --dry-run)."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest(CommandLine):
    """The arguments and options of ``fasttrain tune``, but for those of `Settings`."""

    command: ClassVar[str] = "tune"

    words: ScriptAndArguments = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan as a shell script; start nothing.")
    ] = False
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="How long to compare: 90s, 5m or 1h.")
    ] = "5m"
    keep_writes: Annotated[
        bool,
        typer.Option(
            "--keep-writes", help="Let the script write its files; else they are thrown away."
        ),
    ] = False
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest(CommandLine):
    """The arguments and options of ``fasttrain slurm``, but for those of the two tables."""

    command: ClassVar[str] = "slurm"

    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT] [ARGS]... [-- ARGS...]",
            help="The training script (or that of fasttrain.yaml) and its own arguments.",
            show_default=False,
        ),
    ] = None
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the job's end; exit as the script did.")
    ] = False
    follow: Annotated[
        bool, typer.Option("--follow", help="As --wait, and show rank 0's output and the state.")
    ] = False
    check: Annotated[
        bool, typer.Option("--check", help="Find what would fail after hours; send nothing.")
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script; send nothing.")
    ] = False
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False
