"""Configuration files: sound ones, each with something done to it, and what is no file at all."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from fasttrain.config.options import BY_NAME

ODD = (
    "", " ", "~", "null", "true", "off", "0", "-1", "1e400", ".nan", "0x1F", "1_000", "1:30", "010",
    "9" * 5000, "[]", "{}", "[a, [b]]", "[a, b", "{a: b", "{a: {b: {c: d}}}", "- a", "|", ">-", "'",
    '"', '"\\U0010FFFF"', '"\\UFFFFFFFF"', '"\\ud800"', '"\\0"', '"\\x1b[2J"', "%", "@", "`", "&a",
    "*a", "&a [*a]", "!!python/object/apply:os.system ['touch started']", "!!binary a", "!x y",
    "2026-02-30", "<<", "=", "?", ": :", "#", "a: b", "é", "\u2028", "\x85", "\ufeff", "x" * 9999,
    "train.py", "../train.py", "/proc/self/mem", "fifo", "[--lr, 0.1]", '["", " "]', "exact", "...",
)  # fmt: skip
KEYS = (
    *BY_NAME, "script", "args", "preset", "slurm", "clusters", "ampp", "amp-", "AMP", "", "?", "<<",
    "null", "1", "[a]", "{a: b}", "*a", "&a b", "!x y", '"a\\nb"', "é", "-", "gpus-per-node",
)  # fmt: skip
BOMB = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
LISTED = {"list": "[A=b, C=d]", "bool": "true", "int": "2", "str": "one"}
GOOD = {
    "gpus": "all",
    "nodes": "1",
    "show_ranks": "all",
    "hang_timeout": "off",
    "run_dir": "mine",
    "node_rank": "0",
}


def _sound(name: str) -> str:
    spec = BY_NAME[name]
    return GOOD.get(name) or (spec.choices[0] if spec.choices else LISTED[spec.kind])


def _line(name: str, indent: str = "") -> str:
    return f"{indent}{name}: {_sound(name)}\n"


OF_RUN = [name for name, spec in BY_NAME.items() if not spec.slurm]
_RUN = st.lists(st.sampled_from(OF_RUN), unique=True, max_size=5).map(
    lambda names: "".join(map(_line, names))
)
_SLURM = st.lists(st.sampled_from(list(BY_NAME)), unique=True, max_size=4).map(
    lambda names: "slurm:\n" + "".join(_line(name, "  ") for name in names)
)
_PROFILES = st.lists(st.sampled_from(list(BY_NAME)), unique=True, min_size=1, max_size=3).map(
    lambda names: "  clusters:\n    one:\n" + "".join(_line(name, "      ") for name in names)
)
SOUND = st.builds(
    lambda first, script, slurm, profiles: first + script + slurm + (profiles if slurm else ""),
    _RUN,
    st.sampled_from(["", "script: train.py\n", "script: train.py\nargs: [--lr, 1e-3]\n"]),
    _SLURM | st.just(""),
    _PROFILES | st.just(""),
)


def _change(text: str, how: str, at: int, key: str, value: str) -> str:
    """Return the text with one of its lines changed."""
    lines = text.splitlines(keepends=True) or ["amp: off\n"]
    at %= len(lines)
    line = lines[at]
    indent = line[: len(line) - len(line.lstrip())]
    name = line.strip().partition(":")[0]
    lines[at] = {
        "rename": f"{indent}{key}:{line.partition(':')[2]}",
        "value": f"{indent}{name}: {value}\n",
        "both": f"{indent}{key}: {value}\n",
        "twice": line * 2,
        "deeper": f"{indent}{name}:\n{indent}   {key}: {value}\n",
        "tab": f"\t{line}",
        "cut": line[: len(line) // 2],
        "raw": f"{value}\n",
        "no space": line.replace(": ", ":"),
    }[how]
    return "".join(lines)


_CHANGED = st.builds(
    _change,
    SOUND,
    st.sampled_from(["rename", "value", "value", "value", "both", "twice", "deeper", "tab", "cut",
                     "raw", "no space"]),
    st.integers(0, 20),
    st.sampled_from(KEYS),
    st.sampled_from(ODD) | st.text(max_size=5),
)  # fmt: skip
_TWICE = st.builds(
    _change, _CHANGED, st.sampled_from(["value", "rename"]), st.integers(0, 20),
    st.sampled_from(KEYS), st.sampled_from(ODD),
)  # fmt: skip


def _as_utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


_WHOLE: list[Any] = [
    b"", b"\n", b"#", b"---\n---\n", b"...", b"\xef\xbb\xbfamp: off\n", b"\xff\xfea\0",
    BOMB.encode(),
    "amp: off\n".encode("utf-16"), "amp: off\n".encode("utf-32"), "job_name: é\n".encode("latin-1"),
    b"[" * 10_000, b"{a: " * 5_000, b"- " * 10_000, b"a:\n " * 3_000, b"amp: off\n" * 30_000,
    b"args: [" + b"x, " * 50_000 + b"]", b"env: {A: " + b"x" * (1 << 20) + b"}", b"#" * (2 << 20),
    b"\0" * 100, b"amp: off\r\n", b"amp: off\rcompile: off\r", b"amp: bf16 # \xe9", b"?" * 9_999,
    b"%YAML 9.9\n---\namp: off\n", b"%TAG ! !!\n---\n!x y", b"\x80", b"amp: \xed\xa0\x80", b"&a *a",
]  # fmt: skip
CONTENTS = st.one_of(
    SOUND.map(_as_utf8),
    _CHANGED.map(_as_utf8),
    _TWICE.map(_as_utf8),
    st.sampled_from(_WHOLE),
    st.binary(max_size=60),
)
