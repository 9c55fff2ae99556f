# ruff: noqa: T201, BLE001
"""Causes each failure in a fork of one process that has imported torch, and records it.

``python torch_causes.py FOLDER NAMES...``: each gets a run directory of its name in the folder, and
its exit code goes to stdout.
"""

import ctypes
import io
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fasttrain.shim.script import recorder, watch_faults


class Faulty(Dataset):
    def __init__(self, fault):
        self.fault = fault

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.fault()


def load(fault, **settings):
    list(DataLoader(Faulty(fault), num_workers=1, **settings))


def load_heard(fault):
    """Load until torch hears how its worker ended: on a busy machine it sometimes doesn't."""
    while True:
        try:
            load(fault)
        except RuntimeError as error:
            if not isinstance(error.__cause__, queue.Empty):
                raise


def load_unheard(fault):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    load(fault)


SIZES = iter((2, 3))


def ragged():
    return torch.ones(next(SIZES))


def kill(number):
    os.kill(os.getpid(), number)


def twice():
    x = torch.ones(2, requires_grad=True)
    loss = (x * x).sum()
    loss.backward()
    loss.backward()


def differentiated_twice():
    x = torch.ones(2, requires_grad=True)
    compiled = torch.compile(torch.sin, backend="aot_eager")
    (slope,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    slope.sum().backward()


def inplace():
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y += 1
    y.sum().backward()


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def own_error():
    try:
        torch.save(torch.ones(1 << 20), "/dev/full")
    except RuntimeError as error:
        raise RuntimeError("the checkpoint was not saved") from error


def same_port():
    first = torch.distributed.TCPStore("127.0.0.1", 0, 1, True)
    torch.distributed.TCPStore("127.0.0.1", first.port, 2, True, wait_for_workers=False)


def unused():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    model.forward = lambda x: model[0](x)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        wrapped(torch.ones(1, 1)).sum().backward()


def saved_on_a_gpu():
    # What torch.save writes down for a tensor of a GPU; the error is torch.load's own.
    torch.serialization.location_tag = lambda storage: "cuda:0"
    torch.load(saved(torch.ones(1)))


def cuda_in_a_fork():
    torch.cuda._is_in_bad_fork = lambda: True  # as the driver says there
    torch.cuda.init()


def not_ours():
    own = Path("own")
    own.touch(mode=0o600)
    os.seteuid(65534)  # nobody: root may open everything
    try:
        own.read_text()
    finally:
        os.seteuid(0)


def built_for_another():
    source, library = Path("needs.c"), Path("needs.so").resolve()
    source.write_text("void not_there(void); void call(void) { not_there(); }")
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", source, "-o", library], check=True)
    ctypes.CDLL(str(library), mode=os.RTLD_NOW)


def misfit():
    """Do what a torchvision does when it is imported, without its compiled part."""
    torch.library.register_fake("torchvision::nms")(lambda: None)


def by_nccl():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)


class NeedsAModule:
    """Can't be made in a worker that is spawned."""

    def __reduce__(self):
        return __import__, ("no_such_module",)


def child(rank):
    {}["of the child"]


def spawned(work):
    torch.multiprocessing.start_processes(work, nprocs=1, start_method="fork")


CAUSES = {
    "shape-mismatch": lambda: nn.Linear(4, 3)(torch.ones(2, 5)),
    "shape-mismatch-2": lambda: torch.ones(2, 4) + torch.ones(2, 3),
    "shape-mismatch-3": lambda: nn.Conv2d(3, 4, 3)(torch.ones(1, 1, 8, 8)),
    "shape-mismatch-4": lambda: load(ragged, batch_size=2),
    "index-range": lambda: nn.functional.cross_entropy(torch.ones(4, 3), torch.full((4,), 7)),
    "index-range-2": lambda: nn.Embedding(4, 2)(torch.tensor([9])),
    "dtype-mismatch": lambda: nn.Linear(2, 2)(torch.ones(2, 2).double()),
    "state-dict": lambda: nn.Linear(2, 2).load_state_dict({"weight": torch.ones(3, 3)}),
    "device-mismatch": lambda: torch.ones(2) + torch.ones(2, device="meta"),
    "unused-parameters": unused,
    "map-location": saved_on_a_gpu,
    "cuda-fork": cuda_in_a_fork,
    "not-permitted": not_ours,
    "library-missing": lambda: ctypes.CDLL("libnothere.so.7"),
    "built-for-another": built_for_another,
    "no-gradient": lambda: torch.ones(1).backward(),
    "backward-twice": twice,
    "double-backward": differentiated_twice,
    "inplace": inplace,
    "built-for-another-2": misfit,
    "no-cuda": lambda: torch.ones(1).cuda(),
    "no-cuda-2": lambda: torch.cuda.set_device(0),
    "no-cuda-3": lambda: torch.cuda.Stream(),
    "no-cuda-4": lambda: torch.cuda.CUDAGraph(),
    "no-cuda-5": lambda: torch.Generator(device="cuda"),
    "no-cuda-6": lambda: torch.ones(1).pin_memory(),
    "no-cuda-7": lambda: torch.cuda.device(0).__enter__(),
    "no-nccl": by_nccl,
    "host-memory": lambda: torch.empty(1 << 46),
    "weights-only": lambda: torch.load(saved(nn.Linear(1, 1))),
    "checkpoint-broken": lambda: torch.load(io.BytesIO(saved(torch.ones(99)).read()[:300])),
    "disk-full": lambda: torch.save(torch.ones(1 << 20), "/dev/full"),
    "disk-full-2": own_error,
    "port-in-use": same_port,
    "exception": lambda: load(lambda: {}["of the worker"]),
    "exception-2": lambda: spawned(child),
    "loader-worker": lambda: load_heard(lambda: os._exit(3)),
    "loader-worker-2": lambda: load_heard(lambda: kill(signal.SIGKILL)),
    "loader-worker-3": lambda: load_unheard(lambda: kill(signal.SIGKILL)),
    "shared-memory": lambda: load_heard(lambda: kill(signal.SIGBUS)),
    "child-died": lambda: spawned(lambda rank: kill(signal.SIGKILL)),
    "module-missing": lambda: load(NeedsAModule(), multiprocessing_context="spawn"),
    "pickling": lambda: load(lambda: 0, multiprocessing_context="spawn"),
    "assertion": lambda: nn.MultiheadAttention(10, 3),
    "segfault": lambda: ctypes.string_at(0),
}  # fmt: skip


def cause(folder: Path, name: str) -> int:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    log = os.open(folder / "rank-0.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    watch_faults(str(folder), 0)
    record = recorder(str(folder), 0)
    try:
        CAUSES[name]()
    except BaseException as error:
        record(error)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1], name)
        folder.mkdir()
        print(cause(folder, name), flush=True)
