"""Command lines and environments: most of each is well-formed, and some of it hostile."""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

import typer.main
from hypothesis import strategies as st

from fasttrain.cli.app import build
from fasttrain.config.options import BY_NAME

COMMANDS: dict[str, Any] = typer.main.get_command(build()).commands  # type: ignore[attr-defined]
FILES = (
    "train.py", "bad.py", "binary.py", "folder", "fifo", "loop", "dangling", "nowhere.py",
    "closed.py", "good.yaml", "bad.yaml", "spa ce.py", "new\nline.py", "./--odd.py",
    "q'uo\"te;$(touch started).py", os.fsdecode(b"\xff.py"), "folder/../train.py", "/dev/null",
    "/proc/self/mem", "/proc/here", "train.py/below", ".", "x" * 300, "y/" * 3000, "~",
)  # fmt: skip
NUMBERS = (
    "0", "1", "2", "-1", "-0", "+1", "007", "1e3", "1.5", "nan", "inf", "-inf", "65535", "65536",
    "70000", "1048576", "4294967296", "9" * 17, "9" * 18, "9" * 40, "9" * 5000, "١٢", "1_0", "0x1",
)  # fmt: skip
USUAL = (
    "0,1", "0,1,0", "all", "auto:1", "auto:0", "auto:" + "9" * 30, "0-", ",", "GPU-1", "MIG-1/2/3",
    "1:4", "4:1", "1:" + "9" * 30, "h:1", "h:99999", "[::1]:0", ":", "A=b", "A=", "=b", "A",
    "LD_PRELOAD=x", "FASTTRAIN_RUN_ID=x", "A=\n", "PATH=", "bf16", "cpu", "cuda", "default", "ddp",
    "exact", "fast", "USR2@90", "USR2@", "@9", "1-00:00:00", "99999999:00", "64G", "-64G", "off",
    "afterok:1", "lr=0.1,0.2", "lr=1:" + "9" * 9, "time=1", "on", "auto", "None", "null", "true",
)  # fmt: skip
HOSTILE = (
    "", " ", "\t", "\n", "a\nerror: b", "\x1b[31m", "\r", "'", '"', "\\", ";", "$(touch started)",
    "`id`", "%s", "{}", "{0.__class__}", "[bold]", "[/]", "-", "--", "---", "--=", "-x", "é", "汉",
    "\u202e", "\ufeff", "\U0001f600", os.fsdecode(b"\xff\xfe"), os.fsdecode(b"\xed\xa0\x80"),
    "e\u0301", "\x7f", "\x85", "\u2028", "²", "x" * 10000, "汉" * 3000,
)  # fmt: skip
# No / or ~ in front and no .., so that nothing made up here lies outside of the working directory.
LETTERS = st.characters(exclude_characters="\0/.~", exclude_categories=["Cs"]) | st.sampled_from(
    [chr(0xDC00 + byte) for byte in range(0x80, 0x100)]  # bytes that are no text, as argv has them
)
ANY = st.sampled_from((*FILES, *NUMBERS, *USUAL, *HOSTILE)) | st.text(LETTERS, max_size=6)
# What an option could take where it has no list of choices.
GOOD = {
    "gpus": ("all", "0", "auto:1"), "nodes": ("1", "2", "1:2"), "rdzv_endpoint": ("h:1", "h"),
    "show_ranks": ("all", "0", "0,1"), "env": ("A=b", "B="), "hang_timeout": ("auto", "off", "9"),
    "run_dir": ("mine", "folder/mine"), "config": ("good.yaml",), "preset": ("exact", "max"),
    "module": ("pkg",), "mem": ("64G",), "time": ("60", "1:00:00"), "signal": ("USR1@60",),
    "sweep": ("lr=1,2", "n=1:3"), "sbatch": ("nice=1",), "dependency": ("afterok:1",),
    "machine": ("../machine.json", "../gpus.json"), "only": ("torch",), "master_port": ("29500",),
}  # fmt: skip


def weighted(*strategies: tuple[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Choose among strategies, each with its weight; `one_of` takes one that is repeated once."""
    chosen = [strategy for weight, strategy in strategies for _ in range(weight)]
    return st.sampled_from(chosen).flatmap(lambda strategy: strategy)


def values_of(name: str) -> st.SearchStrategy[str]:
    """Return values of an option: most often some that it could take."""
    spec = BY_NAME.get(name)
    numbers = spec is not None and spec.kind == "int"
    good = GOOD.get(name) or (spec.choices if spec else ()) or (("1", "2") if numbers else ("one",))
    borderline = st.sampled_from(NUMBERS) if numbers else ANY
    return weighted((7, st.sampled_from(good)), (1, borderline), (1, ANY))


def _of_option(option: Any) -> st.SearchStrategy[list[str]]:
    flags = [*option.opts, *option.secondary_opts]
    # As typed most often, and sometimes cut short.
    spelled = st.sampled_from([*flags * 9, flags[0][: max(3, len(flags[0]) - 2)]])
    if option.is_flag:
        return spelled.map(lambda flag: [flag])
    values = values_of(option.name)
    apart = st.builds(lambda flag, value: [flag, value], spelled, values)
    joined = st.builds(lambda flag, value: [f"{flag}={value}"], spelled, values)
    return weighted((2, apart), (1, joined))


STARTS: dict[str, list[list[str]]] = {
    "run": [*[["train.py"]] * 6, ["-m", "pkg"], ["--no-python", "true"], []],
    "slurm": [*[["train.py"]] * 6, ["-m", "pkg"], []],
    "job": [[word] for word in ("list", "show", "logs", "wait", "cancel", "list", "show")],
    "init": [["language_model"], []],
    # What torch says of itself is asked for in processes; the checks are the same without.
    "doctor": [*[["--quick"]] * 5, ["--quick", "train.py"], []],
}
# Starts nothing, and tells what would be done on a machine with other devices.
PLANNED = [["--dry-run"], ["--explain"], ["--dry-run", "--machine", "../gpus.json"]]


def _line_of(command: str) -> st.SearchStrategy[list[str]]:
    options = [one for one in COMMANDS[command].params if hasattr(one, "is_flag") and one.opts]
    piece = st.one_of([_of_option(option) for option in options]) if options else st.just([""])
    loose = (st.sampled_from(("--", "--", "-h", "-", "-x")) | ANY).map(lambda word: [word])
    rest = st.lists(weighted((8, piece), (1, loose)), max_size=4)
    starts = STARTS.get(command, [[]])
    if command == "run":
        starts = starts + [["train.py", *planned] for planned in PLANNED * 2]
    return st.builds(
        lambda start, pieces: [command, *start, *chain(*pieces)], st.sampled_from(starts), rest
    )


_LINES = {command: _line_of(command) for command in COMMANDS}
_FIRST = st.sampled_from([*COMMANDS, "--version", "--help", "ru"])
LINES = weighted(
    (10, _LINES["run"]),
    (5, _LINES["slurm"]),
    *((1, line) for line in _LINES.values()),
    (1, st.lists(ANY | _FIRST, max_size=3)),
)

_GARBLED = st.sampled_from((*NUMBERS, *USUAL, *HOSTILE, *FILES))
_FOREIGN = st.sampled_from(
    ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
     "ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "SLURM_JOB_ID", "SLURM_CPUS_PER_TASK",
     "SLURM_NTASKS", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SBATCH_PARTITION",
     "SLURM_RESTART_COUNT", "SBATCH_GPUS_PER_TASK", "SBATCH_TIMELIMIT", "FASTTRAIN_RUN_ID", "USER",
     "FASTTRAIN_RESTART_COUNT", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM", "PATH",
     "OMP_NUM_THREADS", "XDG_CACHE_HOME", "TORCHELASTIC_RESTART_COUNT", "LD_LIBRARY_PATH", "TZ",
     "CUDA_HOME", "NCCL_SOCKET_IFNAME", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_DEVICE_ORDER",
     "NVIDIA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_CUDA_ALLOC_CONF", "JPY_PARENT"]
)  # fmt: skip
_OWN = st.sampled_from(list(BY_NAME.values())).flatmap(
    lambda spec: st.tuples(st.just(spec.env), values_of(spec.name))
)
_WRONG = [
    "FASTTRAIN_",
    "FASTTRAIN_AMPP",
    "FASTTRAIN_\udcff",
    "FASTTRAIN_CONFIG",
    "FASTTRAIN_PRESET",
]
ENVIRONS = weighted(
    (4, st.just({})),
    (4, st.dictionaries(_FOREIGN, _GARBLED, max_size=4)),
    (2, st.lists(_OWN, max_size=2).map(dict)),
    (1, st.dictionaries(st.sampled_from(_WRONG), ANY, max_size=1)),
)
PLACES = st.sampled_from(["work"] * 12 + ["work/folder", os.fsdecode(b"work/caf\xe9\n[b]"), "gone"])
ENCODINGS = st.sampled_from(["utf-8"] * 4 + ["ascii", "latin-1"])
