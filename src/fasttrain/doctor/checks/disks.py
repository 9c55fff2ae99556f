"""Checks of the folders that runs write to."""

from __future__ import annotations

from collections.abc import Iterator

from fasttrain.doctor.checks.words import check, size
from fasttrain.files.writing import FEW_BYTES
from fasttrain.model.examination import Disk, Examination, Finding
from fasttrain.planning.describe import and_join

_NETWORKS = frozenset({"nfs", "nfs3", "nfs4", "cifs", "smb3", "fuse.sshfs"})

_NAMES = {"runs": "run directories", "cache": "the cache", "temporary": "temporary files"}
_ELSEWHERE = {
    "runs": "name another folder with --run-dir",
    "cache": "set XDG_CACHE_HOME or TORCHINDUCTOR_CACHE_DIR to another folder",
    "temporary": "set TMPDIR to another folder",
}
_USES = {
    "runs": "plan, logs and receipt of a run go there",
    "cache": "compiled kernels are kept there",
    "temporary": "compilers and processes that talk to each other put files there",
}


@check("disk-space", "room for checkpoints, caches and temporary files")
def _space(seen: Examination) -> Iterator[Finding]:
    # Folders of one file system share what is free of it.
    shared: dict[tuple[int, str], list[Disk]] = {}
    for disk in seen.host.disks:
        if disk.writable and disk.free_bytes < FEW_BYTES:
            shared.setdefault((disk.free_bytes, disk.filesystem), []).append(disk)
    for (free, _), disks in shared.items():
        purposes = and_join(f"{_NAMES[disk.purpose]} ({disk.path})" for disk in disks)
        yield _space.finding(
            "warning" if free else "error",
            f"{size(free) if free else 'nothing'} is free for {purposes}",
            why="a checkpoint that doesn't fit ends the run that writes it",
            fix=f"delete what is old (du -xh {disks[0].path} | sort -h | tail), or "
            + _ELSEWHERE[disks[0].purpose],
        )


@check("disk-access", "whether the folders that a run writes to can be written")
def _access(seen: Examination) -> Iterator[Finding]:
    for disk in seen.host.disks:
        if not disk.writable:
            yield _access.finding(
                "warning" if disk.purpose == "cache" else "error",
                f"{disk.path}, for {_NAMES[disk.purpose]}, can't be written",
                why=_USES[disk.purpose],
                fix=_ELSEWHERE[disk.purpose],
            )


@check("noexec", "whether compiled kernels can run from where they are kept")
def _noexec(seen: Examination) -> Iterator[Finding]:
    for disk in seen.host.disks:
        if disk.writable and not disk.executable and disk.purpose != "runs":
            yield _noexec.finding(
                "warning",
                f"{disk.path}, for {_NAMES[disk.purpose]}, is mounted noexec",
                why="torch.compile builds libraries there, and can't load them",
                fix=_ELSEWHERE[disk.purpose],
            )


@check("network-disk", "whether caches and runs lie on a network file system")
def _network(seen: Examination) -> Iterator[Finding]:
    for disk in seen.host.disks:
        if disk.filesystem in _NETWORKS and disk.purpose != "temporary":
            yield _network.finding(
                "hint",
                f"{disk.path}, for {_NAMES[disk.purpose]}, is on {disk.filesystem}",
                why="many small files and locks are slow over the network",
                fix=f"{_ELSEWHERE[disk.purpose]}, on a disk of this machine",
            )


CHECKS = (_space, _access, _noexec, _network)
