import string
from typing import get_args

import pytest

from fasttrain.config.options import BY_NAME, OPTIONS, nearest, suggest
from fasttrain.model.levers import AmpChoice
from fasttrain.model.settings import OPTION_NAMES, Settings


def test_every_field_of_settings_is_an_option_in_order():
    assert tuple(spec.name for spec in OPTIONS) == OPTION_NAMES


@pytest.mark.parametrize(
    ("name", "kind", "optional"),
    [
        ("gpus", "str", True),
        ("amp", "str", False),
        ("nproc_per_node", "int", True),
        ("max_restarts", "int", False),
        ("debug", "bool", False),
        ("env", "list", False),
        ("run_dir", "str", True),
    ],
)
def test_kinds_follow_the_annotations(name, kind, optional):
    assert (BY_NAME[name].kind, BY_NAME[name].optional) == (kind, optional)


def test_spellings_choices_and_metadata():
    spec = BY_NAME["nproc_per_node"]
    assert (spec.flag, spec.env) == ("--nproc-per-node", "FASTTRAIN_NPROC_PER_NODE")
    assert (spec.metavar, spec.minimum, spec.panel) == ("N", 1, "Processes")
    assert BY_NAME["amp"].choices == get_args(AmpChoice)
    assert BY_NAME["gpus"].choices == ()


def test_defaults_are_those_of_settings():
    settings = Settings()
    assert all(spec.default == getattr(settings, spec.name).value for spec in OPTIONS)


def test_only_comma_lists_may_be_yaml_lists():
    assert {spec.name for spec in OPTIONS if spec.comma_list} == {"gpus", "show_ranks"}


@pytest.mark.parametrize(
    ("word", "meant"),
    [("bf61", "bf16"), ("BF16", "bf16"), ("bfloat16", "bf16"), ("quantum", None), ("", None)],
)
def test_nearest_choice(word, meant):
    assert nearest(word, get_args(AmpChoice)) == meant


def test_nearest_keeps_the_candidates_own_spelling():
    assert nearest("Compile-Scop", OPTION_NAMES) == "compile_scope"


def test_suggest_falls_back():
    assert "bf16" in suggest("bf61", ["bf16"], "other")
    assert suggest(string.digits, ["bf16"], "other") == "other"
