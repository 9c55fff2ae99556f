"""Causes that can't be caused here: what torch, NCCL and the CUDA driver really said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fasttrain.launch.crash.cause_rules import UNKNOWN, size
from fasttrain.launch.crash.causes import CAUSES, ENDS, find_cause
from fasttrain.launch.crash.evidence import Evidence
from fasttrain.model.crash import Frame, Raised, Surroundings
from fasttrain.model.decision import Source, SourceKind
from fasttrain.model.plan import EnvVar, LaunchPlan
from support.plans import plan_for

ERROR = ("builtins.RuntimeError", "builtins.Exception")
# Source: pytorch/pytorch#16417 (comment of 2024-03-13), OPIXray-author/OPIXray#5
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 23.65 GiB of "
    "which 11.06 MiB is free. Including non-PyTorch memory, this process has 23.60 GiB memory in "
    "use. Of the allocated memory 22.90 GiB is allocated by PyTorch, and 194.87 MiB is reserved by "
    "PyTorch but unallocated."
)
OUT_OF_MEMORY_OF_OLD = (
    "CUDA out of memory. Tried to allocate 264.00 MiB (GPU 0; 2.00 GiB total capacity; 788.51 MiB "
    "already allocated; 145.93 MiB free; 1.02 GiB reserved in total by PyTorch)"
)
# Source: WangYueFt/dcp#30
DEVICE_ASSERT = (
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported "
    "at some other API call, so the stacktrace below might be incorrect."
)
# Source: evo-design/evo#136
ILLEGAL_ACCESS = (
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
    "asynchronously reported at some other API call, so the stacktrace below might be incorrect."
)
# Source: Comfy-Org/ComfyUI#10326
NO_KERNEL = (
    "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors "
    "might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect."
)
# Source: facebookresearch/detr#524
DEVICES = (
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
    "cpu! (when checking argument for argument index in method wrapper__index_select)"
)
# Source: huggingface/picotron_tutorial#6
WATCHDOG = (
    "[rank2]: step 7\n"
    "terminate called after throwing an instance of 'std::runtime_error'\n"
    "  what():  [Rank 2] NCCL watchdog thread terminated with exception: [Rank 2] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=120000) ran for 120822 milliseconds before timing out.\n"
)
# Source: NVIDIA/nccl#934
REMOTE = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1347, remote process "
    "exited or there was a network error, NCCL version 2.18.5\nncclRemoteError: A call failed "
    "possibly due to a network error or a remote process exiting prematurely."
)
# Source: lllyasviel/Fooocus#1313
DRIVER = "The NVIDIA driver on your system is too old (found version 11040). Please update your"
# Source: vllm-project/vllm#5222
UNCORRECTABLE = "CUDA error: uncorrectable ECC error encountered"
# Source: https://docs.coreweave.com/support/sunk/articles/what-do-nccl-errors-mean.md
SYSTEM = "NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled system error, NCCL version 2.18.5"
# What torch 2.13 and Python 3.11 said where /dev/shm had 64 KiB
SHM_FULL = (
    "unable to allocate shared memory(shm) for file </torch_20526_2012529927_2>: No space left on "
    "device (28)"
)
# Source: pytorch/pytorch#107300 and LuyaooChen/uninformed-students-pytorch#3
NO_SUCH_DEVICE = (
    "CUDA error: invalid device ordinal\nCUDA kernel errors might be asynchronously reported at "
    "some other API call, so the stacktrace below might be incorrect."
)
# Source: torch 2.13, torch/cuda/__init__.py, get_device_properties, and torch/serialization.py
NO_SUCH_ID = "Invalid device id"
SAVED_ON_DEVICE_1 = (
    "Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1. Please "
    "use torch.load with map_location to map your storages to an existing device."
)
# Source: NVIDIA/nccl, src/init.cc, in what ProcessGroupNCCL of torch 2.13 raises
ONE_GPU = (
    "NCCL error in: ProcessGroupNCCL.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details), "
    "NCCL version 2.27.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
)
# What torch 2.13 said of a tensor without memory
NO_MEMORY = "Cannot access data pointer of Tensor (e.g. FakeTensor, FunctionalTensor). If you're"
RECORDED = {
    OUT_OF_MEMORY: ("device-memory", ["22.00 MiB", "11.06 MiB", "23.65 GiB"]),
    OUT_OF_MEMORY_OF_OLD: ("device-memory", ["264.00 MiB", "145.93 MiB", "2.00 GiB"]),
    DEVICE_ASSERT: ("device-assert", []),
    DEVICES: ("device-mismatch", ["but found at least two devices, cuda:0 and"]),
    ILLEGAL_ACCESS: ("illegal-access", []),
    NO_KERNEL: ("wrong-gpu", []),
    REMOTE: ("peer-lost", []),
    DRIVER: ("driver-too-old", ["11040"]),
    UNCORRECTABLE: ("device-fault", ["ECC"]),
    SYSTEM: ("network", ["NCCL error in"]),
    NO_MEMORY: ("memory-of-rows", ["an extension in C++"]),
    ONE_GPU: ("shared-device", ["rank 1 and rank 0"]),
    SHM_FULL: ("shared-memory", ["/dev/shm"]),
    NO_SUCH_DEVICE: ("device-number", ["the process sees"]),
    NO_SUCH_ID: ("device-number", ["the process sees"]),
    SAVED_ON_DEVICE_1: ("map-location", ["device 1", "the process sees"]),
}


def raised(message: str, *kinds: str) -> Evidence:
    return Evidence(1, (Raised(kinds or ERROR, message),))


def told(evidence: Evidence) -> tuple[str, str, str]:
    cause, facts = find_cause(evidence)
    return cause.slug, facts.fill(cause.why), facts.fill(cause.fix)


@pytest.mark.parametrize("message", RECORDED, ids=lambda message: RECORDED[message][0])
def test_recorded_texts_of_gpus(message: str) -> None:
    slug, facts = RECORDED[message]
    cause, why, _ = told(raised(message))
    assert cause == slug
    assert [fact for fact in facts if fact not in why] == []


def test_a_word_of_a_hundred_thousand_characters_is_searched_at_its_ends() -> None:
    missing = "libnccl.so.2: cannot open shared object file"
    case = raised(f"{'x' * 100_000} {missing}\n{'y' * 100_000}")
    assert len(case.text) < 5000  # a pattern takes time by the square of it
    assert told(case)[0] == told(raised(missing))[0] != told(raised("x"))[0]


@pytest.mark.parametrize(
    ("kinds", "errno", "slug"),
    [
        (("builtins.ConnectionRefusedError", "builtins.ConnectionError"), 111, "network"),
        (("requests.exceptions.ReadTimeout", "requests.exceptions.Timeout"), 0, "network"),
        (("urllib.error.URLError", "builtins.OSError"), 0, "network"),
        (("urllib.error.HTTPError", "urllib.error.URLError"), 0, "exception"),
        (("builtins.BrokenPipeError", "builtins.ConnectionError"), 32, "exception"),
        (("builtins.OSError",), 116, "disk-error"),  # ESTALE on Linux
        (("builtins.OSError",), 5, "disk-error"),
    ],
)
def test_what_lies_beyond_this_machine(kinds: tuple[str, ...], errno: int, slug: str) -> None:
    case = Evidence(1, (Raised((*kinds, "builtins.Exception"), "no", errno=errno),))
    assert told(case)[0] == slug


def test_a_recorded_abort_of_ncclss_watchdog() -> None:
    cause, why, _ = told(Evidence(-6, log=WATCHDOG))
    assert cause == "collective-timeout"
    assert "ALLREDUCE" in why
    assert "120822 milliseconds" in why
    # The same words in the log of one that was killed are no reason for that.
    assert told(Evidence(-9, log=WATCHDOG))[0] == "killed"


def test_an_abort_of_which_nothing_is_known() -> None:
    log = "step 7\nterminate called after throwing an instance of 'std::out_of_range'\n"
    slug, why, _ = told(Evidence(-6, log=log))
    assert slug == "aborted"
    assert why.endswith(": terminate called after throwing an instance of 'std::out_of_range'")
    assert told(Evidence(-6, log="  what():  std::bad_alloc"))[0] == "host-memory"


def test_suggestions_know_the_plan(plan: LaunchPlan) -> None:
    def fixes(plan: LaunchPlan) -> list[str]:
        cases = (replace(raised(text), plan=plan) for text in (DEVICE_ASSERT, OUT_OF_MEMORY))
        return [told(case)[2] for case in cases]

    first, second = fixes(plan)
    assert "--debug" in first
    assert "--amp bf16" in second
    blocking = EnvVar("CUDA_LAUNCH_BLOCKING", "1", "", Source(SourceKind.FLAG, "--debug"))
    amp = replace(plan.levers.amp, value=replace(plan.levers.amp.value, precision="bfloat16"))
    levers = replace(plan.levers, amp=amp)
    first, second = fixes(replace(plan, environment=(blocking,), levers=levers))
    assert "--debug" not in first
    assert "--amp" not in second


@pytest.mark.parametrize(
    ("line", "device"),
    [
        ('x = torch.ones(2, device="cuda:1")', "device 1"),
        ("model.cuda(3)", "device 3"),
        ("torch.cuda.set_device(1)", "device 1"),
        ("model.to(device)", "such device"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"strategy": "none"}], ids=["ddp", "none"])
def test_a_rank_that_sees_one_device_is_told_why_another_is_not_there(
    line: str, device: str, options: dict[str, str]
) -> None:
    in_torch = Frame("/site-packages/torch/nn/modules/module.py", 9, "to", "t.to(device)")
    frames = (Frame("/home/me/train.py", 12, "main", line), in_torch)
    error = Raised(("torch.AcceleratorError", *ERROR), NO_SUCH_DEVICE, frames=frames)
    plan = plan_for("8xh100", gpus="0,1", **options)
    slug, why, fix = told(Evidence(1, (error,), plan=plan))
    assert slug == "device-number"
    assert why == f"no {device} (train.py:12): each rank sees one GPU, its own, as device 0"
    assert 'write "cuda"' in fix
    assert "--nproc-per-node 1" in fix


def test_a_process_that_sees_all_devices_is_told_which() -> None:
    for count, seen in ((2, "devices 0 to 1"), (1, "one device, number 0")):
        gpus = ",".join(map(str, range(count)))
        plan = plan_for("8xh100", gpus=gpus, nproc_per_node="1")
        for message in (NO_SUCH_DEVICE, SAVED_ON_DEVICE_1):
            _, why, fix = told(replace(raised(message), plan=plan))
            assert why.endswith(f"the process sees {seen}")
            assert ("doctor" in fix) is (message is NO_SUCH_DEVICE)


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        ((1, 4), (2, 5), "host-memory"),
        ((None, 4), (None, 5), "host-memory"),
        ((1, 4), (1, 4), "killed"),
        ((None, None), (None, 5), "killed"),
    ],
)
def test_a_kill_is_for_memory_if_the_kernel_counts_one(
    before: tuple[int | None, ...], after: tuple[int | None, ...], cause: str
) -> None:
    case = Evidence(
        -9, before=Surroundings(*before), after=Surroundings(*after), peak_bytes=3 << 30
    )
    slug, why, _ = told(case)
    assert slug == cause
    assert (" 3 GiB" in why) is (cause == "host-memory"), "what the largest process had"


def test_the_error_that_ended_it_counts_before_those_that_led_to_it() -> None:
    handled = Raised(("builtins.ImportError",), "no flash_attn")
    shapes = Raised(ERROR, "The size of tensor a (4) must match the size of tensor b (3)")
    assert told(Evidence(1, (shapes, handled)))[0] == "shape-mismatch"
    unknown = Raised(("mine.Error",), "could not save")
    full = Raised(("builtins.OSError",), "[Errno 28] No space left on device", errno=28)
    assert told(Evidence(1, (unknown, full)))[0] == "disk-full"
    assert told(Evidence(1, (unknown, handled)))[0] == "import-failed"
    assert told(Evidence(1, (unknown,)))[:2] == ("exception", "Error: could not save")


def test_a_failed_download_is_no_lost_rank() -> None:
    words = "[Errno 104] Connection reset by peer"
    assert (
        told(raised(words, "builtins.ConnectionResetError", "builtins.OSError"))[0] == "exception"
    )
    assert told(raised(words))[0] == "peer-lost"
    assert told(raised(words, "torch.distributed.DistNetworkError"))[0] == "peer-lost"


def test_an_error_of_fasttrains_own_keeps_its_words() -> None:
    message = "error: no\n  why: it is so\n  fix: do that        [the-slug]"
    own = Raised(("fasttrain.model.errors.FasttrainError", "builtins.Exception"), message)
    case = Evidence(78, (Raised(("builtins.SystemExit",), "78"), own))
    assert told(case) == ("refused", "it is so", "do that")


def test_the_place_is_the_innermost_of_the_users_calls() -> None:
    frames = tuple(
        Frame(file, line, "f")
        for file, line in (
            ("/home/me/train.py", 3), ("/home/me/net.py", 8),
            ("/opt/lib/python3.11/site-packages/torch/nn/linear.py", 99),
            ("/usr/lib/python3.11/json/decoder.py", 1), ("<string>", 1),
        )
    )  # fmt: skip
    assert Evidence(1, (Raised(ERROR, "", frames),)).place() == "net.py:8"


def test_every_row_can_be_told() -> None:
    _, facts = find_cause(raised("no row knows this"))
    names = (
        "device", "waited", "came", "found", "library", "model", "how", "shapes", "what", "types",
        "evidence", "why", "fix", "fault", "package",
    )  # fmt: skip
    facts = replace(facts, **dict.fromkeys(names, "x"))
    for cause in (*CAUSES, *ENDS):
        assert facts.fill(cause.why)
        facts.fill(cause.fix)


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, UNKNOWN), (0, "0 B"), (1536, "1.5 KiB"), (3 << 40, "3 TiB")],
)
def test_size(value: int | None, words: str) -> None:
    assert size(value) == words


def test_a_lock_that_finds_no_room_is_no_full_disk() -> None:
    kinds, message = ("builtins.OSError",), "[Errno 28] No space left on device"
    lock = Frame("/usr/lib/python3.11/multiprocessing/synchronize.py", 57, "__init__")
    full = Raised(kinds, message, (Frame("/me/train.py", 7, "main"), lock), errno=28)
    assert told(Evidence(1, (full,)))[0] == "shared-memory"
    assert told(Evidence(1, (replace(full, frames=full.frames[:1]),)))[0] == "disk-full"
