from __future__ import annotations

from typing import Any

import pytest

from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.errors import FasttrainError
from fasttrain.planning.slurm_values import check_folder, plain, signal_and_lead, time_min


def flag(value: Any) -> Setting[Any]:
    return Setting(value, Source(SourceKind.FLAG, "--flag"))


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        (None, None),
        ("30", 30),
        ("30:00", 30),
        ("30:01", 31),
        ("2:00:00", 120),
        ("1-0", 24 * 60),
        ("1-12:30", 36 * 60 + 30),
        ("1-12:30:30", 36 * 60 + 31),
        ("0:00:30", 1),
    ],
)
def test_times_in_slurms_forms(text: str | None, minutes: int | None) -> None:
    assert time_min(flag(text)) == minutes


@pytest.mark.parametrize("text", ["0", "0:00", "-5", "1h", "1-2-3", "infinite", "1:2:3:4", "९"])
def test_other_times(text: str) -> None:
    with pytest.raises(FasttrainError) as caught:
        time_min(flag(text))
    assert (caught.value.slug, caught.value.exit_code) == ("slurm-time", 2)


@pytest.mark.parametrize(
    ("text", "found"),
    [("USR2@90", ("USR2", 90)), ("USR1", ("USR1", 90)), ("SIGUSR1@600", ("USR1", 600))],
)
def test_signals(text: str, found: tuple[str, int]) -> None:
    assert signal_and_lead(flag(text)) == found


@pytest.mark.parametrize("text", ["TERM@90", "B:USR2@90", "USR2@", "USR2@70000", "usr2"])
def test_other_signals(text: str) -> None:
    with pytest.raises(FasttrainError) as caught:
        signal_and_lead(flag(text))
    assert caught.value.slug == "slurm-signal"


@pytest.mark.parametrize("text", ["a b", "a'b\"c", "$(x); y", "é", "100%"])
def test_values_that_arrive_whole(text: str) -> None:
    assert plain("--comment", text) == text


@pytest.mark.parametrize("path", ["/a b/c", "/it's/$x;*[é]", "/100%", "/50%_of", "/a%20c"])
def test_folders_that_slurm_takes(path: str) -> None:
    check_folder(path)


@pytest.mark.parametrize("path", ["/a\\b", "/%u", "/x%jy", "/%%", "/%5a", "/a\nb"])
def test_folders_in_which_the_job_would_fail_silently(path: str) -> None:
    with pytest.raises(FasttrainError) as caught:
        check_folder(path)
    assert caught.value.slug == "slurm-folder"
