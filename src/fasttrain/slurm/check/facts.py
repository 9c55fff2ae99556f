"""What ``fasttrain slurm --check`` looks at; nothing is sent, and nothing stays behind."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import fasttrain
from fasttrain.hardware.cluster import find_limits
from fasttrain.hardware.host import Host
from fasttrain.hardware.host_state import DISK_TIMEOUT_S, filesystem_of, mount_types
from fasttrain.hardware.tool import ToolError, run_tool, within
from fasttrain.model.plan import Evidence
from fasttrain.model.slurm import ClusterFacts, SlurmSettings
from fasttrain.slurm.refusals import no_slurm
from fasttrain.slurm.submission import Draft, batch_script
from fasttrain.source.read import find_local_rank

TIMEOUT_S = 20.0
# What a task imports, without torch, and the version that must be the one here.
IMPORTED = "import fasttrain.slurm.node_task, fasttrain; print(fasttrain.__version__)"
_GPUS_PER_TASK = re.compile(r"(?:--)?gpus[-_]per[-_]task(?:=.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Place:
    """A folder or file that the nodes need.

    Attributes:
        what: What it is, such as ``the run directory``.
        path: Where.
        filesystem: Type of its file system; empty where unknown.
    """

    what: str
    path: str
    filesystem: str


@dataclass(frozen=True, slots=True)
class Trial:
    """What a tool said that was tried.

    Attributes:
        said: Its answer, all of it.
        error: Why it failed; empty where it didn't.
    """

    said: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that the checks look at.

    Attributes:
        job: What would be sent.
        cluster: What SLURM's tools say of the cluster.
        environ: The environment from which it would be sent.
        places: What the nodes need, and where it lies.
        python: An import of fasttrain by the nodes' interpreter; None where it is this one.
        setup: ``bash -n`` of the setup lines; None without any.
        sent: ``sbatch --test-only`` of the script that would be sent.
        gpus_per_task: The option that binds GPUs to tasks; empty without.
        local_rank: Where the script reads its local rank, looked for with that option alone.
    """

    job: Draft
    cluster: ClusterFacts
    environ: Mapping[str, str]
    places: tuple[Place, ...] = ()
    python: Trial | None = None
    setup: Trial | None = None
    sent: Trial = Trial()
    gpus_per_task: str = ""
    local_rank: Evidence | None = None

    @property
    def slurm(self) -> SlurmSettings:
        """What the user wants of SLURM."""
        return self.job.requests[0].slurm


def look(job: Draft, environ: Mapping[str, str]) -> Seen:
    """Give all that the checks need, asked for at the same time; 20 s at the most.

    Raises:
        FasttrainError: ``slurm-missing`` where there is no SLURM.
    """
    host = Host(environ)
    if not (host.which("sbatch") and host.which("srun")):
        raise no_slurm()
    slurm = job.requests[0].slurm
    bound = _gpus_per_task(slurm, environ)
    with tempfile.TemporaryDirectory(prefix="fasttrain-") as folder, ThreadPoolExecutor() as pool:
        cluster = pool.submit(find_limits, host, timeout_s=TIMEOUT_S)
        sent = pool.submit(_test_only, job, host, Path(folder, "job.sh"))
        python = pool.submit(_python, slurm.python.value)
        setup = pool.submit(_setup, slurm.setup.value, Path(folder, "setup.sh"))
        places = tuple(_places(job, host))
        return Seen(
            job=job,
            cluster=cluster.result(),
            environ=environ,
            places=places,
            python=python.result(),
            setup=setup.result(),
            sent=sent.result(),
            gpus_per_task=bound,
            local_rank=find_local_rank(job.target, str(Path.cwd()), environ) if bound else None,
        )


def _gpus_per_task(slurm: SlurmSettings, environ: Mapping[str, str]) -> str:
    for setting in (slurm.sbatch, slurm.srun_args):
        for word in setting.value:
            if _GPUS_PER_TASK.fullmatch(word):
                return f"{setting.source} {word}"
    variable = "SBATCH_GPUS_PER_TASK"
    # It is left out where the GPUs of a node were asked for.
    return variable if variable in environ and not slurm.gpus_per_node.value else ""


def _test_only(job: Draft, host: Host, script: Path) -> Trial:
    """Have sbatch judge the very script, in the environment in which it would be sent."""
    script.write_text(batch_script(job), errors="surrogateescape")
    without = [word for name in job.left_out for word in ("-u", name)]
    return _try(["env", *without, host.which("sbatch"), "--test-only", str(script)])


def _python(named: str | None) -> Trial | None:
    if not named or shutil.which(named) == sys.executable:
        return None
    return _try([named, "-c", IMPORTED])


def _setup(lines: tuple[str, ...], script: Path) -> Trial | None:
    if not lines:
        return None
    script.write_text("\n".join(lines) + "\n", errors="surrogateescape")
    return _try(["bash", "-n", str(script)])


def _try(argv: list[str]) -> Trial:
    try:
        return Trial(run_tool(argv, timeout_s=TIMEOUT_S, errors_too=True))
    except ToolError as error:
        return Trial(error.said, str(error))


def _places(job: Draft, host: Host) -> Iterator[Place]:
    mounts = mount_types(host)
    python = job.requests[0].slurm.python.value
    needed = [("the working directory", Path.cwd()), ("the run directory", job.run_dir)]
    if job.target.kind == "script":
        needed.append(("the script", Path(job.target.name).absolute()))
    interpreter = shutil.which(python) or python if python else sys.executable
    needed.append(("the interpreter", Path(interpreter).absolute()))
    if not python:
        needed.append(("fasttrain", Path(fasttrain.__file__).parent))
    for what, path in needed:
        yield Place(what, str(path), filesystem_of(_resolved(path), mounts))


def _resolved(path: Path) -> Path:
    try:
        return within(DISK_TIMEOUT_S, lambda: Path(os.path.realpath(path)))
    except OSError:  # a server that is gone: the file system is told by the path as it is
        return path
