"""Whether torch says that it compiles, to all code that runs meanwhile."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch._dynamo import convert_frame

from fasttrain.shim.hooks.dynamo import tell_of_compilation


def told(*_: Any) -> bool:
    return bool(torch.compiler.is_compiling())


def fails(*_: Any) -> None:
    raise ValueError


def test_an_older_torch_tells_of_compilation_as_long_as_it_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before torch 2.13 it says so in traced code alone."""
    monkeypatch.delattr(torch.compiler, "_compile_session_context", raising=False)
    monkeypatch.setattr(convert_frame, "_compile", told)
    with ExitStack() as undo:
        tell_of_compilation(undo)
        tell_of_compilation(undo)  # for what the script compiles, and for the lever
        assert (convert_frame._compile(), told()) == (True, False)  # type: ignore[call-arg]
    assert convert_frame._compile is told


def test_a_compilation_that_fails_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.compiler, "_compile_session_context", raising=False)
    monkeypatch.setattr(convert_frame, "_compile", fails)
    with ExitStack() as undo:
        tell_of_compilation(undo)
        with pytest.raises(ValueError):  # noqa: PT011 - its own
            convert_frame._compile()  # type: ignore[call-arg]
        assert not told()
