"""A warning that falls on a wrapper of the shim's names the user's line instead."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

X = torch.ones(4, 2)
HERE = Path(__file__).name


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect what python would print of warnings."""
    lines: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(
            warnings, "showwarning", lambda *args: lines.append(warnings.formatwarning(*args[:4]))
        )
        yield lines


class Warner(nn.Module):
    """Warns of whoever called it, and of those that called these."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        for level in range(1, 7):
            warnings.warn(f"level {level}", stacklevel=level)
        return self.linear(x)


def test_the_call_of_a_model_is_blamed_and_no_wrapper_of_it(rig: Any, said: list[str]) -> None:
    with rig(amp="bfloat16", optimizer="fused"):
        Warner()(X)
    assert len(said) == 6
    assert not [line for line in said if "fasttrain/shim" in line]
    here = [re.search(rf"{HERE}:\d+: UserWarning: level (\d)\n  (.*)", line) for line in said]
    told = {int(found[1]): found[2] for found in here if found}
    assert told[1] == 'warnings.warn(f"level {level}", stacklevel=level)'
    assert set(told.values()) == {told[1], "Warner()(X)"}
    assert len(told) >= 4, "of the six, torch's own lines are two at most"


def test_formatting_of_the_scripts_own_stays(
    rig: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back at the end

    def own(*_: Any) -> str:
        return "mine"

    with rig(amp="bfloat16"):
        warnings.formatwarning = own
        Warner()(X)
    assert said == ["mine"] * 6
    assert warnings.formatwarning is own


def test_where_an_unclosed_file_was_opened(rig: Any) -> None:
    told = warnings.WarningMessage("unclosed", ResourceWarning, HERE, 1, source=object())
    with rig(amp="bfloat16"):
        text = warnings._formatwarnmsg(told)  # type: ignore[attr-defined]
    assert "Enable tracemalloc" in text, "as plain python says"


def test_with_the_levers_off_nothing_is_changed(rig: Any) -> None:
    def formats() -> Any:
        return warnings._formatwarnmsg_impl  # type: ignore[attr-defined]

    before = formats()
    with rig():
        assert formats() is before
    with rig(amp="bfloat16"):
        assert formats() is not before
    assert formats() is before
