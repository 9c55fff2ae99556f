"""Whose request it is that a library opens a file."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from fasttrain.shim.data_parallel.answers.places import asking


def library(function: str, path: str = "/env/lib/site-packages/library/main.py") -> Any:
    """Return a function that a library has, and that calls what it is given."""
    code = f"def {function}(act, *given):\n    return act(*given)\n"
    names: dict[str, Any] = {}
    exec(compile(code, path, "exec"), names)
    return names[function]


@pytest.mark.parametrize(
    ("function", "log", "users"),
    [
        ("configure", True, True),  # as Hydra does
        ("configure", False, False),  # it may read the file again, as a cache
        ("save_results", False, True),
        ("mimwrite", False, True),  # imageio's, of an animation
    ],
)
def test_a_log_is_the_scripts_although_a_library_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, log: bool, users: bool
) -> None:
    found: list[FrameType | None] = []
    plain = open

    def opens(*args: Any, **kwargs: Any) -> Any:
        found.append(asking(sys._getframe(1)))
        return plain(*args, **kwargs)

    path = tmp_path / "train.log"
    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", opens)
        library(function)(logging.FileHandler if log else opens, path, "w").close()
    (frame,) = found
    assert (frame is not None) is users


@pytest.mark.parametrize(
    ("path", "function", "users"),
    [
        ("onnx/__init__.py", "export", True),
        ("onnx/__init__.py", "register", False),
        ("hub.py", "export", False),  # torch's own files are wrapped where they are written
    ],
)
def test_a_model_that_is_exported_is_the_scripts_file(
    path: str, function: str, users: bool
) -> None:
    torchs = library(function, f"{Path(torch.__file__).parent}/{path}")
    found = library("save", "/env/lib/site-packages/onnx_ir/main.py")
    assert (torchs(found, lambda: asking(sys._getframe(1))) is not None) is users
