"""A folder for PYTHONPATH and one for PATH, by which any process finds simulated NPUs."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

TESTS = Path(__file__).parents[1]
FAKE_NPU = TESTS / "fake_npu"
RECORDED = TESTS / "data" / "npu_smi"
# Where the device is built, once for each version of torch, and the wheel of torch_npu kept
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fasttrain_tests" / "npu"


def write(folder: Path, wheel: Path, cache: Path, chips: str) -> dict[str, str]:
    """Make both folders, and give the variables that make a machine with NPUs of this one.

    torch loads the device when it is imported, by the same entry point as torch_npu.

    Args:
        folder: Where to make them.
        wheel: The wheel of torch_npu.
        cache: Folder for what is compiled and unpacked.
        chips: Name of a recorded table of ``npu-smi info``.
    """
    site, tools = folder / "site", folder / "bin"
    tools.mkdir(parents=True)
    metadata = _distribution(site, "simulated-torch-npu")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nnpu = simulated_autoload:load\n")
    (site / "simulated_autoload.py").write_text("def load():\n    import torch_npu\n")
    (site / "torch_npu.py").write_text(
        textwrap.dedent(f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(FAKE_NPU)!r})
        import simulated_npu
        sys.path.pop(0)
        simulated_npu.install_torch_npu(Path({str(wheel)!r}), Path({str(cache)!r}))
        """)
    )
    tool = tools / "npu-smi"
    tool.write_text(f'#!/bin/sh\n[ "$*" = info ] || exit 64\ncat "{RECORDED / chips}.txt"\n')
    tool.chmod(0o755)
    return {"PYTHONPATH": str(site), "PATH": str(tools), "ASCEND_HOME_PATH": "/cann"}


def pretend_triton(environ: dict[str, str]) -> None:
    """Let triton-ascend seem to be installed: its metadata is there, and nothing else."""
    _distribution(Path(environ["PYTHONPATH"]), "triton-ascend")


def _distribution(site: Path, name: str) -> Path:
    metadata = site / f"{name.replace('-', '_')}-3.2.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.2.0\n")
    return metadata
