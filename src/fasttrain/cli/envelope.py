"""The one versioned envelope of everything that ``--json`` prints."""

from __future__ import annotations

import json
from typing import Any

from fasttrain import __version__
from fasttrain.model.codec import to_data

ENVELOPE_SCHEMA = 1


def envelope(kind: str, value: Any) -> str:
    """Give JSON text: ``{"schema": 1, "fasttrain": VERSION, "kind": …, "data": …}``."""
    content = {
        "schema": ENVELOPE_SCHEMA,
        "fasttrain": __version__,
        "kind": kind,
        "data": to_data(value),
    }
    return json.dumps(content, indent=2)
