"""No shell stands between fasttrain and what it starts: arguments arrive whole."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fasttrain

PACKAGE = Path(fasttrain.__file__).parent
SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "/bin/sh", "/bin/bash"}
# Each hands a text to /bin/sh.
BY_SHELL = {"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell"}


def shells(tree: ast.AST) -> Iterator[int]:
    """Return the lines that start a shell, or could."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("platform"), attr="system")):
                pass
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in BY_SHELL:
                yield node.lineno
            case ast.keyword(arg="shell", value=value) if not (
                isinstance(value, ast.Constant) and value.value is False
            ):
                yield value.lineno
            case ast.List(elts=[ast.Constant("bash"), ast.Constant("-n"), *_]):
                pass  # it reads a script, and runs none of it
            case ast.List(elts=[ast.Constant(value=str(word)), *_]) if word in SHELLS:
                yield node.lineno
            case ast.Tuple(elts=[ast.Constant(value=str(word)), ast.Constant("-c"), *_]) if (
                word in SHELLS
            ):
                yield node.lineno


@pytest.mark.parametrize(
    "code",
    [
        "os.system('ls')",
        "popen('ls')",
        "subprocess.run(words, shell=True)",
        "subprocess.run(words, shell=chosen)",
        "subprocess.getoutput('ls')",
        "run(['bash', '-c', text])",
        "os.execvp('sh', ('sh', '-c', text))",
    ],
)
def test_a_shell_is_seen(code: str) -> None:
    assert list(shells(ast.parse(code))) == [1]


def test_argument_lists_are_none() -> None:
    code = "subprocess.run(['ls', 'bash'], shell=False); run(('sh', 'is', 'a word')); a.shell()"
    assert list(shells(ast.parse(code))) == []


def test_nothing_of_fasttrain_starts_a_shell() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in shells(ast.parse(path.read_bytes()))
    ]
    assert found == []
