"""Tries the torch of this interpreter: ``python TRIAL MARKER QUESTION...``.

Each answer is one line of JSON behind MARKER on standard output, as soon as it is known, so that a
question that hangs or crashes takes none of the answers before it with it. The questions: ``torch``
(what it is and sees), ``compile`` (a small function), ``gloo`` and ``nccl`` (a sum over two
processes of this machine).
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

if __name__ == "__main__":  # see __main__.py
    if not sys.flags.safe_path:
        del sys.path[0]
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))  # noqa: PTH100
    import fasttrain  # noqa: F401

    del sys.path[0]

from fasttrain.model.vendors import TORCH_TYPES, VENDORS
from fasttrain.probes.forked import join, run_ranks, say, stay_on_this_machine, told
from fasttrain.shim.process.parent_death import die_with_launcher

Doing = Callable[[str], None]

# What Triton is called by PyTorch's own wheels, and since 2.5 by PyPI's.
# Source: torch 2.0 to 2.13, Requires-Dist of the wheels on download.pytorch.org.
TRITONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton-xpu")
BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
RANKS = 2


def main(argv: list[str]) -> int:
    """Answer ``MARKER QUESTION...``; ends with 1 at the first question that fails."""
    marker, *questions = argv
    for question in questions:
        answer = _answer(question, partial(_doing, marker, question))
        say(marker, answer)
        if answer["state"] != "ok":
            return 1
    return 0


def _doing(marker: str, question: str, what: str) -> None:
    say(marker, {"question": question, "doing": what})


def _answer(question: str, doing: Doing) -> dict[str, Any]:
    started_s = time.perf_counter()
    answer: dict[str, Any] = {"question": question, "state": "ok", "message": "", "cause": ""}
    try:
        answer["facts"] = QUESTIONS[question](doing)
    except Exception as error:  # noqa: BLE001 - whatever it says is the answer
        cause = error.__cause__
        answer |= {"state": "failed", "message": told(error), "cause": told(cause) if cause else ""}
    return {**answer, "took_s": time.perf_counter() - started_s}


def describe(doing: Doing) -> dict[str, Any]:
    """Return what this torch is and what it sees."""
    doing("importing torch")
    import torch

    built_for_cuda = bool(torch.version.cuda or torch.version.hip)
    doing("looking for devices")
    counts = _device_counts()
    kinds = [*counts, *(["cuda"] if built_for_cuda and "cuda" not in counts else [])]
    doing("using a device")
    return {
        "version": str(torch.__version__),
        "available": list(counts),
        "device_counts": counts,
        "architectures": torch.cuda.get_arch_list() if built_for_cuda else [],
        "init_error": next((text for kind in kinds if (text := _init_error(kind))), ""),
        "cudnn": _cudnn() if torch.version.cuda else "",
        "nccl": _nccl() if built_for_cuda else "",
        "triton": _triton(),
        "backends": _backends(),
    }


def _device_counts() -> dict[str, int]:
    """Return how many devices of each type torch can use; types that it can't are left out."""
    import torch

    counts = {}
    for kind in TORCH_TYPES:
        module = getattr(torch, kind, None)
        if module is None:
            continue
        if (torch.backends.mps if kind == "mps" else module).is_available():
            counts[kind] = int(module.device_count())
    return counts


def _init_error(kind: str) -> str:
    """Return what the first use of a device says; empty when all is well.

    Only a kernel that runs tells whether this torch has kernels for the device.
    """
    import torch

    try:
        torch.ones(1, device=kind).add_(1).item()
    except Exception as error:  # noqa: BLE001 - whatever it says is the answer
        return told(error)
    return ""


def _cudnn() -> str:
    import torch

    return cudnn_name(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]


def cudnn_name(number: int | None) -> str:
    """Return cuDNN's version as people write it: ``9.1.0`` for 90100, ``8.9.2`` for 8902.

    Source: cudnn_version.h, CUDNN_VERSION: major * 10000 since cuDNN 9, major * 1000 before.
    """
    if not number:
        return ""
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _nccl() -> str:
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _triton() -> str:
    """Return Triton's version by its metadata: importing it would cost, and `compile` does."""
    for name in TRITONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _backends() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    # Which of these questions exist depends on torch's version.
    checks = {name: getattr(dist, f"is_{name}_available", lambda: False) for name in BACKENDS}
    found = [name for name, is_available in checks.items() if is_available()]
    extended = [vendor for vendor in VENDORS.values() if vendor.extension in sys.modules]
    return found + [vendor.collectives for vendor in extended]


def try_compile(doing: Doing) -> dict[str, Any]:
    """Compile a small function for the first device and compare its numbers with eager ones.

    Raises:
        ArithmeticError: The numbers differ.
    """
    import torch

    kind = next(iter(_device_counts()), "cpu")
    doing(f"compiling for {kind}")
    numbers = torch.linspace(0, 1, 64, device=kind)
    if not torch.allclose(torch.compile(_example)(numbers), _example(numbers), atol=1e-6):
        raise ArithmeticError(f"on {kind} the compiled function gives other numbers than eager")
    return {}


def _example(numbers: Any) -> Any:
    return numbers.sin() * 2 + numbers


def all_reduce(backend: str, doing: Doing) -> dict[str, Any]:
    """Sum over two processes of this machine.

    Raises:
        RankError: A rank failed, or they got a wrong sum.
    """
    import torch  # noqa: F401 - once, for all ranks

    doing(f"summing over {RANKS} processes by {backend}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        run_ranks(RANKS, partial(_sum, backend, listener))
    return {}


def _sum(backend: str, listener: socket.socket, rank: int) -> None:
    import torch
    import torch.distributed as dist

    device = "cpu"
    if backend == "nccl":
        if not dist.is_nccl_available() or torch.cuda.device_count() < RANKS:
            return  # told by the answer to `torch`
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    join(backend, rank, RANKS, listener)
    total = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(total)
    if total.item() != sum(range(1, RANKS + 1)):
        raise ArithmeticError(f"1 + 2 gave {total.item():g}")
    dist.destroy_process_group()


QUESTIONS: dict[str, Callable[[Doing], dict[str, Any]]] = {
    "torch": describe,
    "compile": try_compile,
    "gloo": partial(all_reduce, "gloo"),
    "nccl": partial(all_reduce, "nccl"),
}

if __name__ == "__main__":
    gc.disable()  # importing torch and its compiler takes a third longer with it
    die_with_launcher()
    stay_on_this_machine()
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # all is said, and torch takes most of a second to end properly
