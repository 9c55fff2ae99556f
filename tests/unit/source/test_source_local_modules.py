from __future__ import annotations

import os
from pathlib import Path

import pytest

from fasttrain.source.local_modules import MAX_BYTES, MAX_FILES

USE = "import accelerate\naccelerate.Accelerator()\n"


@pytest.mark.parametrize(
    ("importing", "file"),
    [
        ("import helper", "helper.py"),
        ("import helper as h, os", "helper.py"),
        ("from helper import f", "helper.py"),
        ("from helper import *", "helper.py"),
        ("import pkg", "pkg/__init__.py"),
        ("import pkg.sub.deep", "pkg/__init__.py"),
        ("import pkg.sub.deep", "pkg/sub/__init__.py"),
        ("import pkg.sub.deep", "pkg/sub/deep.py"),
        ("from pkg import part", "pkg/part.py"),
        ("from pkg.part import f", "pkg/part.py"),
        ("from folder import part", "folder/part.py"),
        ("import folder.inner.part", "folder/inner/part.py"),
        ("def f():\n  import helper", "helper.py"),
        ("try:\n  import none_such\nexcept ImportError:\n  import helper", "helper.py"),
        ("import importlib\nimportlib.import_module('pkg.part')", "pkg/part.py"),
        ("from importlib import import_module\nimport_module('helper')", "helper.py"),
        ("__import__('helper')", "helper.py"),
        ("import importlib\nimportlib.import_module('odd-name')", "odd-name.py"),
    ],
)
def test_imports_are_followed(seen, importing, file):
    packages = {"pkg/__init__.py": "", "pkg/sub/__init__.py": ""}
    assert seen({"train.py": importing, **packages, file: USE}) == ("Accelerator", f"{file}:2")


@pytest.mark.parametrize(
    ("importing", "file"),
    [
        ("from . import near", "pkg/near.py"),
        ("from .near import f", "pkg/near.py"),
        ("from .. import far", "far/unreached.py"),
        ("from ..far import f", "far/unreached.py"),
        ("from .inner.deep import f", "pkg/inner/deep.py"),
        ("import importlib\nimportlib.import_module('.near', __package__)", "pkg/near.py"),
    ],
)
def test_relative_imports_count_from_their_package(seen, importing, file):
    files = {"train.py": "import pkg", "pkg/__init__.py": importing, "far.py": USE, file: USE}
    expected = None if file == "far/unreached.py" else ("Accelerator", f"{file}:2")
    assert seen(files) == expected


def test_relative_imports_of_a_plain_module_count_from_the_package_it_is_in(seen):
    files = {
        "train.py": "import pkg.inner.a",
        "pkg/inner/a.py": "from .. import b\nfrom ..c import d",
        "pkg/c.py": USE,
    }
    assert seen(files) == ("Accelerator", "pkg/c.py:2")


@pytest.mark.parametrize(
    "importing",
    [
        "from . import helper",  # a script has no package
        "import_module(name)",
        "if TYPE_CHECKING: import helper",
        "'import helper'",
        "import other.helper",
        "import_module('/helper'); import_module(''); import_module('..'); import_module('a..b')",
        "import_module('sub/helper'); import_module('helper\\0'); import_module('\\ud800')",
        f"import {'x' * 5000}",
        f"import {'.'.join(['helper_'] * 5000)}",
    ],
)
def test_what_leads_nowhere_is_not_followed(seen, importing):
    assert seen({"train.py": importing, "helper.py": USE, "sub/helper.py": USE}) is None


def test_a_modules_own_main_part_is_not_the_programs(seen):
    main = "import accelerate\nif __name__ == '__main__':\n  accelerate.Accelerator()\n"
    assert seen({"train.py": "import helper", "helper.py": main}) is None
    assert seen({"train.py": main}) == ("Accelerator", "train.py:3")


def test_names_are_followed_through_the_users_own_modules(seen):
    files = {"train.py": "from common import *\nfrom pkg import start\n"}
    common = {"common.py": "import accelerate as acc\nfrom train import *\n"}
    pkg = {
        "pkg/__init__.py": "from .dist import launch as start",
        "pkg/dist.py": "from torch.distributed import init_process_group as launch",
    }
    assert seen(files | common | pkg) is None
    used = {"train.py": files["train.py"] + "acc.Accelerator()\n"}
    assert seen(used | common | pkg) == ("Accelerator", "train.py:3")
    used = {"train.py": files["train.py"] + "start('gloo')\n"}
    assert seen(used | common | pkg) == ("init_process_group", "train.py:3")


def test_modules_that_import_each_other_end(seen):
    stars = {f"m{i}.py": "".join(f"from m{k} import *\n" for k in range(9)) for i in range(9)}
    assert seen({"train.py": "from m0 import *\nfind_me()\n", **stars}) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("x = (\n", "line 1"),
        ("def f():\nreturn 1\n", "line 2"),
        ("x = 1\0", "null byte"),
        (b"x = '\xe9'\n", "encoding"),
        (b"# coding: none-such\n", "none-such"),
        (b"# coding: hex\nx = 1\n", "hex"),
        (b"\xff\xfe\x00\x01", ""),
        ("-" * 100_000 + "1", ""),
        ("(" * 100_000, ""),
        ("x" + ".a" * 50_000, ""),
        ("#" * (MAX_BYTES + 1), str(MAX_BYTES)),
    ],
)
def test_a_file_that_cannot_be_read_is_told_and_the_rest_is_read(read, tmp_path, content, reason):
    facts = read(
        {"train.py": "import broken\nimport helper", "broken.py": content, "helper.py": USE}
    )
    assert facts.handles_ranks is not None
    assert facts.handles_ranks.where == "helper.py:2"
    (told,) = facts.unread
    assert told.startswith("broken.py: ")
    assert reason in told
    assert len(told) < 200
    assert str(tmp_path) not in told


def test_a_file_that_may_not_be_opened_is_told(read, monkeypatch):
    def refuse(_: object) -> None:
        raise PermissionError(13, "Permission denied")  # root may read every file

    monkeypatch.setattr("tokenize.open", refuse)
    assert read({"train.py": USE}).unread == ("train.py: Permission denied",)


def test_a_script_that_is_no_file_is_told(read, tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "loop.py").symlink_to("loop.py")
    for name in ("none.py", ".", "pipe.py", "loop.py", "a\0b", "x" * 5000):
        facts = read({}, name)
        assert facts.handles_ranks is None
        assert len(facts.unread) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + USE.encode(),
        b"# coding: latin-1\nx = '\xe9'\n" + USE.encode(),
        USE.replace("\n", "\r\n").encode(),
        ("x = '\\d'; 1 is 1\n" + USE).encode(),  # Python warns of it
        ("#" * (MAX_BYTES - 100) + "\n" + USE).encode(),
    ],
)
def test_what_python_reads_is_read(seen, content):
    found = seen({"train.py": content})
    assert found is not None
    assert found[0] == "Accelerator"


def test_no_more_files_than_the_limit_are_read(read):
    chain = {f"m{i:03}.py": f"import m{i + 1:03}\n" for i in range(MAX_FILES - 1)}
    last = f"m{MAX_FILES - 1:03}.py"
    start = {"train.py": "import m000\n"}
    facts = read(start | chain | {last: USE})
    assert facts.handles_ranks is None
    assert len(facts.unread) == 1
    assert facts.unread[0].startswith(last)
    short = start | chain | {f"m{MAX_FILES - 2:03}.py": USE}
    facts = read(short)
    assert facts.handles_ranks is not None
    assert facts.unread == ()


def test_a_file_is_read_once_under_all_its_names(read, tmp_path: Path):
    files = {
        "train.py": "import pkg.a, train, copy_of_a\n",
        "pkg/__init__.py": "",
        "pkg/a.py": "from .again import a\nx = (",
    }
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/again").symlink_to(".")
    (tmp_path / "copy_of_a.py").symlink_to("pkg/a.py")
    facts = read(files)
    assert len(facts.unread) == 1


def test_links_that_lead_round_end(seen, tmp_path: Path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/again").symlink_to(".")
    (tmp_path / "circle").symlink_to("circle")
    files = {
        "train.py": "import pkg.a, circle\n",
        "pkg/__init__.py": "from .again import a",
        "pkg/a.py": "from .again.again import a, b\n",
        "pkg/b.py": USE,
    }
    assert seen(files) == ("Accelerator", "pkg/again/again/b.py:2")
