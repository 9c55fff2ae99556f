"""The seam between the relayed output of a run and whoever shows it."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, Protocol


class Display(Protocol):
    """Shows the script's output, and between its lines how far it is."""

    def write(self, descriptor: int, data: bytes) -> None:
        """Write the script's own bytes to stdout (1) or stderr (2).

        This alone raises an OSError, where they can't be written.
        """

    def progress(self, event: dict[str, Any]) -> None:
        """Show the latest event of rank 0."""

    def tell(self, text: str) -> None:
        """Say one sentence of fasttrain's own."""

    def close(self) -> None:
        """Take the progress line away."""


class PlainDisplay:
    """Passes the script's bytes on and shows no progress."""

    def write(self, descriptor: int, data: bytes) -> None:
        """Write all of ``data``."""
        write_all(descriptor, data)

    def progress(self, event: dict[str, Any]) -> None:
        """Show nothing."""

    def tell(self, text: str) -> None:
        """Write a line to stderr, wherever the script's own may stand."""
        with suppress(OSError):  # nobody reads it, or stderr is closed
            write_all(2, f"fasttrain: {text}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Nothing was drawn."""


class QuietDisplay(PlainDisplay):
    """Passes the script's bytes on and says nothing."""

    def tell(self, text: str) -> None:
        """Say nothing."""


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, however little the descriptor takes at once."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
