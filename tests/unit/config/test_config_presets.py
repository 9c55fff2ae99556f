from typing import get_args

import pytest

from fasttrain.config.resolve import PRESETS, preset_values
from fasttrain.model.decision import Source, SourceKind
from fasttrain.model.settings import PresetName

FLAG = Source(SourceKind.FLAG, "--preset")
FILE = Source(SourceKind.FILE, "fasttrain.yaml:4")


def test_the_presets_are_those_of_the_specification():
    assert tuple(PRESETS) == get_args(PresetName)
    assert all(preset.description for preset in PRESETS.values())


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "exact",
            {
                "amp": "off",
                "compile": "off",
                "optimizer": "keep",
                "matmul": "keep",
                "on_nan": "off",
            },
        ),
        ("fast", {"compile": "default"}),
        ("max", {"compile": "max-autotune"}),
    ],
)
def test_values(name, values):
    found = preset_values(name, FLAG)
    assert {option: setting.value for option, setting in found.items()} == values
    assert {str(setting.source) for setting in found.values()} == {f"preset {name}"}
    assert {setting.source.kind for setting in found.values()} == {SourceKind.PRESET}


def test_an_unknown_preset_names_the_nearest(refused):
    with refused("preset", "--preset", "exact?", code=2):
        preset_values("exakt", FLAG)
    with refused("preset", "fasttrain.yaml:4", "exact, fast, max"):
        preset_values("", FILE)
