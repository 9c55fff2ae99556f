"""What the script draws from the operating system is the same on all ranks, and new in each run."""

from __future__ import annotations

import os
import random
import secrets
import tempfile
import threading
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fasttrain.shim.data_parallel.answers.seeds import Seeds
from fasttrain.shim.data_parallel.ranks import Ranks
from support.forked_ranks import on_ranks


def install(ranks: Ranks) -> ExitStack:
    np.random.seed(0)  # numpy.random is there
    undo = ExitStack()
    Seeds(ranks).install(undo)
    return undo


def drawn() -> list[Any]:
    """Draw in all ways that need no seed."""
    found: list[Any] = [
        int(np.random.default_rng().integers(2**60)),
        int(np.random.SeedSequence().entropy),  # type: ignore[arg-type]
        int(np.random.RandomState().randint(2**30)),
        random.Random().random(),
        random.SystemRandom().random(),
        os.urandom(8).hex(),
        secrets.token_hex(8),
        secrets.randbelow(2**60),
        str(uuid.uuid4()),
        str(uuid.uuid1()),
        torch.seed(),
        torch.Generator().seed(),
    ]
    np.random.seed()
    random.seed()
    return [*found, float(np.random.rand()), random.random(), float(torch.rand(()))]


def test_all_ranks_draw_the_same_and_never_the_same_again(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        with install(ranks):
            return [drawn() for _ in range(2)]

    (once, again), other = (end.good for end in on_ranks(tmp_path, act, world_size=2))
    assert [once, again] == other
    assert all(a != b for a, b in zip(once, again, strict=True))
    assert uuid.UUID(once[8]).version == 4
    assert uuid.UUID(once[9]).version == 1
    next_run = on_ranks(tmp_path, act, world_size=2)[0].good[0]
    assert all(a != b for a, b in zip(once, next_run, strict=True))


def test_seeds_that_are_given_are_left_alone(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        before = [random.Random(3).random(), float(np.random.default_rng(3).random())]
        with install(ranks):
            random.seed("a")
            found = random.random()
            now = [random.Random(3).random(), float(np.random.default_rng(3).random())]
        random.seed("a")
        return [before == now, found == random.random()]

    assert [end.good for end in on_ranks(tmp_path, act)] == [[True, True]] * 2


def test_what_names_files_and_what_libraries_draw_stays_each_ranks_own(tmp_path: Path) -> None:
    code = compile(
        "import os\ndef draw():\n    return os.urandom(8)", "/x/site-packages/a.py", "exec"
    )
    space: dict[str, Any] = {}
    exec(code, space)

    def act(ranks: Ranks) -> Any:
        with install(ranks):
            names = tempfile._RandomNameSequence()  # type: ignore[attr-defined]
            return [next(names), space["draw"]().hex()]

    first, second = (end.good for end in on_ranks(tmp_path, act))
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_generators_of_libraries_draw_the_same(tmp_path: Path) -> None:
    code = """
import random, numpy
def draw():
    return [random.Random().random(), float(numpy.random.default_rng().random())]
"""
    space: dict[str, Any] = {}
    exec(compile(code, "/x/site-packages/augment.py", "exec"), space)

    def act(ranks: Ranks) -> Any:
        with install(ranks):
            return space["draw"]()

    first, second = (end.good for end in on_ranks(tmp_path, act))
    assert first == second


def test_threads_and_children_draw_the_same_on_all_ranks_and_not_as_each_other(
    tmp_path: Path,
) -> None:
    def draw(out: list[str]) -> None:
        out.append(os.urandom(8).hex())

    def act(ranks: Ranks) -> Any:
        install(ranks)
        out: list[str] = []
        for name in ("one", "two"):
            thread = threading.Thread(target=draw, args=(out,), name=name)
            thread.start()
            if ranks.rank:
                random.Random()  # moves nothing that others get
            thread.join()
        draw(out)
        for _ in range(2):
            reader, writer = os.pipe()
            if not (pid := os.fork()):
                own: list[str] = []
                draw(own)
                os.write(writer, own[0].encode())
                os._exit(0)
            os.waitpid(pid, 0)
            out.append(os.read(reader, 16).decode())
        return out

    first, second = (end.good for end in on_ranks(tmp_path, act))
    assert first == second
    assert len(set(first)) == 5


def test_all_is_put_back(tmp_path: Path) -> None:
    def held() -> list[Any]:
        return [
            os.urandom, random._urandom, random.Random.seed, uuid.uuid1, torch.seed,  # type: ignore[attr-defined]
            vars(torch.Generator)["seed"], np.random.bit_generator.randbits,  # type: ignore[attr-defined]
        ]  # fmt: skip

    def act(ranks: Ranks) -> Any:
        before = held()
        undo = install(ranks)
        changed = [a is not b for a, b in zip(before, held(), strict=True)]
        undo.close()
        return [changed, held() == before]

    assert [end.good for end in on_ranks(tmp_path, act)] == [[[True] * 7, True]] * 2
