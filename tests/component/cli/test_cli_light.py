"""The launcher's side never imports torch, which would cost seconds before anything is shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = """
import sys
from fasttrain.cli.app import main
code = main(sys.argv[1:])
heavy = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy"})
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("--version",),
        ("run", "--help"),
        ("run", "train.py", "--dry-run", "--compile", "default"),
        ("run", "train.py", "--explain", "--json"),
        ("run", "train.py", "--quiet"),
    ],
    ids=" ".join,
)
def test_torch_is_not_imported(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text("")
    argv = [sys.executable, "-c", CHECK, *words]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
