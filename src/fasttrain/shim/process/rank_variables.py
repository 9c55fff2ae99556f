"""The environment variables in which torchrun passes a worker its rank.

They are hidden from a script that fasttrain makes data-parallel: with them, the script or a library
that it uses might set up ranks of its own, or work on its share of the data only.
"""

from __future__ import annotations

import os

# Source: the documentation of torchrun, torch 2.13, "Environment Variables".
NAMES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip

_hidden: dict[str, str] = {}


def hide() -> None:
    """Remove the variables from the environment."""
    for name in NAMES:
        if name in os.environ:
            _hidden[name] = os.environ.pop(name)


def restore() -> None:
    """Put the variables back, for a script that sets up its ranks itself after all."""
    os.environ.update(_hidden)
    _hidden.clear()


def put(name: str, value: str) -> None:
    """Set one variable; hidden if the others are."""
    (_hidden or os.environ)[name] = value


def get(name: str, default: str = "") -> str:
    """Return the value of one variable, hidden or not."""
    return _hidden.get(name, os.environ.get(name, default))
