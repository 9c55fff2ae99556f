"""The variables by which torchrun tells a worker its rank.

A script that fasttrain makes data-parallel is to believe that it is alone: with these variables
about, it or a library that it uses might take part of the work into its own hands.
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
    """Take them out of the environment."""
    for name in NAMES:
        if name in os.environ:
            _hidden[name] = os.environ.pop(name)


def restore() -> None:
    """Put them back, for a script that asks for its ranks after all."""
    os.environ.update(_hidden)
    _hidden.clear()


def put(name: str, value: str) -> None:
    """Set one, hidden where the others are."""
    (_hidden or os.environ)[name] = value


def get(name: str, default: str = "") -> str:
    """Return the value of one, hidden or not."""
    return _hidden.get(name, os.environ.get(name, default))
