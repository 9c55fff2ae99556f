from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fasttrain.model.errors import FasttrainError, printable


@given(st.text())
def test_printable_is_one_harmless_line(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown.splitlines()) <= 1


def test_an_error_has_three_lines_whatever_a_file_is_called() -> None:
    error = FasttrainError("no\x1b[2J\nfile \udcff", why="a\rb", fix="c\u2028d", slug="slug")
    assert str(error) == (
        "error: no\\x1b[2J\\nfile \\udcff\n  why: a\\rb\n  fix: c\\u2028d        [slug]"
    )
