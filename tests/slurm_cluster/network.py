"""Ports, addresses, bridges and names that are free on this machine."""

from __future__ import annotations

import os
import random
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

from slurm_cluster.tools import ClusterError, NotYetError, run, wait_for

_PROBE = (
    "ip link add v0 type veth peer name v1 && ip link add b0 type bridge && mount -t tmpfs t /tmp"
)
UNSHARE = ("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc")
HOSTS = Path("/etc/hosts")


def can_netns() -> bool:
    """Say whether this user may make network namespaces, veth pairs and bridges."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
        return False
    return run([*UNSHARE, "sh", "-c", _PROBE], check=False).returncode == 0


def free_ports(count: int, low: int = 10000, high: int = 20000) -> list[int]:
    """Return free TCP ports below the kernel's ephemeral range."""
    ports: list[int] = []
    held: list[socket.socket] = []
    try:
        while len(ports) < count:
            port = random.randrange(low, high)
            held.append(socket.socket())
            try:
                held[-1].bind(("0.0.0.0", port))
            except OSError:
                continue
            ports.append(port)
    finally:
        for sock in held:
            sock.close()
    return ports


def free_subnet() -> int:
    """Return an N such that 10.N.213.0/24 overlaps no route or address, with no link slN*."""
    addresses = run(["ip", "-4", "-o", "addr"]).stdout
    routes = run(["ip", "-4", "route", "show", "table", "all"]).stdout
    links = {name for _, name in socket.if_nameindex()}
    for n in random.sample(range(64, 250), 186):
        used = f" 10.{n}." in f" {addresses}{routes}" or f"\n10.{n}." in routes
        if not used and not any(name.startswith(f"sl{n}") for name in links):
            return n
    raise ClusterError("no free 10.x subnet")


def add_bridge(name: str, address: str) -> None:
    """Make the bridge that joins the nodes, with this machine's own address on it."""
    run(["ip", "link", "add", name, "type", "bridge"])
    run(["ip", "addr", "add", f"{address}/24", "dev", name])
    run(["ip", "link", "set", name, "up"])


def join(link: str, bridge: str, pid: int) -> None:
    """Add to the network of a process an eth0 that ends at a bridge."""
    own = Path("/proc/self/ns/net").readlink()

    def has_own() -> None:
        try:
            there = Path(f"/proc/{pid}/ns/net").readlink()
        except OSError as error:
            raise NotYetError(str(error)) from None
        if there == own:
            raise NotYetError("still in ours")

    wait_for(f"a network of process {pid}", has_own, 20)
    run(["ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", pid])
    run(["ip", "link", "set", link, "master", bridge, "up"])


def delete_links(names: Iterable[str]) -> None:
    """Delete those links that are there still."""
    for name in names:
        if Path(f"/sys/class/net/{name}").exists():
            run(["ip", "link", "del", name], check=False)


def wait_until_gone(link: str) -> None:
    """Wait for the kernel, which clears the network of dead processes a moment later."""

    def gone() -> None:
        if Path(f"/sys/class/net/{link}").exists():
            raise NotYetError("still there")

    wait_for(f"the end of {link}", gone, 20)


def edit_hosts(tag: str, lines: list[str]) -> None:
    """Replace a cluster's lines in /etc/hosts, in place: it may be a bind mount."""
    old = HOSTS.read_text()
    keep = [line for line in old.splitlines() if not line.endswith(tag)]
    new = "\n".join(keep + [f"{line} {tag}" for line in lines]) + "\n"
    if new != old:
        HOSTS.write_text(new)
