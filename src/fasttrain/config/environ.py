"""Read the environment (nothing else reads os.environ) and the FASTTRAIN_* variables in it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fasttrain.config.options import OPTIONS, SLURM_OPTIONS, OptionValue, nearest, parse_setting
from fasttrain.model.attempts import RESTART_COUNT
from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.errors import FasttrainError
from fasttrain.model.hang import HEARTBEATS_VARIABLE
from fasttrain.model.places import RUN_MARK
from fasttrain.model.settings import OPTION_NAMES

PREFIX = "FASTTRAIN_"
CONFIG_VARIABLE = "FASTTRAIN_CONFIG"
PRESET_VARIABLE = "FASTTRAIN_PRESET"
# Set by fasttrain for its workers, and no options: a script may call fasttrain itself.
WORKER_VARIABLES = frozenset({RUN_MARK, RESTART_COUNT, HEARTBEATS_VARIABLE})


def read_environ() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def option_values(
    environ: Mapping[str, str], *, slurm: bool = True
) -> dict[str, Setting[OptionValue]]:
    """Return the options that FASTTRAIN_* variables set; an empty variable sets nothing.

    Args:
        environ: The environment.
        slurm: Whether FASTTRAIN_SLURM_PYTHON counts; it then overrides FASTTRAIN_PYTHON.

    Raises:
        FasttrainError: ``env-option`` for a FASTTRAIN_* variable that is no option;
            ``option-value`` or ``env-value`` for a value that its option doesn't allow.
    """
    by_variable = {spec.env: spec for spec in (*OPTIONS, *SLURM_OPTIONS)}
    others = {CONFIG_VARIABLE, PRESET_VARIABLE} | WORKER_VARIABLES
    settings = {}
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        if variable in others:
            continue
        if variable not in by_variable:
            raise _unknown(variable, [*by_variable, CONFIG_VARIABLE, PRESET_VARIABLE])
        if raw := environ[variable]:
            spec = by_variable[variable]
            # `python` is an option of both tables; on one machine only FASTTRAIN_PYTHON counts.
            if spec.slurm and spec.name in OPTION_NAMES and not slurm:
                continue
            settings[spec.name] = parse_setting(spec, raw, Source(SourceKind.ENV, variable))
    return settings


def _unknown(variable: str, known: list[str]) -> FasttrainError:
    # Compare without the prefix: its ten letters would make any two variables look alike.
    match = nearest(variable.removeprefix(PREFIX), [name.removeprefix(PREFIX) for name in known])
    otherwise = f"unset {variable}; fasttrain run --help lists the options"
    return FasttrainError(
        f"the environment variable {variable} is not an option of fasttrain",
        why="a misspelt option would otherwise be ignored silently",
        fix=f"did you mean {PREFIX}{match}?" if match else otherwise,
        slug="env-option",
    )
