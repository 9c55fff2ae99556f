from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fasttrain.files import everybodys, owned
from fasttrain.launch.run_dir.paths import choose_cache, secure_cache
from fasttrain.model.decision import Source, SourceKind
from fasttrain.model.plan import EnvVar, LaunchPlan

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
SOMEBODY = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def compiled(plan: LaunchPlan) -> Callable[[Path], LaunchPlan]:
    """Return a plan that keeps compiled kernels in a folder."""
    source = Source(SourceKind.DEFAULT, "default")
    return lambda folder: replace(plan, environment=(EnvVar(VARIABLE, str(folder), "why", source),))


def test_the_cache_of_the_user(environ: dict[str, str], tmp_path: Path) -> None:
    usual = tmp_path / "cache" / "fasttrain"
    assert choose_cache(environ, "/run") == (str(usual), "")
    assert not usual.exists(), "a dry run makes nothing"
    (usual / "inductor").mkdir(parents=True)
    assert choose_cache(environ, "/run") == (str(usual), "")


@pytest.mark.parametrize("which", ["fasttrain", "fasttrain/inductor"])
def test_a_cache_that_others_could_fill_is_not_taken(
    environ: dict[str, str], tmp_path: Path, which: str
) -> None:
    (tmp_path / "cache" / "fasttrain" / "inductor").mkdir(parents=True)
    (tmp_path / "cache" / which).chmod(0o777)
    folder, note = choose_cache(environ, "/run")
    assert folder == "/run/cache"
    assert note.startswith(f"{tmp_path / 'cache' / which} ")
    assert everybodys("it") in note


def test_a_parent_that_everybody_may_write(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert choose_cache(environ, "/run")[0] == "/run/cache"


@as_root
def test_somebody_elses_cache_is_not_taken(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "cache" / "fasttrain").mkdir(parents=True)
    os.chown(tmp_path / "cache" / "fasttrain", SOMEBODY, -1)
    folder, note = choose_cache(environ, "/run")
    assert folder == "/run/cache"
    assert owned("it", SOMEBODY) in note


def test_the_folder_is_made_private(
    environ: dict[str, str], tmp_path: Path, compiled: Callable[[Path], LaunchPlan]
) -> None:
    folder = tmp_path / "cache" / "fasttrain" / "inductor"
    folder.parent.mkdir(parents=True, mode=0o755)
    assert secure_cache(compiled(folder), environ) == ()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)]
    assert modes == [0o700, 0o700]
    assert VARIABLE not in environ


def test_one_that_changed_since_it_was_planned_is_left(
    environ: dict[str, str], tmp_path: Path, compiled: Callable[[Path], LaunchPlan]
) -> None:
    folder = tmp_path / "cache" / "fasttrain" / "inductor"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    plan = compiled(folder)
    (told,) = secure_cache(plan, environ)
    assert environ[VARIABLE] == f"{plan.run_dir}/cache/inductor"
    assert everybodys("it") in told


def test_of_the_users_own_choice_it_is_only_told(
    environ: dict[str, str], tmp_path: Path, compiled: Callable[[Path], LaunchPlan]
) -> None:
    (tmp_path / "shared").mkdir()
    assert secure_cache(compiled(tmp_path / "shared"), environ) == ()
    (tmp_path / "shared").chmod(0o777)
    (told,) = secure_cache(compiled(tmp_path / "shared"), environ)
    assert f" {tmp_path / 'shared'} " in told
    assert everybodys("it") in told
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o777
    assert VARIABLE not in environ


def test_without_compiling_nothing_is_made(plan: LaunchPlan, environ: dict[str, str]) -> None:
    assert secure_cache(replace(plan, environment=()), environ) == ()
    assert not Path(environ["XDG_CACHE_HOME"]).exists()
