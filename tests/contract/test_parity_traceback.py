"""What a script prints on stderr, tracebacks and warnings, is what python prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ERRORS = {
    "cause": "The above exception was the direct cause",
    "context": "During handling of the above exception",
    "suppressed": "the context is not told",
    "group": "ExceptionGroup: inner (2 sub-exceptions)",
    "cycle": "ValueError: second",
    "notes": "of two lines",
    "thread": "Exception in thread worker",
    "pool": "ZeroDivisionError",
    "coroutine": "in fail",
    "hook": "hook: ZeroDivisionError division by zero from 3 frames",
    "at_exit": "ZeroDivisionError",
    "syntax": 'File "made-up.py", line 2',
    "no_text": "<exception str() failed>",
    "closed_stderr": "",
}


@pytest.mark.parametrize("how", ERRORS)
def test_traceback(same_as_python: Any, how: str) -> None:
    plain = same_as_python("errors.py", how)
    assert ERRORS[how] in plain.stderr.decode()
    assert plain.returncode == {"thread": 0, "at_exit": 0, "closed_stderr": 120}.get(how, 1)


@pytest.mark.parametrize("broken", ["raise RuntimeError('no driver')", "import not_there", "1 +"])
def test_torch_that_fails_to_import(same_as_python: Any, tmp_path: Path, broken: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"import json\n{broken}\n")
    (tmp_path / "train.py").write_text("def load():\n    import torch\n\nload()\n")
    assert b"torch/__init__.py" in same_as_python("train.py", cwd=tmp_path).stderr


def test_warnings(same_as_python: Any) -> None:
    told = same_as_python("warns.py").stderr.decode()
    assert "warns.py:13: DeprecationWarning: use the new one\n  old_function()" in told
    assert "not told" not in told


def test_a_warning_of_the_compiler(same_as_python: Any, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("import sys\nprint(sys.argv is 1, '\\d')\n")
    told = same_as_python("odd.py", cwd=tmp_path).stderr.decode()
    assert "odd.py:2: SyntaxWarning" in told
    strict = same_as_python("odd.py", cwd=tmp_path, env={"PYTHONWARNINGS": "error"})
    assert b"SyntaxError" in strict.stderr


def test_a_warning_as_error(same_as_python: Any) -> None:
    plain = same_as_python("warns.py", env={"PYTHONWARNINGS": "error"})
    assert plain.returncode == 1
    assert b"UserWarning: from the script" in plain.stderr


@pytest.mark.parametrize(
    ("name", "args", "code"),
    [
        ("parcel", (), 0),
        ("parcel.__main__", ("x",), 0),
        ("parcel.part", ("a b",), 0),
        ("parcel.part", ("fail",), 1),
        ("identity", (), 0),
        ("exits", ("259",), 3),
        ("parcel.nothing", (), 1),
        ("nothing", (), 1),
        ("nothing.at.all", (), 1),
        ("broken", (), 1),
        ("parcel.part.deeper", (), 1),
        ("json", (), 1),
        ("sys", (), 1),
        ("parcel/part.py", (), 1),
        (".parcel", (), 1),
    ],
)
def test_module(same_as_python: Any, name: str, args: tuple[str, ...], code: int) -> None:
    assert same_as_python(name, *args, module=True).returncode == code
