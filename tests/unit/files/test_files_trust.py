"""Foreign owners need root: without it, what is owned by somebody else can't be made here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fasttrain.files import doubts, everybodys, owned, refused, shared, steps

SOMEBODY = 54321  # a number that no user of a test machine has
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A private folder in a parent, below a folder that nobody else can enter or write."""
    made = tmp_path / "parent" / "folder"
    made.mkdir(parents=True, mode=0o700)
    return made


def why(path: Path) -> str:
    danger = refused(path)
    return danger.why if danger else ""


def test_a_private_folder_is_trusted(folder: Path) -> None:
    assert refused(folder) is None
    assert refused(folder / "to" / "come") is None
    assert [path for path, _ in steps(folder)][-2:] == [folder.parent, folder]


def test_readers_are_not_writers(folder: Path) -> None:
    folder.chmod(0o755)
    assert refused(folder) is None


@pytest.mark.parametrize("mode", [0o702, 0o1777])
def test_a_folder_that_everybody_may_write_to(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert refused(folder) == (everybodys("it"), f"chmod go-w {folder}")


@as_root
@pytest.mark.parametrize("mode", [0o770, 0o3770])
def test_a_folder_that_a_group_may_write_to(folder: Path, mode: int) -> None:
    os.chown(folder, -1, SOMEBODY)
    folder.chmod(mode)
    assert refused(folder) == (shared("it", SOMEBODY), f"chmod g-w {folder}")
    assert str(SOMEBODY) in why(folder)


@as_root
def test_the_group_of_the_user_alone_is_the_user(folder: Path) -> None:
    folder.chmod(0o770)  # root's group is called root
    assert refused(folder) is None


@as_root
def test_somebody_elses_folder_is_refused_to_root_too(folder: Path) -> None:
    os.chown(folder, SOMEBODY, -1)
    assert why(folder) == owned("it", SOMEBODY)
    assert str(SOMEBODY) in why(folder)


def test_a_parent_in_which_everybody_may_rename(folder: Path) -> None:
    folder.parent.chmod(0o777)
    danger = refused(folder)
    assert danger is not None
    assert danger.why.startswith(f"{everybodys(folder.parent)},")
    assert danger.mend == f"chmod o-w {folder.parent}"
    assert refused(folder / "to" / "come") == danger


def test_the_sticky_bit_keeps_others_from_renaming(folder: Path) -> None:
    folder.parent.chmod(0o1777)
    assert refused(folder) is None


@as_root
def test_a_link_is_as_good_as_its_owner(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder.parent)
    assert refused(link / "folder") is None
    os.chown(link, SOMEBODY, -1, follow_symlinks=False)
    assert why(link / "folder") == why(link) == owned(f"the link {link}", SOMEBODY)


def test_the_folders_behind_a_link_count(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    folder.parent.chmod(0o777)
    assert why(link).startswith(f"{everybodys(folder.parent)},")
    assert why(link / "below").startswith(f"{everybodys(folder.parent)},")


def test_links_in_a_circle_come_to_an_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        refused(tmp_path / "a" / "folder")


@as_root
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda path: os.chown(path, SOMEBODY, -1), owned),
        (lambda path: (os.chown(path, -1, SOMEBODY), path.chmod(0o775)), shared),
    ],
    ids=["owner", "group"],
)  # fmt: skip
def test_who_could_put_another_folder_there_is_told(
    folder: Path, tmp_path: Path, change: Callable[[Path], object], told: Callable[..., str]
) -> None:
    change(folder.parent)
    assert refused(folder) is None
    assert doubts(folder, tmp_path) == [told(folder.parent, SOMEBODY)]
    # They could as well change the scripts that are run there.
    assert doubts(folder, folder.parent) == []


@as_root
def test_a_group_can_do_nothing_in_a_sticky_folder(folder: Path, tmp_path: Path) -> None:
    os.chown(folder.parent, -1, SOMEBODY)
    folder.parent.chmod(0o1775)
    assert doubts(folder, tmp_path) == []
