"""Who decided, where it was not a person."""

from __future__ import annotations

from typing import Any

from fasttrain.model.decision import Setting, Source, SourceKind

BUILT_IN = Source(SourceKind.DEFAULT, "default")
CPU_CORES = Source(SourceKind.MACHINE, "CPU cores")
DEVICES = Source(SourceKind.MACHINE, "devices")
SLURM = Source(SourceKind.MACHINE, "SLURM")
TORCH = Source(SourceKind.MACHINE, "torch")


def asked(setting: Setting[Any]) -> str:
    """Give the reason of a value that a person named, or that nobody did."""
    return f"asked for by {setting.source}" if setting.source.explicit else "the default"
