"""The installed torch, tried and measured as doctor does it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from fasttrain.doctor import bench
from fasttrain.hardware.interpreter import find_torch
from fasttrain.hardware.torch_trial import try_torch
from fasttrain.model.machine import TorchTrial

# A compiler that is there, on a machine without Python's headers.
NO_COMPILER = """#!/bin/sh
case "$1" in --version|-v) echo "g++ 13.2.0"; exit 0;; esac
echo 'x.cpp:2:10: fatal error: Python.h: No such file or directory' >&2
exit 1
"""


def tried(monkeypatch: pytest.MonkeyPatch, folder: Path, **environ: str) -> TorchTrial:
    """Try it, and see that nothing stays in its temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    found = try_torch(
        sys.executable, {**os.environ, "OMP_NUM_THREADS": "1", **environ}, timeout_s=240
    )
    assert list(folder.iterdir()) == []
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "temporary"
    path.mkdir()
    return path


def test_the_installed_torch(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("g++ is missing")
    # What would stop a real compilation from being tried is set aside.
    found = tried(monkeypatch, folder, TORCHDYNAMO_DISABLE="1")
    assert found.imported.state == "ok", found.imported
    assert found.version == find_torch().version
    assert "gloo" in found.backends
    assert found.compiled.state == "ok", found.compiled
    assert found.all_reduced.state == "ok", found.all_reduced
    assert found.compiled.took_s > 0


def test_a_compiler_that_fails(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(NO_COMPILER)
    compiler.chmod(0o755)
    found = tried(monkeypatch, folder, CXX=str(compiler), GLOO_SOCKET_IFNAME="nowhere0")
    assert found.imported.state == "ok"
    assert found.compiled.state == "failed"
    assert "Python.h" in found.compiled.message
    assert found.all_reduced.state == "failed"
    assert "gloo: " in found.all_reduced.message
    assert "nowhere0" in found.all_reduced.message


def test_the_processor_is_measured(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(bench, "LONGEST_S", 0.05)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    made = list(bench.measure(sys.executable, environ, [], str(folder)))
    assert [item for item in made if item.problem or item.value <= 0] == []
    assert {"matmul fp32", "matmul bf16", "memory copy", "disk read"} <= {i.what for i in made}
    assert list(folder.iterdir()) == []
    (verdict,) = bench.verdicts(made)
    assert verdict.device == "cpu"
