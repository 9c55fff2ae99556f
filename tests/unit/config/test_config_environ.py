import pytest

from fasttrain.config.environ import option_values, read_environ
from fasttrain.config.options import OPTIONS


def test_the_environment_is_a_copy(monkeypatch):
    monkeypatch.setenv("FASTTRAIN_AMP", "bf16")
    environ = read_environ()
    assert environ["FASTTRAIN_AMP"] == "bf16"
    environ["FASTTRAIN_AMP"] = "off"
    assert read_environ()["FASTTRAIN_AMP"] == "bf16"


def test_variables_are_typed_and_say_where_they_come_from():
    found = option_values({"FASTTRAIN_MAX_STEPS": "5", "FASTTRAIN_STRICT": "yes", "HOME": "/"})
    assert {name: setting.value for name, setting in found.items()} == {
        "max_steps": 5,
        "strict": True,
    }
    assert str(found["max_steps"].source) == "FASTTRAIN_MAX_STEPS"


def test_every_option_has_a_variable():
    samples = {"int": "1", "bool": "true", "str": "x", "list": "A=1"}
    environ = {spec.env: [*spec.choices, samples[spec.kind]][0] for spec in OPTIONS}
    assert set(option_values(environ)) == {spec.name for spec in OPTIONS}


@pytest.mark.parametrize(
    "name",
    [
        "FASTTRAIN_CONFIG",
        "FASTTRAIN_PRESET",
        "FASTTRAIN_RUN_ID",
        "FASTTRAIN_RESTART_COUNT",
        "FASTTRAIN_HEARTBEATS",
    ],
)
def test_variables_that_are_no_options_pass(name):
    assert option_values({name: "x"}) == {}


def test_an_empty_variable_sets_nothing():
    assert option_values({"FASTTRAIN_GPUS": "", "FASTTRAIN_MAX_STEPS": ""}) == {}


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("FASTTRAIN_COMPLIE", "FASTTRAIN_COMPILE?"),
        ("FASTTRAIN_PRESETS", "FASTTRAIN_PRESET?"),
        ("FASTTRAIN_", "unset"),
        ("FASTTRAIN_XYZ", "unset"),
    ],
)
@pytest.mark.parametrize("value", ["bf16", ""])
def test_an_unknown_variable_is_refused(name, word, value, refused):
    with refused("env-option", name, word):
        option_values({name: value})


def test_a_wrong_value_names_the_variable(refused):
    with refused("option-value", "FASTTRAIN_AMP", "bf16?"):
        option_values({"FASTTRAIN_AMP": "bf61"})
    with refused("env-value", "FASTTRAIN_ENV"):
        option_values({"FASTTRAIN_ENV": "A"})
