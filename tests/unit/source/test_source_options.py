"""The options of a script, in the styles in which scripts declare them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasttrain.model.plan import Target
from fasttrain.source.read import read_options

CONFIGURATOR = "device = 'cuda'\nexec(open('configurator.py').read())"
STYLES = {
    "argparse": "import argparse\np = argparse.ArgumentParser()\np.add_argument('-d', '--device')",
    "click": "import click\n@click.command()\n@click.option('--device', 'kind')\ndef f(kind): 0",
    "typer": "import typer\ndef main(device: str = 'cpu'): 0\ntyper.run(main)",
    "fire": "import fire\nclass Trainer:\n    def fit(self, *, device): 0\nfire.Fire(Trainer)",
    "configurator": CONFIGURATOR,
    "globals": "device = 'cuda'\nimport sys\nglobals().update(a.split('=') for a in sys.argv[1:])",
    "dataclass": (
        "from transformers import HfArgumentParser\nclass Args:\n    device: str = 'cuda'\n"
    ),
    "absl": "from absl import flags\nflags.DEFINE_string('device', 'cuda', '')",
    "keys": "import sys\nc = {'device': 'cuda'}\nc.update(p.split('=') for p in sys.argv)",
    "by hand": "import sys\nif '--device' in sys.argv: 0",
    "usage text": "'''Usage: train.py [--device=NAME]'''\nimport docopt",
}


def read(folder: Path, text: str, **others: str) -> set[str] | None:
    (folder / "train.py").write_text(text)
    for name, content in others.items():
        (folder / f"{name}.py").write_text(content)
    found = read_options(Target("script", "train.py"), str(folder), {}, lambda _: None)
    return None if found is None else set(found)


@pytest.mark.parametrize("style", STYLES)
def test_an_option_is_seen_in_each_style(tmp_path: Path, style: str) -> None:
    found = read(tmp_path, STYLES[style])
    assert found is not None
    assert "device" in found
    assert "amp" not in found


@pytest.mark.parametrize(
    "text",
    [
        "device = 'cuda'\nmodel.to(device)",
        "import argparse, sys\ndevice = 1\nprint(sys.argv)\np.add_argument('--lr')",
    ],
)
def test_a_name_that_no_word_can_set_is_none(tmp_path: Path, text: str) -> None:
    assert "device" not in (read(tmp_path, text) or ())


def test_modules_of_the_users_own_count(tmp_path: Path) -> None:
    assert read(tmp_path, "import options", options=STYLES["argparse"]) == {"device"}


def test_nothing_is_known_of_what_cannot_be_read(tmp_path: Path) -> None:
    assert read(tmp_path, "import options", options="def :") is None


def test_the_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CONFIGURATOR)
    found = read_options(Target("script", "train.py"), str(tmp_path), {}, lambda _: None)
    assert found is not None
    assert found["device"] == "train.py:1"
