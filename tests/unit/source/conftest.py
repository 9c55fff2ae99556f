"""Programs laid out in a directory of the test's own, and what is read from them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import pytest

from fasttrain.model.plan import ScriptFacts, Target, TargetKind
from fasttrain.source.read import read_script

Lay = Callable[[Mapping[str, str | bytes]], None]
Read = Callable[..., ScriptFacts]
Seen = Callable[..., tuple[str, str] | None]


@pytest.fixture
def lay(tmp_path: Path) -> Lay:
    """Write files below the test's directory."""

    def write(files: Mapping[str, str | bytes]) -> None:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    return write


@pytest.fixture
def read(tmp_path: Path, lay: Lay) -> Read:
    """Read ``train.py``, or what is named, in a directory of the given files.

    Installed packages are looked for in ``installed``, folders below that directory.
    """

    def run(
        files: Mapping[str, str | bytes],
        name: str = "train.py",
        kind: TargetKind = "script",
        cwd: str = ".",
        installed: tuple[str, ...] = (),
        **environ: str,
    ) -> ScriptFacts:
        lay(files)
        folders = [str(tmp_path / folder) for folder in installed]

        def locate(module: str) -> ModuleSpec | None:
            return PathFinder.find_spec(module, folders)

        before = set(sys.modules)
        facts = read_script(Target(kind, name), os.path.normpath(tmp_path / cwd), environ, locate)
        new = {
            module for module in set(sys.modules) - before if not module.startswith("encodings.")
        }
        assert new == set(), "a module was imported"
        return facts

    return run


@pytest.fixture
def seen(read: Read) -> Seen:
    """Return what was seen and where, or None; the script may be given as its bare text."""

    def run(files: Mapping[str, str | bytes] | str, **how: object) -> tuple[str, str] | None:
        facts = read({"train.py": files} if isinstance(files, str) else files, **how)
        assert facts.unread == ()
        sign = facts.handles_ranks
        return (sign.what, sign.where) if sign else None

    return run
