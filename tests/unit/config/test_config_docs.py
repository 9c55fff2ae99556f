import re
from pathlib import Path

import pytest

import fasttrain.config
from fasttrain.config.resolve import PRESETS, resolve

DOCS = Path(__file__).parents[3] / "docs" / "configuration.md"


@pytest.fixture(scope="module")
def text() -> str:
    return DOCS.read_text(encoding="utf-8")


def test_the_example_file_says_what_the_text_says(text, tmp_path):
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "fasttrain.yaml").write_text(example)
    resolved = resolve({}, environ={}, cwd=tmp_path)
    assert resolved.script == "tools/train.py"
    assert resolved.with_args[0].args == ("configs/a.yaml", "--lr", "1e-3")
    assert resolved.settings.gpus.value == "0,3"
    assert resolved.settings.compile.value == "default"
    assert resolved.settings.env.value == ("OMP_NUM_THREADS=8", "DATA_ROOT=/data/imagenet")
    exact = resolve({}, environ={}, cwd=tmp_path, preset="exact").settings
    assert (exact.amp.value, str(exact.amp.source)) == ("bf16", "fasttrain.yaml:6")


@pytest.mark.parametrize("name", PRESETS)
def test_the_preset_table(text, name):
    values = ", ".join(f"`{key}: {value}`" for key, value in PRESETS[name].values.items())
    assert f"| `{name}` | {values} | {PRESETS[name].description} |" in text


def test_every_slug_is_listed(text):
    sources = Path(fasttrain.config.__file__).parent.glob("*.py")
    code = "".join(source.read_text(encoding="utf-8") for source in sources)
    used = set(re.findall(r'slug="([a-z-]+)"', code)) | {"env-value"}
    assert used == set(re.findall(r"^\| `([a-z-]+)` \| [^|]+ \|$", text, re.MULTILINE))
