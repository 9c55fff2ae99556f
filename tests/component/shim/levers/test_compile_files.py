"""Programs of inductor's cache are there as a whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import codecache, cpp_builder

from fasttrain.shim.levers.compile.repairs import MENDED, keep_whole

SOURCE = 'extern "C" int answer() { return 42; }'


@pytest.fixture
def notes() -> Iterator[list[str]]:
    with ExitStack() as undo:
        found: list[str] = []
        keep_whole(found.append, undo)
        yield found


def compiled() -> Path:
    """Return where inductor has a program, which it compiles if it doesn't see one there."""
    codecache.CppCodeCache.cache.clear()
    library: Any = codecache.CppCodeCache.load(SOURCE, needs_vec_isa=False)
    assert library.answer() == 42
    codecache.CppCodeCache.cache.clear()
    return Path(library._name)


def test_parts_of_a_program_are_compiled_again(
    notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    place = compiled()
    program = place.read_bytes()
    assert compiled() == place
    assert notes == []  # and a whole one is taken as it is
    for number, left in enumerate((0, 40, len(program) // 2, len(program) - 1), 1):
        place.unlink()  # cut the one on the disk, and not the one that this process has loaded
        place.write_bytes(program[:left])
        assert compiled() == place
        assert place.read_bytes() == program
        assert notes == [MENDED] * number
    assert list(tmp_path.rglob("*.part")) == []


def test_a_program_that_another_process_writes_is_left_to_it(
    notes: list[str], tmp_path: Path
) -> None:
    program = tmp_path / "program.so"
    asks: Any = cpp_builder.CppBuilder.get_target_file_path
    builder = SimpleNamespace(_target_file=str(program))
    writes = "import sys; f = open(sys.argv[1], 'wb'); print(flush=True); sys.stdin.read()"
    argv = [sys.executable, "-c", writes, str(program)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as compiler:
        assert compiler.stdout is not None
        compiler.stdout.readline()
        assert asks(builder) == str(program)
        assert program.exists()
        assert notes == []
        compiler.communicate()
    assert asks(builder) == str(program)
    assert not program.exists(), "what nobody writes has been left cut short"
    assert notes == [MENDED]


@pytest.mark.usefixtures("notes")
def test_a_compiler_that_is_killed_leaves_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    outputs: list[Path] = []

    def killed(command: str, cwd: str) -> None:
        words = command.split()
        outputs.append(Path(words[words.index("-o") + 1]))
        outputs[-1].write_bytes(b"\x7fELF")
        assert not list(tmp_path.rglob("*.so"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cpp_builder, "run_compile_cmd", killed)
        with pytest.raises(KeyboardInterrupt):
            compiled()
    assert len(outputs) == 1
    assert not outputs[0].exists()
    assert compiled().suffix == ".so"


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_what_the_script_compiles_itself_goes_into_the_same_cache(
    rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    place = compiled()
    place.unlink()
    place.touch()
    before = cpp_builder.CppBuilder.build
    with rig(compile="default") as runtime:
        torch.compile(torch.sin)
        assert compiled() == place
        assert MENDED in runtime.outcomes()["compile"].notes
    assert cpp_builder.CppBuilder.build is before
