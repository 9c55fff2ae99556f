"""Tries the torch of this interpreter: ``python TRIAL MARKER QUESTION...``.

Each answer is a line of JSON after MARKER on standard output. It is printed at once, so that no
answer is lost when a later question hangs or crashes. The questions: ``torch`` (its version and
devices), ``compile`` (a small function), ``gloo`` and ``nccl`` (a sum over two processes).
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
from fasttrain.probes.forked import join, one_line, run_ranks, say, stay_on_this_machine
from fasttrain.shim.process.entry import die_with_launcher

Doing = Callable[[str], None]

# Names of Triton's package among the requirements of torch's wheels.
# Source: torch 2.0 to 2.13, Requires-Dist of the wheels on download.pytorch.org.
TRITONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton-xpu")
BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
RANKS = 2


def main(argv: list[str]) -> int:
    """Answer ``MARKER QUESTION...``; stop and return 1 at the first question that fails."""
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
    except Exception as error:  # noqa: BLE001 - any error is the answer
        cause = one_line(error.__cause__) if error.__cause__ else ""
        answer |= {"state": "failed", "message": one_line(error), "cause": cause}
    return {**answer, "took_s": time.perf_counter() - started_s}


def describe(doing: Doing) -> dict[str, Any]:
    """Return torch's version, devices and libraries."""
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
    """Return the number of usable devices by torch's device type, without types it can't use."""
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
    """Return the error of the first use of a device; empty if it works."""
    import torch

    # A kernel has to run: is_available() is true as well for a GPU that torch has no kernels for.
    try:
        torch.ones(1, device=kind).add_(1).item()
    except Exception as error:  # noqa: BLE001 - any error is the answer
        return one_line(error)
    return ""


def _cudnn() -> str:
    import torch

    return cudnn_name(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]


def cudnn_name(number: int | None) -> str:
    """Return cuDNN's version in dotted form: ``9.1.0`` for 90100, ``8.9.2`` for 8902.

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
    """Return Triton's version from its metadata; an import would take time."""
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
    # Not every version of torch has all of these functions.
    checks = {name: getattr(dist, f"is_{name}_available", lambda: False) for name in BACKENDS}
    found = [name for name, is_available in checks.items() if is_available()]
    extended = [vendor for vendor in VENDORS.values() if vendor.extension in sys.modules]
    return found + [vendor.collectives for vendor in extended]


def try_compile(doing: Doing) -> dict[str, Any]:
    """Compile a small function for the first device, and compare its results with eager ones.

    Raises:
        ArithmeticError: If the results differ.
    """
    import torch

    kind = next(iter(_device_counts()), "cpu")
    doing(f"compiling for {kind}")
    numbers = torch.linspace(0, 1, 64, device=kind)
    if not torch.allclose(torch.compile(_example)(numbers), _example(numbers), atol=1e-6):
        raise ArithmeticError(f"on {kind} the compiled function returns other numbers than eager")
    return {}


def _example(numbers: Any) -> Any:
    return numbers.sin() * 2 + numbers


def all_reduce(backend: str, doing: Doing) -> dict[str, Any]:
    """Sum a tensor over two processes of this machine.

    Raises:
        RankError: If a rank failed or got a wrong sum.
    """
    import torch  # noqa: F401 - once, for all forked ranks

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
            return  # the answer to `torch` shows that
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
    gc.disable()  # with it, importing torch and its compiler takes a third longer
    die_with_launcher()
    stay_on_this_machine()
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # skips torch's cleanup, which takes most of a second
