"""Options of a command, generated from the one table in `fasttrain.config.options`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
import typer.core

from fasttrain.config.environ import read_environ
from fasttrain.config.options import OPTIONS, OptionSpec


class GroupedCommand(typer.core.TyperCommand):
    """Lists the options in ``--help`` under the headings of the table.

    typer's own headings come with rich's, which imports a Markdown parser and a highlighter: that
    takes longer than all the rest of ``--help``.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section per heading, those without one first."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                heading = getattr(parameter, "rich_help_panel", None) or "Options"
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            # Bold on a terminal; what is printed elsewhere is stripped of it.
            plain = read_environ().get("NO_COLOR")
            with formatter.section(heading if plain else typer.style(heading, bold=True)):
                formatter.write_dl(records)


def with_options(
    command: Callable[..., Any], specs: Sequence[OptionSpec] = OPTIONS
) -> Callable[..., Any]:
    """Return a command the options of a table, those of `Settings` by default, for its ``**flags``.

    Every option arrives as None when it was not given: defaults are the table's, not typer's.
    """
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    generated = [_parameter(spec) for spec in specs]
    parameters = [*own, *generated]

    @functools.wraps(command)
    def with_all(*args: Any, **kwargs: Any) -> Any:
        return command(*args, **kwargs)

    # On a wrapper, because a function that was changed could be given its options only once.
    with_all.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_all.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_all


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
