"""What a call of a model does beside its result that must not be repeated for a comparison."""

from __future__ import annotations

import csv
import io
import logging
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.shim.data_parallel.split.surroundings import SideEffectWatch

LOGGER = logging.getLogger("of a model")
LOGGER.propagate = False
LOGGER.addHandler(logging.StreamHandler(io.StringIO()))


def seen(act: Callable[[], Any]) -> str:
    watch = SideEffectWatch()
    with watch:
        act()
    return watch.seen


def in_a_thread(act: Callable[[], Any]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (lambda: sys.stdout.write("x"), "it prints"),
        (lambda: LOGGER.error("x"), "it logs"),
        (lambda: LOGGER.debug("x"), ""),
        (lambda: in_a_thread(lambda: LOGGER.error("x")), ""),
    ],
)
def test_words(act: Callable[[], Any], what: str) -> None:
    assert seen(act) == what


def test_a_warning_is_not_taken_for_a_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "showwarning", lambda *_: sys.stderr.write("UserWarning"))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert seen(lambda: warnings.warn("deprecated", stacklevel=1)) == "it shows a warning"


@pytest.mark.parametrize(
    ("act", "written"),
    [
        (lambda path, text, data: text.write("x"), True),
        (lambda path, text, data: csv.writer(text).writerow([1]), True),
        (lambda path, text, data: print("x", file=text), True),
        (lambda path, text, data: pickle.dump(1, data), True),
        (lambda path, text, data: torch.save(torch.ones(1), data), True),
        (lambda path, text, data: torch.save(torch.ones(1), path), True),
        (lambda path, text, data: path.write_text("x"), True),
        (lambda path, text, data: path.open("ab").close(), True),
        (lambda path, text, data: path.read_text(), False),
        (lambda path, text, data: in_a_thread(lambda: text.write("x")), False),
        (lambda path, text, data: io.StringIO().write("x"), False),
    ],
)
def test_files(tmp_path: Path, act: Callable[..., Any], written: bool) -> None:
    path = tmp_path / "log"
    path.write_text("there")
    with (tmp_path / "text").open("w") as text, (tmp_path / "data").open("wb") as data:
        assert seen(lambda: act(path, text, data)) == ("it writes to a file" if written else "")
        text.write("after")
        assert "write" in dir(text)
