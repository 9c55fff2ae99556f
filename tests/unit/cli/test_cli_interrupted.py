"""Ctrl-C before the command line has begun."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from fasttrain.__main__ import main


class Interrupts:
    """Finds no module: ctrl-C arrives while the command line is imported."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "fasttrain.cli.app":
            raise KeyboardInterrupt


def test_it_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: 0)  # no terminal
    monkeypatch.delitem(sys.modules, "fasttrain.cli.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert capfd.readouterr() == ("", "")
