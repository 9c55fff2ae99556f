"""A script sees the same argv, ``__main__``, path, streams and surroundings as under python."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

NOT_UTF8 = b"caf\xe9 \xff".decode(errors="surrogateescape")
AWKWARD = (
    "a b", "it's", '"quoted"', "two\nlines", "a;b", "$(echo no)", "`echo no`", "*", "~", "\\", "",
    "--", "--amp", "--quiet", "-m", "-h", "--lr=1", "\t", "é", NOT_UTF8,
)  # fmt: skip


@pytest.fixture
def surroundings(tmp_path: Path, programs: Path) -> Path:
    """A directory with the program in it, below others and behind links."""
    folder = tmp_path / "project" / "sub"
    folder.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(programs / "identity.py", folder)
    (folder / "near.py").symlink_to("identity.py")
    (tmp_path / "far.py").symlink_to(folder / "identity.py")
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    return tmp_path


def test_arguments_arrive_whole(same_as_python: Any) -> None:
    plain = same_as_python("identity.py", *AWKWARD)
    assert b"caf\\xe9 \\xff" in plain.stdout


@pytest.mark.parametrize(
    ("cwd", "name"),
    [
        ("project/sub", "identity.py"),
        ("project/sub", "./identity.py"),
        ("project/sub", "near.py"),
        ("project", "sub//identity.py"),
        ("elsewhere", "../project/./sub/identity.py"),
        ("elsewhere", "../far.py"),
        ("elsewhere", "../link/identity.py"),
        ("link", "identity.py"),
        ("elsewhere", "ABSOLUTE/elsewhere/../far.py"),
    ],
)
def test_a_script_is_found_by_any_path(
    same_as_python: Any, surroundings: Path, cwd: str, name: str
) -> None:
    name = name.replace("ABSOLUTE", str(surroundings))
    plain = same_as_python(name, "x", cwd=surroundings / cwd)
    assert b"argv [b'" + name.encode() + b"', b'x']" in plain.stdout


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONSAFEPATH": "1"},
        {"PYTHONUNBUFFERED": "1"},
        {"PYTHONOPTIMIZE": "2"},
        {"PYTHONWARNINGS": "error"},
        {"PYTHONIOENCODING": "latin-1:replace"},
        {"PYTHONUTF8": "0", "LC_ALL": "C"},
        {"PYTHONPATH": "", "OMP_NUM_THREADS": "7"},
    ],
    ids=lambda env: next(iter(env)),
)
def test_variables_of_python_mean_the_same(
    same_as_python: Any, fasttrain: Any, env: dict[str, str]
) -> None:
    if "PYTHONPATH" in env:
        env = {**env, "PYTHONPATH": fasttrain.environ.get("PYTHONPATH", "") + ":/nowhere"}
    same_as_python("identity.py", env=env)


def test_a_script_knows_its_own_source_encoding(same_as_python: Any, tmp_path: Path) -> None:
    text = "# -*- coding: latin-1 -*-\nname = 'caf\xe9'\nprint(ascii(name))\nraise ValueError(name)"
    (tmp_path / "latin.py").write_bytes(text.encode("latin-1"))
    plain = same_as_python("latin.py", cwd=tmp_path, env={"PYTHONUTF8": "1"})
    assert plain.stdout == b"'caf\\xe9'\n"


def test_byte_order_mark_and_carriage_returns(same_as_python: Any, tmp_path: Path) -> None:
    (tmp_path / "dos.py").write_bytes(b"\xef\xbb\xbfprint(1)\r\nx = '''\r\n'''\r\nprint(repr(x))")
    assert same_as_python("dos.py", cwd=tmp_path).stdout == b"1\n'\\n'\n"


def test_nothing_is_inherited_from_our_own_source(same_as_python: Any, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("def f(x: int) -> None: ...\nprint(f.__annotations__)")
    assert b"<class 'int'>" in same_as_python("plain.py", cwd=tmp_path).stdout


@pytest.mark.parametrize("how", ["chdir", "delete", "path", "modules"])
def test_a_script_that_changes_its_surroundings(
    same_as_python: Any, programs: Path, tmp_path: Path, how: str
) -> None:
    def copy() -> None:
        shutil.copy(programs / "moves.py", tmp_path)
        shutil.copytree(programs / "parcel", tmp_path / "parcel", dirs_exist_ok=True)

    plain = same_as_python("moves.py", how, cwd=tmp_path, prepare=copy)
    assert b"RuntimeError: " + how.encode() in plain.stderr
