import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.config.options import BY_NAME
from fasttrain.config.resolve import Resolved, resolve
from fasttrain.config.yaml_file import read_yaml
from fasttrain.model.errors import ExitCode, FasttrainError

pytestmark = pytest.mark.matrix

PIECES = [
    *"-?:,[]{}#&*!|>'\"%@`\\ \n\t~=<\x00\x85\u2028\ufeff\ud7ff0aé",
    *("  ", "- ", ": ", "? ", "\n  ", "---\n", "...\n", "%YAML 1.1\n", "%TAG ! x\n", "<<: ", "*a"),
    *("&a ", "!!python/name:os.system ", "!!binary ", "\\U", "\\x0", "FFFFFFFF", "null", "off"),
    *("1:30", "2026-01-01", "0o7", ".inf", "script: ", "args: ", "preset: ", "A=1", "bf16"),
    *(f"{name}: " for name in BY_NAME),
]
YAMLISH = st.lists(st.sampled_from(PIECES), max_size=40).map("".join).map(str.encode)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "fasttrain.yaml"


def outcome(path: Path) -> Resolved | FasttrainError:
    try:
        return resolve({}, environ={}, cwd=path.parent)
    except FasttrainError as error:
        return error


def check(path: Path, data: bytes) -> None:
    """Nothing but the two documented ends, and every text fit for a process's argv."""
    path.write_bytes(data)
    result = outcome(path)
    if isinstance(result, FasttrainError):
        assert result.exit_code is ExitCode.CONTRADICTION
        assert "fasttrain.yaml:" in result.what
    else:
        args = [text for file in result.with_args for text in file.args]
        for text in [*args, *result.settings.env.value, result.script or ""]:
            assert b"\0" not in text.encode()


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=200))
def test_random_bytes(path: Path, data: bytes):
    check(path, data)


@settings(max_examples=150, deadline=None)
@given(data=YAMLISH)
def test_random_yaml_like_text(path: Path, data: bytes):
    check(path, data)


@settings(max_examples=150, deadline=None)
@given(
    key=st.sampled_from([*BY_NAME, "script", "args", "preset"]),
    value=st.sampled_from(PIECES) | st.text(max_size=10),
    rest=YAMLISH,
)
def test_random_values_of_known_keys(path: Path, key: str, value: str, rest: bytes):
    with contextlib.suppress(UnicodeEncodeError):
        check(path, f"{key}: {value}\n".encode() + rest)


@settings(max_examples=150, deadline=None)
@given(args=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), max_size=5))
def test_arguments_arrive_whole(path: Path, args: list[str]):
    quoted = (argument.replace("\\", "\\\\").replace('"', '\\"') for argument in args)
    escaped = (
        "".join(c if " " <= c <= "~" else f"\\U{ord(c):08x}" for c in text) for text in quoted
    )
    path.write_text("args: [" + ", ".join(f'"{text}"' for text in escaped) + "]\n")
    assert list(read_yaml(path).args) == args
