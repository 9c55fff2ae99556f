"""Limits and surroundings, on recorded trees and on this machine."""

from __future__ import annotations

import os
import resource
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain.hardware import host_state
from fasttrain.hardware.host_state import (
    compiled_folder,
    container,
    find_disks,
    hostname_resolves,
    memory_available_bytes,
    temporary_folder,
)
from fasttrain.hardware.runs import RunProcess
from fasttrain.model.machine import Disk, HostState

GIB = 2**30

SERVER = {
    "proc/loadavg": "31.50 30.00 29.00 12/3456 7890\n",
    "proc/meminfo": f"MemTotal: {512 * 2**20} kB\nMemAvailable:   {300 * 2**20} kB\n",
    "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
    "proc/sys/kernel/osrelease": "6.8.0-generic\n",
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/cpu.max": "150000 100000\n",
    "sys/devices/system/cpu/online": "0-63,128-191\n",
    "sys/devices/system/node/node0/cpulist": "0-63\n",
    "sys/devices/system/node/node1/cpulist": "128-191\n",
    "sys/devices/system/node/node2/cpulist": "\n",  # memory of an accelerator
    ".dockerenv": "",
}


def look(host: Any, tmp_path: Path, runs: Any = None) -> HostState:
    return host_state.host_state(host, run_root=tmp_path, runs=runs or {})


def test_a_server_is_told(make_host: Any, tmp_path: Path) -> None:
    runs = {os.getpid(): RunProcess("/runs/a", orphan=True), 1: RunProcess("/runs/b", orphan=False)}
    state = look(make_host(SERVER, HOME=str(tmp_path)), tmp_path, runs)
    assert (state.load, state.logical_cpus, state.numa_nodes) == (31.5, 128, 2)
    assert state.memory_available_bytes == 300 * GIB
    assert (state.ports, state.quota_cores) == ((32768, 60999), 1.5)
    assert (state.container, state.kernel) == ("docker", "6.8.0-generic")
    assert [(one.pid, one.run) for one in state.orphans] == [(os.getpid(), "/runs/a")]
    assert [disk.purpose for disk in state.disks] == ["runs", "cache", "temporary"]


def test_an_empty_tree_leaves_all_of_it_unknown(make_host: Any, tmp_path: Path) -> None:
    state = look(make_host(HOME=str(tmp_path)), tmp_path)
    assert (state.shm_bytes, state.shm_free_bytes) == (None, None)
    assert (state.load, state.numa_nodes, state.ports) == (None, None, None)
    assert (state.memory_available_bytes, state.quota_cores) == (None, None)
    assert (state.container, state.orphans) == ("", ())


def test_rubbish_is_unknown_too(make_host: Any, tmp_path: Path) -> None:
    files = {name: "\x00 x y z-\n" for name in SERVER if name != ".dockerenv"}
    state = look(make_host(files, HOME=str(tmp_path)), tmp_path)
    assert (state.load, state.ports, state.memory_available_bytes) == (None, None, None)
    assert state.logical_cpus == os.cpu_count()


def test_limits_of_this_process_are_read(make_host: Any, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        state = look(make_host(HOME=str(tmp_path)), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert state.open_files == (100, hard)


def test_no_limit_is_minus_one(
    make_host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on macOS, where infinity is a large number.
    monkeypatch.setattr(resource, "RLIM_INFINITY", 2**63 - 1)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**63 - 1, 2**63 - 1))
    state = look(make_host(HOME=str(tmp_path)), tmp_path)
    assert (state.open_files, state.locked_memory_bytes) == ((-1, -1), -1)


def test_shared_memory_is_measured(make_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_host()
    stat = SimpleNamespace(f_blocks=16384, f_bavail=4096, f_frsize=4096)
    found = {host.root / "dev/shm": stat}
    monkeypatch.setattr(os, "statvfs", found.__getitem__)
    assert host_state.shared_memory(host) == (64 * 2**20, 16 * 2**20)


def test_memory_is_at_most_what_the_cgroup_allows(make_host: Any) -> None:
    files = {**SERVER, "sys/fs/cgroup/memory.max": f"{4 * GIB}\n"}
    assert memory_available_bytes(make_host(files)) == 4 * GIB


@pytest.mark.parametrize(
    ("files", "environ", "kind"),
    [
        ({}, {}, ""),
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": ""}, {}, "podman"),
        ({"run/systemd/container": "lxc\n"}, {}, "lxc"),
        ({"run/systemd/container": "lxc-libvirt\n"}, {}, "lxc"),
        ({}, {"APPTAINER_CONTAINER": "/a.sif"}, "apptainer"),
        ({}, {"SINGULARITY_CONTAINER": "/a.sif"}, "apptainer"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
    ],
)
def test_containers_are_told_apart(
    make_host: Any, files: dict[str, str], environ: dict[str, str], kind: str
) -> None:
    assert container(make_host(files, **environ)) == kind


def test_the_local_name_resolves() -> None:
    assert hostname_resolves("localhost")


@pytest.mark.parametrize("name", ["a..b", "x" * 70])
def test_what_is_no_name_does_not_resolve(name: str) -> None:
    assert not hostname_resolves(name)


def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert not hostname_resolves("node1")


def test_a_resolver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: end.wait(10) or ["address"])
    try:
        assert not hostname_resolves("node1", timeout_s=0.05)
    finally:
        end.set()


def disk(host: Any, run_root: Path, **options: Any) -> Disk:
    return find_disks(host, run_root, **options)[0]


def test_a_folder_that_is_not_there_yet_stands_for_the_one_above(
    make_host: Any, tmp_path: Path
) -> None:
    found = disk(make_host(HOME="/"), tmp_path / "a" / "b")
    assert (found.path, found.writable) == (str(tmp_path), True)
    assert found.free_bytes > 0


def test_what_can_be_started_and_written_is_told(
    make_host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = SimpleNamespace(f_bavail=10, f_frsize=4096, f_flag=os.ST_NOEXEC | os.ST_NODEV)
    monkeypatch.setattr(os, "statvfs", lambda _: stat)
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = disk(make_host(HOME="/"), tmp_path)
    assert (found.free_bytes, found.executable, found.writable) == (40960, False, False)
    stat.f_flag = os.ST_NODEV
    assert disk(make_host(HOME="/"), tmp_path).executable


def test_file_systems_are_those_of_the_nearest_mount(make_host: Any, tmp_path: Path) -> None:
    home = tmp_path / "with blank"
    home.mkdir()
    mounts = (
        "/dev/vda / ext4 rw 0 0\n"
        f"old {tmp_path}/with\\040blank xfs rw 0 0\n"
        f"srv:/x {tmp_path}/with\\040blank nfs4 rw 0 0\n"
        f"x {tmp_path}/with tmpfs rw 0 0\n"
    )
    host = make_host({"proc/self/mounts": mounts}, HOME="/")
    assert disk(host, home / "runs").filesystem == "nfs4"
    assert disk(host, tmp_path).filesystem == "ext4"
    (tmp_path / "link").symlink_to(home)
    assert disk(host, tmp_path / "link").filesystem == "nfs4"


def test_a_server_that_is_gone_does_not_hold_us(
    make_host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()
    monkeypatch.setattr(host_state.os, "statvfs", lambda _: end.wait(10))
    host = make_host({"proc/self/mounts": f"srv:/x {tmp_path} nfs4 rw 0 0\n"}, HOME="/")
    try:
        assert disk(host, tmp_path, timeout_s=0.05) == Disk(
            "runs", str(tmp_path), 0, writable=False, executable=False, filesystem="nfs4"
        )
    finally:
        end.set()


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HOME": "/home/u"}, "/home/u/.cache/fasttrain/inductor"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/scratch"}, "/scratch/fasttrain/inductor"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "here"}, "/home/u/.cache/fasttrain/inductor"),
        ({"HOME": "/home/u", "TORCHINDUCTOR_CACHE_DIR": "/fast"}, "/fast"),
    ],
)
def test_compiled_kernels_go_where_a_run_puts_them(environ: dict[str, str], folder: str) -> None:
    assert compiled_folder(environ) == Path(folder)


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({}, "/tmp"),
        ({"TMPDIR": ""}, "/tmp"),
        ({"TMP": "/c", "TEMP": "/b", "TMPDIR": "/a"}, "/a"),
        ({"TMP": "/c", "TEMP": "/b"}, "/b"),
    ],
)
def test_temporary_files_go_where_python_puts_them(environ: dict[str, str], folder: str) -> None:
    assert temporary_folder(environ) == Path(folder)
