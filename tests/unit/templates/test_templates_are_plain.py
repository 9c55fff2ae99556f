"""The templates are plain PyTorch, and the files beside them are what they say."""

import ast
import csv
import gzip
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from fasttrain.config.resolve import PRESETS, resolve
from fasttrain.config.yaml_file import read_yaml
from fasttrain.model.settings import OPTION_NAMES, Settings

TEMPLATES = Path(__file__).parents[3] / "templates"
SCRIPTS = sorted(TEMPLATES.rglob("*.py"))
CONFIG = TEMPLATES / "fasttrain.yaml"


def imported_packages(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


def every_key_set(text: str) -> str:
    """Return the example with the mark taken away from its commented keys."""
    keys = "|".join([*OPTION_NAMES, "script", "args", "preset"])
    return re.sub(rf"^# (?=({keys}): )", "", text, flags=re.MULTILINE)


def test_there_is_a_template_per_kind_of_model() -> None:
    assert [path.name for path in SCRIPTS] == ["digits.py", "char_lm.py"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_template_knows_nothing_of_fasttrain(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert "fasttrain" not in source.lower()
    assert imported_packages(source) <= {*sys.stdlib_module_names, "torch"}


def test_the_digits_are_those_of_uci() -> None:
    with gzip.open(TEMPLATES / "image_classifier/digits.csv.gz", "rt", newline="") as file:
        rows = [[int(cell) for cell in row] for row in csv.reader(file)]
    assert {len(row) for row in rows} == {65}
    assert {pixel for row in rows for pixel in row[:64]} == set(range(17))
    # "No of examples in testing set" of the data set's page, which sums to its 1,797 instances.
    # Source: https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits
    published = dict(enumerate([178, 182, 177, 183, 181, 182, 181, 179, 174, 180]))
    assert Counter(row[64] for row in rows) == published
    assert len(rows) == 1797


def test_the_readme_lists_every_template() -> None:
    readme = (TEMPLATES / "README.md").read_text(encoding="utf-8")
    for path in [*SCRIPTS, CONFIG]:
        assert f"({path.relative_to(TEMPLATES)})" in readme


def test_the_example_configuration_changes_nothing() -> None:
    resolved = resolve({}, environ={}, cwd=TEMPLATES)
    assert resolved.config_path is not None
    assert resolved.script is None
    defaults = Settings()
    for name in OPTION_NAMES:
        assert getattr(resolved.settings, name).value == getattr(defaults, name).value


def test_the_example_sets_nothing_that_a_preset_sets() -> None:
    set_by_file = read_yaml(CONFIG).entries.keys()
    for preset in PRESETS.values():
        assert not set_by_file & preset.values.keys()


def test_every_key_of_the_example_works_when_uncommented(tmp_path: Path) -> None:
    text = every_key_set(CONFIG.read_text(encoding="utf-8"))
    (tmp_path / "fasttrain.yaml").write_text(text, encoding="utf-8")
    file = read_yaml(tmp_path / "fasttrain.yaml")
    resolved = resolve({}, environ={}, cwd=tmp_path)
    assert file.entries.keys() == set(OPTION_NAMES)
    assert (resolved.script, file.args, file.preset) == (
        "train.py", ("--out", "model.pt"), "fast",
    )  # fmt: skip
    assert resolved.settings.nodes.value == "1:4"
    assert resolved.settings.gpus.value == "0,3"
