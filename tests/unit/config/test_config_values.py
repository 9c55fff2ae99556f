import pytest

from fasttrain.config.options import (
    BY_NAME,
    EMPTY,
    ONE_VALUE,
    WHOLE_NUMBER,
    parse_setting,
    parse_value,
)
from fasttrain.model.decision import Source, SourceKind
from fasttrain.model.errors import FasttrainError

FLAG = Source(SourceKind.FLAG, "--x")
ENV = Source(SourceKind.ENV, "FASTTRAIN_X")
FILE = Source(SourceKind.FILE, "fasttrain.yaml:3")


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("amp", "bf16", "bf16"),
        ("amp", " bf16 ", "bf16"),
        ("amp", False, "off"),
        ("amp", "No", "off"),
        ("compile", "false", "off"),
        ("strict", True, True),
        ("strict", "ON", True),
        ("strict", "yes", True),
        ("strict", "1", True),
        ("strict", "off", False),
        ("strict", "0", False),
        ("max_restarts", "0", 0),
        ("max_steps", 7, 7),
        ("max_steps", None, None),
        ("gpus", 0, "0"),
        ("gpus", "0,3", "0,3"),
        ("gpus", ["0", "3"], "0,3"),
        ("gpus", [0, 3], "0,3"),
        ("show_ranks", [0], "0"),
        ("nodes", "1:4", "1:4"),
        ("rdzv_id", "0123", "0123"),
        ("run_dir", "my runs/a", "my runs/a"),
        ("env", ("A=1", "B=x=y", "C="), ("A=1", "B=x=y", "C=")),
        ("env", {"A": "1", "B": 2, "C": ""}, ("A=1", "B=2", "C=")),
        ("env", None, None),
        ("env", [], ()),
    ],
)
def test_accepted(name, raw, value):
    parsed = parse_value(BY_NAME[name], raw, FILE)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "raw", "word"),
    [
        ("amp", "bf61", "bf16"),
        ("amp", True, "auto, off, bf16, fp16"),
        ("amp", None, EMPTY),
        ("amp", "", EMPTY),
        ("strategy", False, "none"),
        ("strict", "maybe", "maybe"),
        ("strict", "2", "false"),
        ("max_steps", True, WHOLE_NUMBER),
        ("max_steps", "1e3", WHOLE_NUMBER),
        ("max_steps", "010", WHOLE_NUMBER),
        ("max_steps", "1_000", WHOLE_NUMBER),
        ("max_steps", "1:30", WHOLE_NUMBER),
        ("max_steps", "1٣", WHOLE_NUMBER),
        ("max_steps", "9" * 5000, WHOLE_NUMBER),
        ("max_steps", 0, " 1 "),
        ("max_restarts", "-1", " 0 "),
        ("master_port", "65536", "65535"),
        ("nproc_per_node", "4194305", "4194304"),
        ("max_steps", ["1"], ONE_VALUE),
        ("gpus", [["0"]], ONE_VALUE),
        ("gpus", [None], ONE_VALUE),
        ("gpus", [], EMPTY),
        ("gpus", {"0": "1"}, ONE_VALUE),
        ("master_addr", ["a", "b"], ONE_VALUE),
        ("run_dir", "  ", EMPTY),
        ("env", "A=1", "list"),
    ],
)
def test_refused(name, raw, word, refused):
    with refused("option-value", word, "fasttrain.yaml:3", name):
        parse_value(BY_NAME[name], raw, FILE)


@pytest.mark.parametrize(
    "raw", [["A"], ["=1"], ["A B=1"], ["1A=1"], ["Ä=1"], [["A=1"]], {"A": None}, {"A": ["1"]}]
)
def test_env_needs_names_and_values(raw, refused):
    with refused("env-value", "NAME=VALUE"):
        parse_value(BY_NAME["env"], raw, FILE)


@pytest.mark.parametrize("raw", [["hunter2"], ["A B=hunter2"], {"A": ["hunter2"]}, "hunter2"])
def test_env_errors_do_not_show_values(raw):
    with pytest.raises(Exception, match="env") as caught:
        parse_value(BY_NAME["env"], raw, FILE)
    assert "hunter2" not in str(caught.value)


def test_a_variable_with_a_list_is_split_as_a_shell_would(refused):
    assert parse_value(BY_NAME["env"], "A=1 B='x y'", ENV) == ("A=1", "B=x y")
    with refused("option-value", "FASTTRAIN_X", "quotation"):
        parse_value(BY_NAME["env"], "A='1", ENV)


@pytest.mark.parametrize(("name", "slug"), [("amp", "option-value"), ("env", "env-value")])
def test_a_wrong_flag_is_a_usage_error(name, slug, refused):
    with refused(slug, "--x", code=2):
        parse_value(BY_NAME[name], ("A",) if name == "env" else "b", FLAG)
    with refused(slug, "FASTTRAIN_X"):
        parse_value(BY_NAME[name], "b", ENV)


def test_a_long_value_is_cut_in_the_error():
    with pytest.raises(FasttrainError) as caught:
        parse_value(BY_NAME["amp"], "x" * 10_000, FILE)
    assert caught.value.slug == "option-value"
    assert len(caught.value.args[0]) < 150


def test_setting_keeps_its_source():
    setting = parse_setting(BY_NAME["max_steps"], "3", ENV)
    assert (setting.value, setting.source) == (3, ENV)
