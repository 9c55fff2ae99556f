"""The nodes of a cluster: namespaces of their own, or slurmd side by side."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from dataclasses import asdict
from pathlib import Path

from slurm_cluster import network
from slurm_cluster.cluster import Cluster
from slurm_cluster.options import Controller, Node, Options
from slurm_cluster.tools import ClusterError, NotYetError, Words, connect, say, wait_for

_HERE = Path(__file__).resolve().parent
_NOT_UP = ("down", "drain", "inval", "unk", "fail", "error")


def lay_out(cluster: Cluster, options: Options) -> tuple[Controller, list[Node]]:
    """Assign addresses and ports to all, and make what they need of this machine's network."""
    ctl_port, dbd_port, *node_ports = network.free_ports(2 + options.nodes)
    names = [f"{options.prefix}{at + 1}" for at in range(options.nodes)]
    host = socket.gethostname().split(".")[0]
    if cluster.info["net"] == "ports":
        pairs = zip(names, node_ports, strict=True)
        nodes = [Node(name, host, "127.0.0.1", port) for name, port in pairs]
        cluster.save(nodes=[asdict(node) for node in nodes])
        _name_in_hosts(cluster, names)
        return Controller(host, "127.0.0.1", ctl_port, dbd_port), nodes
    n = network.free_subnet()
    nodes = [
        Node(name, name, f"10.{n}.213.{at + 11}", 6818, f"sl{n}n{at + 1}")
        for at, name in enumerate(names)
    ]
    controller = Controller(host, f"10.{n}.213.1", ctl_port, dbd_port)
    cluster.save(bridge=f"sl{n}br", nodes=[asdict(node) for node in nodes])
    network.add_bridge(cluster.bridge, controller.addr)
    known = [("127.0.0.1", "localhost"), ("::1", "localhost"), (controller.addr, host)]
    known += [(node.addr, node.name) for node in nodes]
    (cluster.dir / "hosts").write_text("".join(f"{addr} {name}\n" for addr, name in known))
    return controller, nodes


def _name_in_hosts(cluster: Cluster, names: list[str]) -> None:
    if not os.access(network.HOSTS, os.W_OK):
        say("/etc/hosts cannot be written: node names will not resolve (MASTER_ADDR)")
        return
    tag = f"# slurm_cluster {cluster.dir}"
    cluster.save(hosts_tag=tag)
    network.edit_hosts(tag, [f"127.0.0.1 {name}" for name in names])


def start_node(cluster: Cluster, node: Node) -> None:
    """Start slurmd, in namespaces of its own or beside the others."""
    (cluster.dir / "spool" / node.name).mkdir(exist_ok=True)
    if not node.link:
        cluster.start(node.name, ["slurmd", "-D", "-f", cluster.conf, "-N", node.name])
        return
    inside: Words = [sys.executable, "-S", _HERE, "_node", cluster.dir, node.name, node.addr]
    proc = cluster.start(node.name, [*network.UNSHARE, "--kill-child", *inside])
    network.join(node.link, cluster.bridge, proc.pid)


def wait_until_idle(cluster: Cluster, names: list[str]) -> None:
    """Wait until every node is up and free."""

    def idle() -> None:
        states = cluster.node_states()
        bad = [
            f"{name} {state}" for name, state in states.items() if re.match("inval|drain", state)
        ]
        if bad:
            why = cluster.client("sinfo", "-h", "-N", "-R", "-o", "%N %E", check=False).stdout
            raise ClusterError(f"slurmctld refuses nodes: {', '.join(bad)}\n{why}")
        if sorted(states) != sorted(names) or any(state != "idle" for state in states.values()):
            raise NotYetError(f"{states}")

    wait_for("the nodes", idle, 60, cluster.procs)


def is_up(state: str) -> bool:
    """Say whether a node in this state takes jobs; a star says that it doesn't answer."""
    return not state.startswith(_NOT_UP) and not state.endswith("*")


def pull_plug(cluster: Cluster, name: str) -> None:
    """End a node as a power cut would: with it ends whatever ran in its namespaces."""
    _find(cluster, name)
    proc = cluster.proc(name)
    if proc is None or not proc.alive():
        raise ClusterError(f"{name} doesn't run")
    proc.kill()


def plug_in(cluster: Cluster, name: str) -> None:
    """Start a node again that has ended."""
    node = _find(cluster, name)
    proc = cluster.proc(name)
    if proc is not None and proc.alive():
        raise ClusterError(f"{name} runs already")
    if node.link:
        network.wait_until_gone(node.link)
    start_node(cluster, node)
    wait_for(f"slurmd of {name}", lambda: connect((node.addr, node.port)), 60)

    def up() -> None:
        state = cluster.node_states().get(name, "unknown")
        if not is_up(state):
            raise NotYetError(state)

    wait_for(name, up, 60)


def _find(cluster: Cluster, name: str) -> Node:
    names = {node.name: node for node in cluster.nodes}
    if name not in names:
        raise ClusterError(f"no node {name}: there are {', '.join(names)}")
    return names[name]


def end_nodes(cluster: Cluster) -> None:
    """End the nodes and what they had of this machine's network."""
    procs = [proc for node in cluster.nodes if (proc := cluster.proc(node.name))]
    apart = bool(cluster.bridge)
    # Killing the first process of a node is like pulling the plug: the kernel ends all in it.
    for proc in procs:
        proc.signal(signal.SIGKILL if apart else signal.SIGTERM)
    for proc in procs:
        proc.kill() if apart else proc.stop()
    if apart:
        network.delete_links([*(node.link for node in cluster.nodes), cluster.bridge])
    if tag := cluster.info.get("hosts_tag"):
        network.edit_hosts(tag, [])
