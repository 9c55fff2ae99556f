"""What a worker writes down of the exception that ends it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.model.codec import loads
from fasttrain.model.crash import Failure
from fasttrain.shim.script import NOT_RECORDED, _as_the_script, recorder


def recorded(folder: Path, raise_it: Any) -> Failure:
    record = recorder(str(folder), 3)
    try:
        raise_it()
    except BaseException as error:  # noqa: BLE001
        record(error)
    path = folder / "failure-3.json"
    assert path.stat().st_mode & 0o777 == 0o600
    return loads(Failure, path.read_bytes())


def test_exception_with_what_led_to_it(tmp_path: Path) -> None:
    def fail() -> None:
        try:
            Path("no-such-file").read_text()
        except OSError as error:
            raise RuntimeError("could not load") from error

    before_ns, started_ns = time.time_ns(), time.monotonic_ns()
    failure = recorded(tmp_path, fail)
    assert before_ns <= failure.time_ns <= time.time_ns()
    assert started_ns <= failure.monotonic_ns <= time.monotonic_ns()
    assert (failure.rank, failure.pid, failure.exit_code) == (3, os.getpid(), 1)
    last, first = failure.raised
    assert (last.name, last.message) == ("RuntimeError", "could not load")
    assert last.frames[-1].function == "fail"
    assert last.frames[-1].source == 'raise RuntimeError("could not load") from error'
    assert first.kinds[:2] == ("builtins.FileNotFoundError", "builtins.OSError")
    assert (first.errno, first.subject) == (2, "no-such-file")


@pytest.mark.parametrize(
    ("code", "expected"),
    [(3, 3), (-1, 255), (259, 3), (True, 1), ("a text", 1), (2**70, 255)],
)
def test_exit_codes_are_those_of_python(tmp_path: Path, code: Any, expected: int) -> None:
    assert recorded(tmp_path, lambda: sys.exit(code)).exit_code == expected


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        (None, "well"),
        (0, "well"),
        (False, "well"),
        (256, "well"),
        (2**70, "badly"),
        (0.0, "badly"),
        (torch.tensor([0.5, 0.4]), "badly"),
        (torch.tensor(0), "badly"),
    ],
    ids=repr,
)
def test_what_a_main_returns_as_the_exit_code(code: Any, ended: str) -> None:
    told: list[str] = []
    with pytest.raises(SystemExit) as end:
        _as_the_script(
            lambda: sys.exit(code), lambda: told.append("well"), lambda _: told.append("badly")
        )
    assert (told, end.value.code is code) == ([ended], True)


def test_an_interrupt_ends_python_by_its_signal(tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    assert recorded(tmp_path, fail).exit_code == -2


def test_a_suppressed_context_is_none(tmp_path: Path) -> None:
    def fail() -> None:
        try:
            {}["key"]
        except KeyError:
            raise ValueError("own words") from None

    assert [raised.name for raised in recorded(tmp_path, fail).raised] == ["ValueError"]


def test_secrets_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    monkeypatch.setattr(sys, "argv", ["train.py", "--api-key", "from-flag"])

    def fail() -> None:
        raise ValueError("hf_abcdef and from-flag")

    recorded(tmp_path, fail)
    text = (tmp_path / "failure-3.json").read_text()
    assert "*** and ***" in text
    assert "hf_abcdef" not in text
    assert "from-flag" not in text


def test_a_deep_stack_and_a_long_message_are_cut(tmp_path: Path) -> None:
    def fail(depth: int = 200) -> None:
        if depth:
            fail(depth - 1)
        raise ValueError("x" * 100_000)

    (raised,) = recorded(tmp_path, fail).raised
    assert len(raised.frames) == 50
    assert raised.frames[-1].source.startswith("raise ValueError")
    assert len(raised.message) == 4000


def test_an_exception_that_cannot_be_told(tmp_path: Path) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    def fail() -> None:
        raise MuteError

    assert recorded(tmp_path, fail).raised[0].message == "<exception str() failed>"


def test_a_directory_that_is_gone_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder(str(tmp_path / "gone"), 0)(ValueError("x"))
    assert NOT_RECORDED in capsys.readouterr().err
