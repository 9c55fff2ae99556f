from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

TEMPLATES = Path(__file__).parents[3] / "templates"
NAMES = sorted(
    path.name for path in TEMPLATES.iterdir() if path.is_dir() and path.name[0] not in "._"
)


def test_all_templates_are_listed(fasttrain_main: Any) -> None:
    said = fasttrain_main("init")
    assert (said.code, said.out.splitlines()) == (0, NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_template_is_handed_out_whole(fasttrain_main: Any, tmp_path: Path, name: str) -> None:
    said = fasttrain_main("init", name)
    assert said.code == 0
    script = Path(said.out.removeprefix("fasttrain run ").strip())
    ast.parse((tmp_path / script).read_text())
    expected = {path.name for path in (TEMPLATES / name).iterdir() if path.name[0] not in "._"}
    given = {path.name for path in (tmp_path / name).iterdir()}
    assert given == expected | {"fasttrain.yaml"}
    (tmp_path / name / "fasttrain.yaml").write_text("max_steps: 7\n")
    planned = fasttrain_main("run", str(script), "--dry-run", "--json")
    assert planned.code == 0, planned.err
    assert json.loads(planned.out)["data"]["max_steps"] == 7, "the file beside the script counts"


def test_the_configuration_that_is_handed_out_is_valid(fasttrain_main: Any, tmp_path: Path) -> None:
    fasttrain_main("init", NAMES[0], "mine")
    script = next((tmp_path / "mine").glob("*.py"))
    said = fasttrain_main("run", str(script), "--config", "mine/fasttrain.yaml", "--dry-run")
    assert said.code == 0, said.err


def test_nothing_is_overwritten(fasttrain_main: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "fasttrain.yaml").write_text("amp: off\n")
    said = fasttrain_main("init", NAMES[0], "mine")
    assert (said.code, said.out, "[template-target]" in said.err) == (71, "", True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["fasttrain.yaml"]


def test_an_unknown_template(fasttrain_main: Any, tmp_path: Path) -> None:
    said = fasttrain_main("init", NAMES[0][:-1])
    assert (said.code, "[template-unknown]" in said.err) == (2, True)
    assert f"fasttrain init {NAMES[0]}" in said.err
    assert list(tmp_path.iterdir()) == []
