"""torch's version read from its files, and the C++ compiler that inductor would call."""

from __future__ import annotations

import importlib.metadata
import os
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import pytest

from fasttrain.hardware.cpu import find_cxx_compiler
from fasttrain.hardware.torch_install import find_torch
from fasttrain.model.machine import Torch

TORCH_20 = (
    "__version__ = '2.0.1+cu117'\ndebug = False\ncuda = '11.7'\ngit_version = 'e9eb'\nhip = None\n"
)
TORCH_213 = """from typing import Optional

__all__ = ['__version__', 'cuda', 'hip']
__version__ = '2.13.0+{tag}'
cuda: Optional[str] = {cuda}
hip: Optional[str] = {hip}
"""


def find(site: Path, version_py: str | None = None) -> Torch:
    if version_py is not None:
        (site / "torch").mkdir()
        (site / "torch" / "__init__.py").write_text("raise AssertionError('torch was executed')")
        (site / "torch" / "version.py").write_text(version_py)

    def locate(name: str) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(site)])

    return find_torch(locate)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TORCH_20, Torch("2.0.1+cu117", "cuda", "11.7")),
        (
            TORCH_213.format(tag="cu128", cuda="'12.8'", hip=None),
            Torch("2.13.0+cu128", "cuda", "12.8"),
        ),
        (
            TORCH_213.format(tag="rocm6.4", cuda=None, hip="'6.4.4'"),
            Torch("2.13.0+rocm6.4", "rocm", "6.4.4"),
        ),
        (TORCH_213.format(tag="cpu", cuda=None, hip=None), Torch("2.13.0+cpu", "cpu", "")),
    ],
)
def test_version_and_build_are_read(tmp_path: Path, text: str, expected: Torch) -> None:
    assert find(tmp_path, text) == expected


def test_nothing_of_torch_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    text = f"open({str(marker)!r}, 'w')\n__version__ = '2.9.0'\n"
    assert find(tmp_path, text).version == "2.9.0"
    assert not marker.exists()


def test_triton_ascend_is_found_by_its_metadata(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0'\n")

    def locate(name: str) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(tmp_path)])

    installed = {"triton-ascend": "3.2.0"}
    assert find_torch(locate, lambda name: installed.get(name, "")).triton_ascend == "3.2.0"
    assert find_torch(locate).triton_ascend == ""


def test_no_torch_is_an_empty_answer(tmp_path: Path) -> None:
    assert find(tmp_path) == Torch()


@pytest.mark.parametrize(
    "text", ["__version__ = (", "cuda = '12.8'\n", "__version__ = compute()\n"]
)
def test_a_broken_version_file_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"version\.py"):
        find(tmp_path, text)


def test_a_source_checkout_is_not_an_installation(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    with pytest.raises(FileNotFoundError):
        find(tmp_path)


def test_a_module_named_torch_is_not_the_package(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    with pytest.raises(OSError, match=r"torch\.py"):
        find(tmp_path)


def test_the_installed_torch_is_the_one_of_its_metadata() -> None:
    assert find_torch().version == importlib.metadata.version("torch")


@pytest.mark.parametrize(
    ("tools", "environ", "system", "expected"),
    [
        (["g++", "clang++"], {}, "Linux", "g++"),
        (["g++", "clang++"], {}, "Darwin", "clang++"),
        (["clang++"], {}, "Linux", ""),
        (["g++", "clang++"], {"CXX": "clang++"}, "Linux", "clang++"),
        (["g++"], {"CXX": "icpx"}, "Linux", ""),
        (["g++", "ccache"], {"CXX": "ccache g++"}, "Linux", ""),
        ([], {}, "Linux", ""),
    ],
)
def test_the_compiler_is_the_one_that_inductor_calls(
    make_host: Any, tools: list[str], environ: dict[str, str], system: str, expected: str
) -> None:
    host = make_host(tools=dict.fromkeys(tools, "exit 0"), **environ)
    found = find_cxx_compiler(host.environ, system=system)
    assert found == (os.path.join(host.environ["PATH"], expected) if expected else "")  # noqa: PTH118
