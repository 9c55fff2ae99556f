# ruff: noqa: T201
"""A throw-away SLURM cluster of several nodes on this one machine, for tests.

    python tests/slurm_cluster up [--nodes 2]     start it (nothing if it already runs)
    python tests/slurm_cluster hold               the same, and `down` when stdin ends
    python tests/slurm_cluster status             0: all up, 1: something is down, 3: no cluster
    python tests/slurm_cluster env                print what points sbatch, srun... at it
    python tests/slurm_cluster stop-node node2    like a power cut; start-node undoes it
    python tests/slurm_cluster down               end it and remove its directory

`up`, `hold` and `env` print `export SLURM_CONF=...` on stdout and everything else on stderr, so
`eval "$(python tests/slurm_cluster up)"` is enough to use it from a shell.

Everything lives in one directory (--dir, or $SLURM_CLUSTER_DIR, or a free name in the temporary
directory), except the packages, which come from Debian.

--net netns (the default for root) gives each node its own network, host name, process table and
/dev/shm, joined by a bridge: node names resolve, ports do not collide, a localhost is private to
its node. --net ports runs the slurmd of all nodes side by side on 127.0.0.1 and needs no
privilege beyond the installed packages.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from slurm_cluster import lifecycle, nodes, packages
from slurm_cluster.cluster import STATE, Cluster
from slurm_cluster.inside import be_node
from slurm_cluster.options import Options
from slurm_cluster.tools import ClusterError, UnavailableError, say

NO_CLUSTER, UNAVAILABLE, INTERRUPTED = 3, 69, 130


def main(argv: list[str] | None = None) -> int:
    """Run one command, and give its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    os.umask(0o022)
    packages.find_sbin()
    try:
        if argv[:1] == ["_node"]:
            return be_node(*argv[1:])
        given = _parser().parse_args(argv)
        return int(given.handle(Cluster(_pick_dir(given.dir)), given) or 0)
    except UnavailableError as error:
        say(error)
        return UNAVAILABLE
    except ClusterError as error:
        say(error)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _up(cluster: Cluster, given: argparse.Namespace) -> None:
    options = Options(**{field.name: getattr(given, field.name) for field in fields(Options)})
    with _alone(cluster.dir):
        lifecycle.up(cluster, options, install=given.install, keep=given.keep)
    _env(cluster, given)


def _hold(cluster: Cluster, given: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _up(cluster, given)
    try:
        sys.stdin.read()
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)
        _down(cluster, given)


def _env(cluster: Cluster, _: argparse.Namespace) -> None:
    if not cluster.load():
        raise ClusterError(f"no cluster in {cluster.dir}")
    print(f"export SLURM_CONF={cluster.conf}", flush=True)


def _down(cluster: Cluster, given: argparse.Namespace) -> None:
    with _alone(cluster.dir):
        # Read anew: nodes may have been stopped and started since.
        lifecycle.down(Cluster(cluster.dir), keep=given.keep)


def _status(cluster: Cluster, _: argparse.Namespace) -> int:
    if not cluster.load():
        say(f"no cluster in {cluster.dir}")
        return NO_CLUSTER
    for proc in cluster.procs:
        print(f"{proc.name:12} pid {proc.pid:<8} {'running' if proc.alive() else 'ENDED'}")
    slurmctld = cluster.proc("slurmctld")
    if slurmctld is None or not slurmctld.alive():
        return 1
    states = cluster.node_states()
    for name, state in states.items():
        print(f"{name:12} {state}")
    print(f"SLURM_CONF={cluster.conf}")
    return 0 if cluster.alive() and states and all(map(nodes.is_up, states.values())) else 1


def _stop_node(cluster: Cluster, given: argparse.Namespace) -> None:
    cluster.load()
    nodes.pull_plug(cluster, given.node)


def _start_node(cluster: Cluster, given: argparse.Namespace) -> None:
    cluster.load()
    nodes.plug_in(cluster, given.node)


def _parser() -> argparse.ArgumentParser:
    raw, shown = argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser("slurm_cluster", description=__doc__, formatter_class=raw)
    where = argparse.ArgumentParser(add_help=False)
    directory = os.environ.get("SLURM_CLUSTER_DIR")
    where.add_argument("--dir", default=directory, help="the cluster's directory")
    commands = parser.add_subparsers(required=True)
    for name, handle in (("up", _up), ("hold", _hold)):
        command = commands.add_parser(name, parents=[where], formatter_class=shown)
        _add_options(command)
        command.set_defaults(handle=handle)
    command = commands.add_parser("down", parents=[where])
    command.add_argument("--keep", action="store_true", help="keep the directory and its logs")
    command.set_defaults(handle=_down)
    for name, ask in (("status", _status), ("env", _env)):
        commands.add_parser(name, parents=[where]).set_defaults(handle=ask)
    for name, act in (("stop-node", _stop_node), ("start-node", _start_node)):
        command = commands.add_parser(name, parents=[where])
        command.add_argument("node")
        command.set_defaults(handle=act)
    return parser


def _add_options(command: argparse.ArgumentParser) -> None:
    numbers = {
        "nodes": (2, "how many there are"),
        "gpus": (8, "pretended GPUs of each node"),
        "cpus": (64, "claimed CPUs of each node"),
        "mem-mb": (512000, "claimed memory of each node"),
        "kill-wait": (5, "seconds from SIGTERM to SIGKILL"),
        "grace-time": (30, "seconds that a preempted job of partition low has"),
        "requeue-delay": (5, "seconds that a requeued job waits, 5 or more"),
        "slurmd-timeout": (300, "seconds until a silent node is down"),
    }
    for name, (default, text) in numbers.items():
        command.add_argument(f"--{name}", type=int, default=default, help=text)
    text = "another pretended resource of each node, such as npu:8"
    command.add_argument("--gres", action="append", default=[], help=text)
    command.add_argument("--prefix", default="node", help="node names: PREFIX1, PREFIX2...")
    command.add_argument("--cluster-name", default="test", help="as sacct shows it")
    command.add_argument("--net", choices=["auto", "netns", "ports"], default="auto", help="how")
    text = "slurmdbd, so that sacct works"
    command.add_argument("--accounting", choices=["yes", "no"], default="yes", help=text)
    text = "never call apt-get"
    command.add_argument("--no-install", dest="install", action="store_false", help=text)
    text = "leave a start that failed as it is"
    command.add_argument("--keep", action="store_true", help=text)


def _pick_dir(given: str | None) -> Path:
    """Return the directory asked for, else the first free name: ours already, or not there."""
    if given:
        return Path(given).resolve()
    base = Path(tempfile.gettempdir()) / f"slurm_cluster-{os.geteuid()}"
    for suffix in ("", *(f"-{at}" for at in range(1, 100))):
        path = Path(f"{base}{suffix}").resolve()
        try:
            empty = (path / STATE).exists() or not any(path.iterdir())
            if path.stat().st_uid == os.geteuid() and empty:
                return path
        except FileNotFoundError:
            return path
        except OSError:
            continue
    raise ClusterError(f"no free directory like {base}")


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold a lock beside the directory, so that two `up` do not start two clusters."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    path = Path(f"{directory}.lock")
    while True:
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_same(lock.fileno(), path):
                continue  # its holder removed it while we waited
            try:
                yield
            finally:
                if not directory.exists():
                    path.unlink()
            return


def _is_same(descriptor: int, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
