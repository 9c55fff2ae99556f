"""Why a graph isn't in the cache: what differs from the last time that it was compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fasttrain.model.places import COMPILED_VARIABLE
from fasttrain.shim.levers.compile.cache_misses import FOLDER, CacheMisses

# Lines of torch 2.13 for the key of a small model, cut.
RECORDED = [
    "[a1] aot_config: (0, True, False, False, False, [DictGetItemSource(base=Unspeciali",
    "[a2] grad_enabled: True",
    "[a3] gm: GraphModule()",
    "[a4] example_inputs[0]: TensorMetadata(dtype=torch.float32, shape=torch.Size([64, 32])",
    "[a5] example_inputs[1]: TensorMetadata(dtype=torch.float32, shape=torch.Size([64])",
    "[a6] cpp_runtime_thread_count: 1",
    "[a7] torch_version: M",
    "[a8] inductor_config[inplace_padding]: True",
    "[a9] inductor_config[debug]: False",
    "[b1] fx_kwargs[cudagraphs]: BoxedBool(value=False)",
]


class Pickler:
    """Has the lines of a key."""

    def __init__(self, *changed: str) -> None:
        self.lines = [
            line.replace("[", "[other", 1) if any(one in line for one in changed) else line
            for line in RECORDED
        ]

    def debug_lines(self, _: Any) -> list[str]:
        return self.lines


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(COMPILED_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def run(cache: Path) -> Callable[..., list[str]]:
    """Compile graphs in a run of its own, and return the notes."""

    def made(*picklers: Pickler, script: str = "train.py") -> list[str]:
        notes: list[str] = []
        misses = CacheMisses(script, notes.append)
        watched = misses._watched(lambda *_: [], lambda key: str(cache / key))
        for pickler in picklers:
            assert watched(pickler, None, "absent") == []
        return notes

    return made


def test_the_first_time_there_is_nothing_to_say(run: Any) -> None:
    assert run(Pickler()) == []


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (("thread_count",), "the number of threads"),
        (("inputs[1]",), "shapes or types of tensors"),
        (("gm", "torch_version"), "the graph, the version of torch"),
        (("padding",), "inductor's inplace_padding"),
        (("cudagraphs",), "fx_kwargs"),
        (
            ("aot", "grad", "gm", "inputs", "thread", "version"),
            "how the model is called, whether gradients are on, the graph,"
            " shapes or types of tensors, 2 more",
        ),
    ],
)
def test_what_differs_is_named(run: Any, changed: tuple[str, ...], named: str) -> None:
    run(Pickler())
    assert run(Pickler(*changed)) == [f"compiled again, not from the cache: {named} changed"]
    assert run(Pickler(*changed)) == [], "the last time counts"


def test_graphs_are_told_apart_by_their_order_and_script(run: Any) -> None:
    run(Pickler(), Pickler("gm"))
    assert run(Pickler(), Pickler("gm")) == []
    assert run(Pickler("gm"), script="other.py") == []


def test_a_graph_that_is_in_the_cache_is_not_looked_at(run: Any, cache: Path) -> None:
    run(Pickler())
    (cache / "absent").mkdir()
    assert run(Pickler("gm")) == []


def test_what_cannot_be_kept_or_read_stops_nothing(run: Any, cache: Path) -> None:
    run(Pickler())
    (kept,) = (cache / FOLDER).iterdir()
    kept.write_text("{")
    assert run(Pickler("gm")) == []
    kept.unlink()
    (cache / FOLDER).rmdir()
    (cache / FOLDER).write_text("")
    assert run(Pickler("gm")) == []


def test_torchs_function_is_watched_and_comes_back(cache: Path) -> None:
    from torch._functorch._aot_autograd import autograd_cache

    before = autograd_cache._get_debug_lines_for_cache_key
    with ExitStack() as undo:
        CacheMisses("train.py", print).install(undo)
        assert autograd_cache._get_debug_lines_for_cache_key is not before
    assert autograd_cache._get_debug_lines_for_cache_key is before
