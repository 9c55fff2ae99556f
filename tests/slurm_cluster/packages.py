"""The programs that a cluster is made of, and the Debian packages that they are in."""

from __future__ import annotations

import os
import shutil

from slurm_cluster.tools import ClusterError, UnavailableError, run, say

SLURM = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
}
ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server-core"}
NAMESPACES = {"ip": "iproute2", "unshare": "util-linux"}
SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def find_sbin() -> None:
    """Let this process and its children find daemons, which a user's PATH leaves out."""
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *SBIN])


def missing(programs: dict[str, str]) -> list[str]:
    """Return the packages of those programs that are not there."""
    return sorted({package for tool, package in programs.items() if not shutil.which(tool)})


def ensure(programs: dict[str, str], *, install: bool) -> None:
    """Install what is missing, where that may be done.

    Raises:
        UnavailableError: Something is missing, and nothing may or can be installed.
        ClusterError: It was installed, and is missing still.
    """
    packages = missing(programs)
    if not packages:
        return
    if not (install and os.geteuid() == 0 and shutil.which("apt-get")):
        line = "apt-get install -y --no-install-recommends " + " ".join(packages)
        raise UnavailableError(f"missing packages: {line}")
    say("installing", *packages)
    _apt_install(packages)
    if still := missing(programs):
        raise ClusterError(f"installed, yet not found: {' '.join(still)}")


def _apt_install(packages: list[str]) -> None:
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    get = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300"]
    install = [*get, "install", "-y", "--no-install-recommends", *packages]
    if run(install, check=False, timeout_s=900, env=environ).returncode:
        # Lists of packages may be old, or not there at all.
        run([*get, "update"], check=False, timeout_s=300, env=environ)
        run(install, timeout_s=900, env=environ)
