"""What makes `sacct` work: a database of the cluster's own, and slurmdbd before it.

SLURM 22.05 ships no accounting into a file any more, only slurmdbd or none.
"""

from __future__ import annotations

from pathlib import Path

from slurm_cluster.cluster import Cluster
from slurm_cluster.configuration import own_name, write_slurmdbd_conf
from slurm_cluster.options import Controller, Options
from slurm_cluster.processes import Proc
from slurm_cluster.tools import connect, run, wait_for

_SQL = Path("/usr/share/mysql")
# mariadb-install-db runs these too, but needs the client's package.
_TABLES = (
    "mysql_system_tables",
    "mysql_performance_tables",
    "mysql_system_tables_data",
    "maria_add_gis_sp_bootstrap",
)


def start_database(cluster: Cluster) -> Proc:
    """Start a mariadbd in the cluster's directory, reached only through a socket there."""
    data = cluster.dir / "db"
    data.mkdir(mode=0o700, exist_ok=True)
    common = [
        "mariadbd", "--no-defaults", f"--user={own_name()}", f"--datadir={data}",
        "--innodb-log-file-size=8M", "--innodb-buffer-pool-size=64M",
        "--innodb-flush-log-at-trx-commit=0", "--innodb-flush-method=nosync",
        "--innodb-lock-wait-timeout=900",
    ]  # fmt: skip
    tables = "".join((_SQL / f"{name}.sql").read_text() for name in _TABLES)
    sql = f"create database mysql;\nuse mysql;\n{tables}create database slurm_acct_db;\n"
    run([*common, "--bootstrap"], input=sql, timeout_s=120)
    own = [f"--socket={cluster.dir}/db.sock", f"--pid-file={cluster.dir}/db.pid"]
    return cluster.start("mariadbd", [*common, "--skip-grant-tables", "--skip-networking", *own])


def start_slurmdbd(
    cluster: Cluster, options: Options, controller: Controller, database: Proc
) -> None:
    """Start slurmdbd on a database that is starting, and make the cluster known to it."""
    wait_for("mariadbd", lambda: connect(str(cluster.dir / "db.sock")), 60, [database])
    write_slurmdbd_conf(cluster.dir, controller.dbd_port)
    slurmdbd = cluster.start("slurmdbd", ["slurmdbd", "-D"])
    both = [slurmdbd, database]
    wait_for("slurmdbd", lambda: connect(("127.0.0.1", controller.dbd_port)), 60, both)
    add = ["sacctmgr", "-i", "-Q", "add", "cluster", options.cluster_name]
    wait_for("sacctmgr", lambda: cluster.client(*add), 30, both)
