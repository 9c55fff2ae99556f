"""Callbacks behind the import of one module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fasttrain.shim.process.import_hook import after_import

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return what writes a module that can be imported for the time of a test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])

    def write(name: str, text: str) -> None:
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    return write


def test_the_callback_gets_the_finished_module_once(write: Write) -> None:
    write("hooked_one", "value = 1\n")
    seen: list[ModuleType] = []
    before = len(sys.meta_path)
    after_import("hooked_one", seen.append)
    module = importlib.import_module("hooked_one")
    importlib.import_module("hooked_one")
    assert seen == [module]
    assert module.value == 1
    assert len(sys.meta_path) == before
    assert "exec_module" not in vars(module.__loader__)


def test_other_modules_are_left_alone(write: Write) -> None:
    write("hooked_two", "")
    write("not_hooked", "")
    seen: list[ModuleType] = []
    forget = after_import("hooked_two", seen.append)
    importlib.import_module("not_hooked")
    assert seen == []
    forget()
    importlib.import_module("hooked_two")
    assert seen == []


def test_a_failed_import_fails_as_ever_and_can_be_tried_again(write: Write) -> None:
    write("hooked_three", "raise ValueError('not yet')\n")
    seen: list[ModuleType] = []
    after_import("hooked_three", seen.append)
    with pytest.raises(ValueError, match="not yet"):
        importlib.import_module("hooked_three")
    assert seen == []
    write("hooked_three", "value = 2  # of another length than before\n")
    module = importlib.import_module("hooked_three")
    assert seen == [module]
    assert module.value == 2


def test_a_module_that_is_there_already_is_given_at_once(write: Write) -> None:
    write("hooked_four", "")
    module = importlib.import_module("hooked_four")
    seen: list[ModuleType] = []
    after_import("hooked_four", seen.append)
    assert seen == [module]


def test_a_module_that_does_not_exist_is_missing_as_ever(write: Write) -> None:
    write("hooked_five", "")
    after_import("hooked_absent", lambda _: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked_absent")
