"""A cluster's directory: what runs there, and how to start and ask more."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurm_cluster.options import Node, Options
from slurm_cluster.processes import Proc, proc_stat, start_time
from slurm_cluster.tools import Completed, Words, run

STATE = "cluster.json"
_JOBS_OWN = re.compile("SLURM|SLURMD|SBATCH|SRUN|SACCT")
# A process writes its own pid and start time before it becomes the program, so that `down` knows
# it even when the command that started it was killed meanwhile.
_RECORD = 'read -r line < /proc/$$/stat && printf "%s\\n" "$line" > "$0" && exec "$@"'


class Cluster:
    """One cluster, all of whose files lie in one directory."""

    def __init__(self, directory: Path) -> None:
        self.dir = directory
        self.info: dict[str, Any] = {}
        self.procs: list[Proc] = []

    @property
    def conf(self) -> Path:
        """Return the path that SLURM_CONF has to name."""
        return self.dir / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """Return the environment of daemons and clients: no SLURM_* of a surrounding job."""
        kept = {name: value for name, value in os.environ.items() if not _JOBS_OWN.match(name)}
        # The second points slurmdbd at our database: its storage host is "localhost".
        return {**kept, "SLURM_CONF": str(self.conf), "MYSQL_UNIX_PORT": f"{self.dir}/db.sock"}

    @property
    def nodes(self) -> list[Node]:
        """Return the nodes that it was set up with."""
        return [Node(**node) for node in self.info.get("nodes", [])]

    @property
    def bridge(self) -> str:
        """Return the bridge that joins the nodes; nothing where they have no own network."""
        return str(self.info.get("bridge", ""))

    def create(self, options: Options, net: str) -> None:
        """Make the directory."""
        self.dir.mkdir(parents=True, exist_ok=True)
        self.dir.chmod(0o755)  # munged and the jobs of other users pass through it
        for part in ("log", "pids", "state", "spool", "munge", "dev"):
            (self.dir / part).mkdir(exist_ok=True)
        self.procs = []
        self.info = {}
        self.save(net=net, wanted=asdict(options), ready=False)

    def save(self, **facts: Any) -> None:
        """Add facts, and write all of them down."""
        self.info.update(facts)
        part = self.dir / f"{STATE}.tmp"
        part.write_text(json.dumps(self.info, indent=1) + "\n")
        part.replace(self.dir / STATE)

    def load(self) -> bool:
        """Read what was written down; say whether there is a cluster."""
        try:
            self.info = json.loads((self.dir / STATE).read_text())
        except (OSError, ValueError):
            return False
        records = sorted((self.dir / "pids").glob("*"), key=lambda path: path.stat().st_mtime_ns)
        self.procs = [self._recorded(path) for path in records if path.read_text().endswith("\n")]
        return True

    def _recorded(self, path: Path) -> Proc:
        line = path.read_text()
        log = self.dir / "log" / f"{path.name}.out"
        return Proc(path.name, int(line.split()[0]), start_time(line), log)

    def proc(self, name: str) -> Proc | None:
        """Return the process of a daemon or node."""
        return next((proc for proc in self.procs if proc.name == name), None)

    def start(self, name: str, argv: Words) -> Proc:
        """Start a process that outlives this one."""
        log = self.dir / "log" / f"{name}.out"
        with log.open("ab") as out:
            child = subprocess.Popen(
                ["sh", "-c", _RECORD, str(self.dir / "pids" / name), *map(str, argv)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                cwd=self.dir, env=self.env, start_new_session=True,
            )  # fmt: skip
        child.returncode = 0  # Popen must not complain that it still runs
        proc = Proc(name, child.pid, (proc_stat(child.pid) or ("", 0))[1], log)
        self.procs = [other for other in self.procs if other.name != name] + [proc]
        return proc

    def alive(self) -> bool:
        """Say whether every daemon and node runs."""
        return bool(self.procs) and all(proc.alive() for proc in self.procs)

    def client(self, *argv: str, check: bool = True, timeout_s: float = 60) -> Completed:
        """Run one of SLURM's commands on it."""
        return run(argv, check=check, timeout_s=timeout_s, env=self.env)

    def node_states(self) -> dict[str, str]:
        """Return the state of each node, as sinfo words it."""
        out = self.client("sinfo", "-h", "-N", "-o", "%N %T", check=False, timeout_s=30)
        words = [line.split() for line in out.stdout.splitlines()]
        return {line[0]: line[1] for line in words if len(line) == 2}
