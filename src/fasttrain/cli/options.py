"""Generates the options of a command from the one table in `fasttrain.config.options`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from fasttrain.config.options import OPTIONS, OptionSpec


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all options of `Settings`, in place of its ``**flags``.

    Every option arrives as None when it was not given: defaults are the table's, not typer's.
    """
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    generated = [_parameter(spec) for spec in OPTIONS]
    parameters = [*own, *generated]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


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
        help=spec.help,
        rich_help_panel=spec.panel,
        show_default=str(spec.default) if spec.choices else False,
        **settings,
    )
    return inspect.Parameter(
        spec.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )
