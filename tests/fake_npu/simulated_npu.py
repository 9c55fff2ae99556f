"""A simulated Ascend ``npu`` device, in host memory, for machines that have none."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import types
import warnings
import zipfile
from pathlib import Path
from typing import Any

import npu_module
import simulated_hccl
import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).parent / "csrc"
# torch_npu's own modules that compute without CANN, in the order of their imports
REAL_MODULES = (
    "utils._error_code",
    "utils.combine_tensors",
    "npu.amp.common",
    "npu.amp.autocast_mode",
    "npu.amp.grad_scaler",
    "optim",
)
ACL_FORMAT_ND = 2


def activate(cache: Path) -> Any:
    """Make torch know a device type ``npu``, for the rest of this process, and give ``torch.npu``.

    Args:
        cache: Folder for the compiled extension; building it takes about a minute, once.
    """
    _narrow()
    extension = _build(cache)
    torch.utils.rename_privateuse1_backend("npu")
    module = npu_module.make(extension)
    torch._register_device_module("npu", module)
    sys.modules["torch.npu"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    simulated_hccl.register(extension.cpu_alias)
    return module


def _narrow() -> None:
    """Let ASCEND_RT_VISIBLE_DEVICES say how many devices there are, as it does on a card.

    Reading stops at what is no id of a device, or not above the one before it.
    """
    mask = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if mask is None:
        return
    seen: list[int] = []
    for word in mask.split(","):
        if not word.isdigit() or int(word) <= max(seen, default=-1):
            break
        seen.append(int(word))
    os.environ["FAKE_NPU_COUNT"] = str(len(seen))


def _build(cache: Path) -> Any:
    texts = b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()))
    tag = hashlib.sha256(texts + torch.__version__.encode()).hexdigest()[:12]
    folder = cache / f"fake_npu-{tag}"
    folder.mkdir(parents=True, exist_ok=True)
    # cpp_extension looks for ninja on PATH, where pip puts it beside the interpreter
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return cpp_extension.load(
        name="fake_npu_extension",
        sources=[str(SOURCES / "fake_npu.cpp")],
        build_directory=str(folder),
        extra_cflags=["-O1", "-g0", "-Wno-deprecated-declarations"],
    )


def install_torch_npu(wheel: Path, cache: Path) -> Any:
    """Return a module ``torch_npu`` whose optimizers and GradScaler are those of the wheel.

    All else of torch_npu is absent on purpose: who reaches for it gets an AttributeError.
    """
    device = activate(cache)
    tree = _unpacked(wheel, cache)
    extension = device.extension
    root = _module(
        "torch_npu",
        __path__=[],
        __version__=wheel.name.split("-")[1],
        get_npu_format=lambda _: ACL_FORMAT_ND,
        npu_format_cast=lambda tensor, _: tensor,
        get_storage_size=extension.get_storage_size,
        npu_change_data_ptr=extension.change_data_ptr,
        npu=device,
    )
    sys.modules["torch_npu.npu"] = device
    device.__path__ = []
    device.utils = _module(
        "torch_npu.npu.utils",
        is_support_inf_nan=npu_module.is_support_inf_nan,
        get_soc_version=device.soc_version,
    )
    _module("torch_npu.utils", __path__=[])
    _module("torch_npu.utils.utils", _is_interactive_command_line=lambda: False)
    _module("torch_npu.npu.amp", __path__=[])
    for name in REAL_MODULES:
        _load(tree, f"torch_npu.{name}")
        if name == "utils.combine_tensors":
            combine = sys.modules[f"torch_npu.{name}"]
            vars(root.utils).update({n: getattr(combine, n) for n in combine.__all__})
    device.amp.GradScaler = device.amp.grad_scaler.GradScaler
    return root


def _unpacked(wheel: Path, cache: Path) -> Path:
    """Return the folder of the wheel's Python files, whole whoever else unpacks them just now."""
    tree = cache / f"{wheel.stem}-py"
    if not tree.exists():
        own = Path(tempfile.mkdtemp(dir=cache))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(own, [n for n in archive.namelist() if n.endswith(".py")])
        try:
            own.rename(tree)
        except OSError:  # another process was first
            shutil.rmtree(own)
    return tree


def _module(name: str, **attributes: Any) -> Any:
    module = types.ModuleType(name)
    vars(module).update(attributes)
    return _place(name, module)


def _load(tree: Path, name: str) -> None:
    path = tree.joinpath(*name.split("."))
    package = [str(path)] if path.is_dir() else None
    file = path / "__init__.py" if package else path.with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=package)
    assert spec
    assert spec.loader
    module = _place(name, importlib.util.module_from_spec(spec))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch has deprecated since
        spec.loader.exec_module(module)


def _place(name: str, module: Any) -> Any:
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    return module
