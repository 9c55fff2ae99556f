"""Brings a cluster up and down."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import asdict

from slurm_cluster import accounting, network, nodes, packages, steps
from slurm_cluster.cluster import Cluster
from slurm_cluster.configuration import slurm_conf, write_gres_conf
from slurm_cluster.options import Options
from slurm_cluster.tools import ClusterError, UnavailableError, run, say, wait_for

_LONGEST_DIR = 80  # a Unix socket's address has 107 bytes, and names of sockets follow
_DAEMONS = ("slurmctld", "slurmdbd", "mariadbd", "munged")  # in the order in which they end


def up(cluster: Cluster, options: Options, *, install: bool = True, keep: bool = False) -> None:
    """Bring a cluster up; do nothing where the same one runs.

    Args:
        cluster: Its directory.
        options: What it is to be.
        install: Whether packages may be installed.
        keep: Leave a start that failed as it is.

    Raises:
        UnavailableError: This machine can't hold it.
        ClusterError: Another one runs in its directory, or it didn't come up.
    """
    if _already_up(cluster, options):
        return
    if len(str(cluster.dir)) > _LONGEST_DIR:
        raise ClusterError(f"--dir is too long for a Unix socket's address: {cluster.dir}")
    _ensure_packages(options, install)
    began = time.monotonic()
    cluster.create(options, _net(options))
    try:
        _start_all(cluster, options)
    except BaseException:
        if not keep:
            down(cluster, keep=True)
            say(f"failed; logs kept in {cluster.dir}/log")
        raise
    cluster.save(ready=True)
    took = f"{time.monotonic() - began:.1f} s ({cluster.info['net']}, {cluster.dir})"
    say(f"{options.nodes} nodes up in {took}")


def _already_up(cluster: Cluster, options: Options) -> bool:
    if not cluster.load():
        return False
    if not (cluster.alive() and cluster.info.get("ready")):
        say(f"clearing what is left of a dead cluster in {cluster.dir}")
        down(cluster)
        return False
    if cluster.info["wanted"] != asdict(options):
        wanted = cluster.info["wanted"]
        raise ClusterError(f"already up in {cluster.dir}, with other options: {wanted}")
    say(f"already up in {cluster.dir}")
    return True


def _ensure_packages(options: Options, install: bool) -> None:
    needed = dict(packages.SLURM)
    if options.accounting == "yes":
        needed |= packages.ACCOUNTING
    if options.net == "netns" or (options.net == "auto" and os.geteuid() == 0):
        needed |= packages.NAMESPACES
    packages.ensure(needed, install=install)


def _net(options: Options) -> str:
    if options.net == "ports":
        return "ports"
    if network.can_netns():
        return "netns"
    if options.net == "netns":
        raise UnavailableError(
            "this user can't make network namespaces here (--net ports needs none)"
        )
    return "ports"


def _start_all(cluster: Cluster, options: Options) -> None:
    controller, laid_out = nodes.lay_out(cluster, options)
    write_gres_conf(cluster.dir, options)
    cluster.conf.write_text(slurm_conf(cluster.dir, options, controller, laid_out))
    _start_munged(cluster)
    if options.accounting == "yes":
        database = accounting.start_database(cluster)
        accounting.start_slurmdbd(cluster, options, controller, database)
    slurmctld = cluster.start("slurmctld", ["slurmctld", "-D", "-f", cluster.conf])
    ping = ("scontrol", "ping")
    wait_for("slurmctld", lambda: cluster.client(*ping, timeout_s=30), 60, [slurmctld])
    for node in laid_out:
        nodes.start_node(cluster, node)
    nodes.wait_until_idle(cluster, [node.name for node in laid_out])


def _start_munged(cluster: Cluster) -> None:
    """Start munged with a key and a socket of its own."""
    home = cluster.dir / "munge"
    home.chmod(0o755)
    key = home / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    files = [f"--{name}-file={home / name}" for name in ("key", "pid", "log", "seed")]
    socket = home / "socket"
    munged = cluster.start("munged", ["munged", "--foreground", f"--socket={socket}", *files])
    wait_for("munged", lambda: run(["munge", "-S", socket, "-n"]), 20, [munged])


def down(cluster: Cluster, *, keep: bool = False) -> None:
    """End a cluster and remove its directory, or all but its directory and logs."""
    if not cluster.procs and not cluster.info and not cluster.load():
        say(f"no cluster in {cluster.dir}")
        return
    if cluster.info.get("net") == "ports":
        steps.end_jobs(cluster)
    nodes.end_nodes(cluster)
    for name in _DAEMONS:
        if proc := cluster.proc(name):
            proc.stop()
    cluster.procs = []
    if keep:
        shutil.rmtree(cluster.dir / "pids", ignore_errors=True)
        cluster.save(ready=False)
    else:
        shutil.rmtree(cluster.dir, ignore_errors=True)
    say(f"down ({cluster.dir})")
