"""The facts that ``fasttrain slurm --check`` looks at; nothing is sent, and no file is left."""

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
from fasttrain.model.settings import ClusterFacts, SlurmSettings
from fasttrain.slurm.refusals import no_slurm
from fasttrain.slurm.submission import Draft, batch_script
from fasttrain.source.read import find_local_rank

TIMEOUT_S = 20.0
# The imports of a task, without torch; it prints the version, which must be the one here.
IMPORTED = "import fasttrain.slurm.node_task, fasttrain; print(fasttrain.__version__)"
_GPUS_PER_TASK = re.compile(r"(?:--)?gpus[-_]per[-_]task(?:=.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class NeededPath:
    """A folder or file that the nodes need.

    Attributes:
        what: What it is, such as ``the run directory``.
        path: Its path.
        filesystem: Type of its file system; empty if unknown.
    """

    what: str
    path: str
    filesystem: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool.

    Attributes:
        said: Its whole output.
        error: Why it failed; empty on success.
    """

    said: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that the checks look at.

    Attributes:
        job: The job that would be sent.
        cluster: The limits of the cluster.
        environ: The environment from which the job would be sent.
        places: Folders and files that the nodes need.
        python: An import of fasttrain by the nodes' interpreter; None if it is this one.
        setup: ``bash -n`` of the setup lines; None without any.
        sent: ``sbatch --test-only`` of the script that would be sent.
        gpus_per_task: The option that binds GPUs to tasks; empty without one.
        local_rank: Where the script reads its local rank; only searched for with that option.
    """

    job: Draft
    cluster: ClusterFacts
    environ: Mapping[str, str]
    places: tuple[NeededPath, ...] = ()
    python: ToolResult | None = None
    setup: ToolResult | None = None
    sent: ToolResult = ToolResult()
    gpus_per_task: str = ""
    local_rank: Evidence | None = None

    @property
    def slurm(self) -> SlurmSettings:
        """Options of SLURM."""
        return self.job.requests[0].slurm


def look(job: Draft, environ: Mapping[str, str]) -> Seen:
    """Return all facts that the checks need; the queries run in parallel and take 20 s at most.

    Raises:
        FasttrainError: ``slurm-missing`` if there is no SLURM.
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
    # The job doesn't get this variable if the GPUs of a node were asked for.
    return variable if variable in environ and not slurm.gpus_per_node.value else ""


def _test_only(job: Draft, host: Host, script: Path) -> ToolResult:
    """Let sbatch judge exactly the script and the environment that would be sent."""
    script.write_text(batch_script(job), errors="surrogateescape")
    without = [word for name in job.left_out for word in ("-u", name)]
    return _try(["env", *without, host.which("sbatch"), "--test-only", str(script)])


def _python(named: str | None) -> ToolResult | None:
    if not named or shutil.which(named) == sys.executable:
        return None
    return _try([named, "-c", IMPORTED])


def _setup(lines: tuple[str, ...], script: Path) -> ToolResult | None:
    if not lines:
        return None
    script.write_text("\n".join(lines) + "\n", errors="surrogateescape")
    return _try(["bash", "-n", str(script)])


def _try(argv: list[str]) -> ToolResult:
    try:
        return ToolResult(run_tool(argv, timeout_s=TIMEOUT_S, errors_too=True))
    except ToolError as error:
        return ToolResult(error.said, str(error))


def _places(job: Draft, host: Host) -> Iterator[NeededPath]:
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
        yield NeededPath(what, str(path), filesystem_of(_resolved(path), mounts))


def _resolved(path: Path) -> Path:
    try:
        return within(DISK_TIMEOUT_S, lambda: Path(os.path.realpath(path)))
    except OSError:  # the file server is gone: go by the path as it is
        return path
