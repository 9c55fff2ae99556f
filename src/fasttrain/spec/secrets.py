"""Which variables hold secrets, and what is shown in their place."""

from __future__ import annotations

import re

MASK = "***"

# JWT: SLURM_JWT is how SLURM knows its users.
_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|JWT", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Say whether a variable's name tells of a secret, such as ``HF_TOKEN``."""
    return bool(_NAME.search(name))
