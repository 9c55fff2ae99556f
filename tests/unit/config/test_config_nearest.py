"""Which known word a misspelt one is taken for."""

from __future__ import annotations

from fasttrain.config.options import nearest


def test_an_option_is_near_by_its_letters_and_not_by_its_dashes() -> None:
    options = ["--amp", "--compile", "--gpus"]
    assert nearest("--gamma", options) is None
    assert nearest("--gpu", options) == "--gpus"
    assert nearest("--Compille", options) == "--compile"
