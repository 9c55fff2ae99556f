from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import fasttrain
from fasttrain.model.plan import ScriptFacts, Target
from fasttrain.source import read
from fasttrain.source.read import NO_MODULE, read_script

USE = "import accelerate\naccelerate.Accelerator()\n"
SITE = "venv/lib/site-packages"


def test_nothing_is_known_of_a_command(read):
    assert read({"train.py": USE}, kind="command") == ScriptFacts()


def test_neighbours_of_the_script_are_the_users_own_and_the_working_directory_is_not(seen):
    files = {"tools/train.py": "import near, far", "near.py": USE, "far.py": "", "tools/far.py": ""}
    assert seen(files, name="tools/train.py") is None
    assert seen(files | {"tools/near.py": USE}, name="tools/train.py") == (
        "Accelerator",
        "tools/near.py:2",
    )


def test_a_link_to_a_script_has_the_neighbours_of_its_target(seen, tmp_path: Path):
    (tmp_path / "train.py").symlink_to("deep/real.py")
    files = {"deep/real.py": "import near", "deep/near.py": USE, "near.py": ""}
    assert seen(files) == ("Accelerator", "deep/near.py:2")


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("lib", "lib/helper.py"),
        ("none::lib", "lib/helper.py"),
        ("{}/lib", "lib/helper.py"),
        ("lib:other", "lib/helper.py"),
        ("other:lib", "other/helper.py"),
        ("", None),
        (SITE, None),
        (str(Path(os.__file__).parent), None),
    ],
)
def test_pythonpath_is_searched_but_not_what_is_installed_there(seen, tmp_path, path, file):
    kinds = ("lib", "other", SITE)
    files = {f"{folder}/helper.py": USE for folder in kinds} | {"src/train.py": "import helper"}
    found = seen(files, name="src/train.py", PYTHONPATH=path.format(tmp_path))
    assert found == (file and ("Accelerator", f"{file}:2"))


def test_an_empty_entry_of_pythonpath_is_the_working_directory(seen):
    files = {"helper.py": USE, "src/train.py": "import helper"}
    how = {"name": "src/train.py"}
    assert seen(files, **how, PYTHONPATH="lib:") == ("Accelerator", "helper.py:2")


def test_the_scripts_folder_goes_before_pythonpath(seen):
    files = {"helper.py": "", "lib/helper.py": USE, "train.py": "import helper"}
    assert seen(files, PYTHONPATH="lib") is None
    assert seen(files, PYTHONPATH="lib", PYTHONSAFEPATH="1") is not None


def test_installed_packages_are_not_looked_into(seen):
    files = {"train.py": "import tool", f"{SITE}/tool/__init__.py": USE}
    assert seen(files, installed=(SITE,)) is None


def test_neighbours_of_an_installed_script_are_its_own_but_not_all_that_is_installed(seen):
    files = {f"{SITE}/train.py": "import tool", f"{SITE}/tool.py": USE}
    assert seen(files, name=f"{SITE}/train.py", installed=(SITE,)) is None
    files = {f"{SITE}/pkg/train.py": "import near", f"{SITE}/pkg/near.py": USE}
    assert seen(files, name=f"{SITE}/pkg/train.py", installed=(SITE,)) is not None


def test_the_standard_library_is_not_looked_into(seen, tmp_path, monkeypatch):
    files = {"train.py": "import pickle, helper", "std/pickle.py": USE, "std/helper.py": USE}
    monkeypatch.setattr(os, "__file__", str(tmp_path / "std/os.py"))
    assert seen({**files, "train.py": "import pickle"}, installed=("std",)) is None
    assert seen(files, PYTHONPATH="std") is None


def test_the_users_own_module_of_a_name_in_the_standard_library_is_looked_into(seen):
    assert seen({"train.py": "import profile", "profile.py": USE}) is not None


def test_an_editable_package_is_the_users_own_if_it_lies_below_the_working_directory(seen):
    files = {"work/train.py": "import tool.part", "work/src/tool/part.py": USE, "x.py": ""}
    how = {"name": "train.py", "installed": ("work/src",)}
    assert seen(files, cwd="work", **how) == ("Accelerator", "src/tool/part.py:2")
    assert seen(files, cwd="work/src", name="../train.py", installed=("work/src",)) is not None
    elsewhere = {"other/tool.py": USE, "alone/train.py": "import tool"}
    assert seen(elsewhere, cwd="alone", name="train.py", installed=("other",)) is None


def test_an_installed_package_goes_before_a_mere_folder_of_its_name(seen):
    files = {
        "train.py": "from accelerate import Accelerator\nAccelerator()",
        "accelerate/x.txt": "",
    }
    package = {f"{SITE}/accelerate/__init__.py": ""}
    assert seen(files | package, installed=(SITE,)) == ("Accelerator", "train.py:2")


def test_of_mere_folders_the_users_own_goes_first(seen):
    files = {"train.py": "import tools.a", "tools/a.py": USE, f"{SITE}/tools/b.py": ""}
    assert seen(files, installed=(SITE,)) == ("Accelerator", "tools/a.py:2")


def test_the_users_own_module_of_a_frameworks_name_is_not_the_framework(seen):
    train = {"train.py": "from composer import Trainer\nTrainer()"}
    assert seen(train) == ("composer.Trainer", "train.py:2")
    assert seen(train | {"composer.py": "class Trainer: ..."}) is None
    package = {"composer/__init__.py": "from .core import Trainer", "composer/core.py": ""}
    assert seen(train | package) is None


def test_the_frameworks_own_checkout_is_the_framework(seen):
    lazy = {"src/transformers/__init__.py": "sys.modules[__name__] = lazy()"}
    train = {"examples/train.py": "from transformers import Trainer\nTrainer()"}
    found = seen(lazy | train, name="examples/train.py", installed=("src",))
    assert found == ("transformers.Trainer", "examples/train.py:2")


@pytest.mark.parametrize("how", [{"PYTHONPATH": "src"}, {"installed": ("src",)}])
def test_fasttrain_is_not_the_users_own(seen, tmp_path, monkeypatch, how):
    assert Path(fasttrain.__file__).parent == Path(read._FASTTRAIN)
    files = {"train.py": "import fasttrain.agent", "src/fasttrain/agent.py": USE}
    assert seen(files, **how) is not None
    monkeypatch.setattr(read, "_FASTTRAIN", str(tmp_path / "src/fasttrain"))
    assert seen(files, **how) is None


@pytest.mark.parametrize(
    ("module", "files", "where"),
    [
        ("train", {"train.py": USE}, "train.py:2"),
        ("pkg.train", {"pkg/train.py": USE}, "pkg/train.py:2"),
        ("pkg.train", {"pkg/train.py": "", "pkg/__init__.py": USE}, "pkg/__init__.py:2"),
        ("pkg.train", {"pkg/train.py": "from . import a", "pkg/a.py": USE}, "pkg/a.py:2"),
        ("pkg", {"pkg/__init__.py": "", "pkg/__main__.py": USE}, "pkg/__main__.py:2"),
        ("pkg", {"pkg/__main__.py": "from . import a", "pkg/a.py": USE}, "pkg/a.py:2"),
        ("pkg.train", {"pkg/train.py": "import top", "top.py": USE}, "top.py:2"),
        ("pkg", {"pkg/__main__.py": f"if __name__ == '__main__':\n {USE!r}\n 1"}, None),
    ],
)
def test_a_module_is_read_from_the_working_directory(seen, module, files, where):
    found = seen(files, name=module, kind="module")
    assert found == (where and ("Accelerator", where))


def test_the_module_is_told_before_the_packages_around_it(seen):
    files = {"pkg/__init__.py": USE, "pkg/train.py": USE}
    assert seen(files, name="pkg.train", kind="module") == ("Accelerator", "pkg/train.py:2")


def test_an_installed_module_that_is_named_is_the_users_own_with_its_package(seen, tmp_path):
    files = {
        f"{SITE}/refs/__init__.py": "",
        f"{SITE}/refs/train.py": "from refs import utils\nimport tool",
        f"{SITE}/refs/utils.py": "",
        f"{SITE}/tool.py": USE,
    }
    how = {"name": "refs.train", "kind": "module", "installed": (SITE,)}
    assert seen(files, **how) is None
    used = files | {f"{SITE}/refs/utils.py": USE}
    assert seen(used, **how) == ("Accelerator", f"{SITE}/refs/utils.py:2")
    assert seen(used, cwd="far", **how) == ("Accelerator", f"{tmp_path}/{SITE}/refs/utils.py:2")
    assert seen({}, name="tool", kind="module", installed=(SITE,)) is not None


@pytest.mark.parametrize("module", ["nowhere", "pkg.none", "pkg", "", ".pkg", "pkg.", "a\0b"])
def test_a_module_that_is_not_there_is_told(read, module):
    facts = read({"pkg/__init__.py": USE, "__init__.py": USE}, name=module, kind="module")
    assert facts == ScriptFacts(unread=(f"{module}: {NO_MODULE}",))


def test_a_module_of_the_standard_library_is_not_read(read):
    assert read({}, name="timeit", kind="module", installed=()) == ScriptFacts()


def test_what_a_finder_raises_does_not_matter(tmp_path: Path):
    def locate(_: str) -> None:
        raise RuntimeError("a finder of an editable package, broken")

    (tmp_path / "train.py").write_text("import tool\n" + USE)
    facts = read_script(Target("script", "train.py"), str(tmp_path), {}, locate)
    assert facts.handles_ranks is not None


@pytest.mark.parametrize(
    ("cwd", "name", "where"),
    [
        (".", "src/train.py", "src/train.py:2"),
        (".", "./src/train.py", "src/train.py:2"),
        (".", "{}/src/train.py", "src/train.py:2"),
        (".", "src/../src/train.py", "src/train.py:2"),
        ("src", "train.py", "train.py:2"),
        ("src", "../src/train.py", "train.py:2"),
        ("other", "../src/train.py", "{}/src/train.py:2"),
        ("other", "{}/src/train.py", "{}/src/train.py:2"),
    ],
)
def test_a_file_is_told_as_the_user_can_open_it(seen, tmp_path, cwd, name, where):
    files = {"src/train.py": USE, "other/x": ""}
    found = seen(files, cwd=cwd, name=name.format(tmp_path))
    assert found == ("Accelerator", where.format(tmp_path))


def test_torch_is_found_but_not_imported_by_the_real_finder(tmp_path: Path):
    (tmp_path / "train.py").write_text("import torch, transformers, yaml\nimport accelerate\n")
    before = set(sys.modules)
    assert read_script(Target("script", "train.py"), str(tmp_path), {}) == ScriptFacts()
    assert set(sys.modules) == before
