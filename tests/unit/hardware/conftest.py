"""A recorded machine: files under a temporary root, tools on a PATH of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fasttrain.hardware.host import Host

MakeHost = Callable[..., Host]


@pytest.fixture
def make_host(tmp_path: Path) -> MakeHost:
    """Return a function that lays files and tools out and returns the Host that sees only those."""

    def make(
        files: Mapping[str, str] | None = None,
        *,
        tools: Mapping[str, str] | None = None,
        system: str = "Linux",
        affinity: int = 8,
        **environ: str,
    ) -> Host:
        root, tool_folder = tmp_path / "root", tmp_path / "tools"
        tool_folder.mkdir(exist_ok=True)
        for name, text in (files or {}).items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for name, script in (tools or {}).items():
            path = tool_folder / name
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        environ.setdefault("PATH", str(tool_folder))
        architecture = "arm64" if system == "Darwin" else "x86_64"
        return Host(environ, root, system, architecture, affinity)

    return make
