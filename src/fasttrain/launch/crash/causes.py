"""The table of causes: why a rank failed and what to do about it; special rows come first."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from fasttrain.launch.crash.cause_rules import (
    Cause,
    Facts,
    Retry,
    absent_device,
    any_of,
    argparse_refused,
    exit_code,
    host_memory,
    kind,
    module_here,
    number,
    of_ranks,
    other_exception,
    own_check,
    own_error,
    saved_elsewhere,
    shared_memory,
    signalled,
    text,
    unreachable,
)
from fasttrain.launch.crash.evidence import Evidence
from fasttrain.model.vendors import VENDORS

# Causes inside the script: checkpoints, its processes, shapes, gradients.


INSIDE = (
    # Checkpoints and pickles.
    Cause(
        "weights-only", Retry.NEVER, text(r"Weights only load failed"),
        "torch.load takes tensors alone by default, and the file holds more, or is no checkpoint",
        "if you trust the file: torch.load(..., weights_only=False), or"
        " torch.serialization.add_safe_globals for its classes",
    ),
    Cause(
        "checkpoint-broken", Retry.NEVER,
        text(r"PytorchStreamReader failed", r"invalid load key", r"pickle data was truncated"),
        "the checkpoint is cut off, or is none",
        "take an older one; a run that was killed while it saved leaves such files",
    ),
    Cause(
        "state-dict", Retry.NEVER, text(r"Error\(s\) in loading state_dict for (?P<model>\w+)"),
        "the checkpoint's names or shapes are not those of {model}",
        "build the model as it was saved; a prefix such as module. or _orig_mod. has to be cut off",
    ),
    Cause(
        "main-guard", Retry.NEVER,
        text(r"before the\s+current process has finished its bootstrapping phase"),
        "the script starts processes while it is imported by one of them",
        'put what runs it below `if __name__ == "__main__":`',
    ),
    Cause(
        "pickling", Retry.NEVER, text(r"Can't pickle", r"[Cc]annot pickle", r"Can't get attribute"),
        "something that goes to another process or into a file can't be pickled: {message}",
        "define it at the top of a module, not inside of a function; a lambda and an open file"
        " can't go",
    ),
    # Other processes of the script.
    Cause(
        "loader-worker", Retry.ONCE,
        text(r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (?P<how>[^.\n]+)"),
        "a DataLoader worker died: {how}",
        "run with num_workers=0 once, to see the error itself",
    ),
    Cause(
        "child-died", Retry.ONCE,
        text(r"process \d+ terminated with (?P<how>signal \w+|exit code \d+)"),
        "a process that the script started died with {how}", "see what it said in the log",
    ),
    # Shapes and types. Source: messages of torch 2.13 on a CPU.
    Cause(
        "shape-mismatch", Retry.TRAINED,
        text(
            r"(?P<shapes>mat1 and mat2 shapes cannot be multiplied.*)",
            r"(?P<shapes>The size of tensor a .* must match .*)",
            r"(?P<shapes>Given groups=.*)", r"(?P<shapes>Sizes of tensors must match.*)",
            r"(?P<shapes>shape '.*' is invalid for input of size \d+)",
            r"(?P<shapes>stack expects each tensor to be equal size.*)",
            r"(?P<shapes>Expected input batch_size .* to match target batch_size.*)",
            r"(?P<shapes>[Ss]ize mismatch.*)",
        ),
        "shapes don't fit: {shapes}", "print the shapes in front of {place}",
    ),
    Cause(
        "index-range", Retry.TRAINED,
        text(r"(?P<what>Target -?\d+) is out of bounds", r"(?P<what>index) out of range in self"),
        "{what} is outside of the classes or rows that there are",
        "compare the largest value with the size of the layer at {place}",
    ),
    Cause(
        "dtype-mismatch", Retry.TRAINED,
        text(
            r"(?P<types>.*must have the same dtype.*)", r"(?P<types>expected .*scalar type.*)",
            r"(?P<types>Input type .* and (?:bias|weight) type .* should be the same)",
        ),
        "dtypes don't fit: {types}", "convert one of them (.float(), .to(dtype)) at {place}",
    ),
    Cause(
        "device-mismatch", Retry.TRAINED,
        text(
            r"Expected all tensors to be on the same device(?:, )?(?P<which>.*)",
            r"Tensor on device (?P<which>\w+ is not on the expected device \w+)",
        ),
        "tensors of one call are on different devices: {which}",
        "move the inputs to the model's device in front of {place}",
    ),
    # Gradients.
    Cause(
        "no-gradient", Retry.TRAINED, text(r"does not require grad and does not have a grad_fn"),
        "backward() was called on what doesn't depend on a parameter",
        "look for detach(), .item(), no_grad or frozen parameters between the model and the loss",
    ),
    Cause(
        "backward-twice", Retry.TRAINED, text(r"backward through the graph a second time"),
        "the graph of this loss is gone: a backward pass has used it up",
        "compute the loss again for each backward pass, or detach() what is kept from the last one",
    ),
    Cause(
        "double-backward", Retry.TRAINED, text(r"does not currently support double backward"),
        "a compiled model was differentiated twice, which torch.compile doesn't support",
        "run with --compile off, or leave the model's torch.compile out",
    ),
    Cause(
        "inplace", Retry.TRAINED, text(r"has been modified by an inplace operation"),
        "a tensor that the backward pass needs was changed in place",
        "write x = x + y instead of x += y;"
        " torch.autograd.set_detect_anomaly(True) names the operation",
    ),
    # Exceptions of Python itself.
    Cause(
        "interrupted", Retry.NEVER,
        kind("KeyboardInterrupt"), "it was interrupted by SIGINT (ctrl-C)", "",
    ),
    Cause(
        "assertion", Retry.TRAINED,
        own_check, "the script's own check at {place} failed: {source}",
        "print the values that it compares",
    ),
    Cause(
        "assertion", Retry.TRAINED,
        kind("AssertionError"), "a check at {checked_at} failed: {check}",
        "see what it is given at {place}",
    ),
    Cause(
        "usage", Retry.NEVER, argparse_refused, "the script refused its arguments: {arguments}",
        "its own options go after --: fasttrain run SCRIPT -- --its-option",
    ),
    Cause(
        "recursion", Retry.TRAINED,
        kind("RecursionError"), "a function calls itself without an end", "",
    ),
)  # fmt: skip


# Causes outside of the script: other ranks, memory, devices, disks, installed modules.


_DEVICES = "|".join(dict.fromkeys(v.memory_words for v in VENDORS.values() if v.memory_words))
SHM_FIX = (
    "give the container more (docker run --shm-size=8g, or --ipc=host), or use fewer workers in the"
    " DataLoader"
)

AROUND = (
    Cause("refused", Retry.NEVER, own_error, "{why}", "{fix}"),
    # What ranks report of each other. Source of the texts: torch 2.13, gloo's transport/tcp and
    # c10d's TCPStore and ProcessGroupNCCL; NVIDIA/nccl#2076.
    Cause(
        "collective-timeout", Retry.ONCE,
        of_ranks(
            r"Watchdog caught collective operation timeout: WorkNCCL\(.*?OpType=(?P<call>\w+)"
            r".*?\) ran for (?P<waited>\d+ milliseconds)",
            r"Timed out waiting (?P<waited>\d+ms) for \w+ operation to complete",
            r"(?P<waited>Application timeout) caused pair closure",
        ),
        "it waited in the collective {call} for the other ranks ({waited}), and not all came",
        "see which rank does something else there: a branch, a loop of another length, a slow file;"
        " --debug names ranks that call different collectives",
        of_a_peer=True,
    ),
    Cause(
        "peer-lost", Retry.ALWAYS,
        of_ranks(
            r"Connection (?:closed|reset) by (?:remote )?peer", r"ncclRemoteError",
            r"remote process exited or there was a network error",
            r"Connection was likely closed", r"NCCL communicator was aborted",
            r"recvValue failed", r"sendBytes failed",
        ),
        "another rank went away, or the network to it",
        "look for the rank that failed by itself: its log here, or the card of its node",
        of_a_peer=True,
    ),
    Cause(
        "rendezvous-timeout", Retry.ALWAYS,
        of_ranks(
            r"Timed out after (?P<waited>[\d.]+ \w+) waiting for clients\. (?P<came>[\d/]+)",
            r"wait timeout after (?P<waited>\d+ms)",
        ),
        "not all ranks came to the meeting point in {waited}",
        "see that every node was started, with the same address and port, and can reach it",
        of_a_peer=True,
    ),
    Cause(
        "memory-of-rows", Retry.TRAINED,
        # Source: torch 2.13, c10/core/StorageImpl.cpp
        of_ranks(r"Cannot access data pointer of Tensor"),
        "an extension in C++ was given a large tensor of which each rank has its rows only",
        "at {place}, give it torch.empty_like(x).copy_(x), or call it from a"
        " torch.autograd.Function",
    ),
    Cause(
        "shared-device", Retry.NEVER,
        # Source: NCCL 2.27, src/init.cc
        text(r"Duplicate GPU detected : (?P<which>rank \d+ and rank \d+)"),
        "{which} are on one GPU, and NCCL wants one for each",
        'have each rank use its own: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), and'
        " leave CUDA_VISIBLE_DEVICES to fasttrain (--gpus)",
    ),
    Cause(
        "unused-parameters", Retry.TRAINED,
        text(r"Expected to have finished reduction in the prior iteration"),
        "DistributedDataParallel waits for gradients of parameters that this step didn't use",
        "make it with find_unused_parameters=True, or leave the unused parameters out",
    ),
    # Memory. Source of the texts: torch 2.0 to 2.13, CUDACachingAllocator.cpp; other devices are
    # taken to use the same words.
    Cause(
        "device-memory", Retry.ONCE,
        text(
            rf"(?P<device>{_DEVICES}) out of memory\. Tried to allocate"
            r" (?P<wanted>[\d.]+ \w+)\. \w+ \d+ has a total capaci?ty of (?P<total>[\d.]+ \w+)"
            r" of which (?P<free>[\d.]+ \w+)",
            rf"(?P<device>{_DEVICES}) out of memory.*?ried to allocate"
            r" (?P<wanted>[\d.]+ \w+).*?(?P<total>[\d.]+ \w+) total capacity.*?"
            r"(?P<free>[\d.]+ \w+) free",
            rf"(?P<device>{_DEVICES}) out of memory",
        ),
        "the device has too little memory: {wanted} wanted, {free} free of {total}",
        "take a smaller batch{less_memory}",
    ),
    Cause(
        "device-memory", Retry.ONCE,
        text(r"CUBLAS_STATUS_ALLOC_FAILED", r"cudaErrorMemoryAllocation"),
        "a library on the device found no memory", "take a smaller batch{less_memory}",
    ),
    Cause(
        "shared-memory", Retry.ONCE, shared_memory,
        "there was no room in /dev/shm, which has {shm}", SHM_FIX,
    ),
    Cause(
        "host-memory", Retry.ONCE, host_memory,
        "the machine ran out of memory: {evidence}",
        "use fewer DataLoader workers or a smaller batch, load less at once, or ask for more"
        " memory",
    ),
    Cause(
        "device-fault", Retry.ALWAYS,
        # Source: cudaErrorECCUncorrectable, vllm-project/vllm#5222; cudaErrorNvlinkUncorrectable
        text(r"uncorrectable (?P<fault>ECC|NVLink) error"),
        "the device reports an {fault} error that it can't correct",
        "fasttrain doctor tells the device's state; a new run may do, or a reset of the device",
    ),
    # What a CUDA kernel does shows later, somewhere else. Source: torch 2.13, c10/cuda.
    Cause(
        "device-assert", Retry.TRAINED, text(r"device-side assert triggered"),
        "a kernel on the device found a wrong value, most often a label or index out of range",
        "{debug}; on the CPU (--device cpu) the error names the value",
    ),
    Cause(
        "illegal-access", Retry.TRAINED, text(r"an illegal memory access was encountered"),
        "a kernel on the device reached outside of its tensors", "{debug}",
    ),
    Cause(
        "driver-too-old", Retry.NEVER,
        text(
            r"NVIDIA driver on your system is too old \(found version (?P<found>\d+)",
            r"(?P<found>CUDA driver version) is insufficient for CUDA runtime",
        ),
        "the NVIDIA driver ({found}) is older than what this torch was built for",
        "update the driver, or install a torch built for an older CUDA; fasttrain doctor tells",
    ),
    Cause(
        "wrong-gpu", Retry.NEVER, text(r"no kernel image is available for execution on the device"),
        "this torch was not built for this GPU's architecture",
        "install a torch that was; fasttrain doctor names both",
    ),
    Cause(
        "no-cuda", Retry.NEVER,
        # Source: what torch 2.13 says on a CPU, of one call of torch.cuda or another; the last one
        # is that of a build for CUDA
        text(
            r"Torch not compiled with CUDA enabled", r"Found no NVIDIA driver",
            r"module 'torch\._C' has no attribute '_cuda_\w+'",
            r"torch\.cuda\.\w+ requires CUDA support", r"Tried to instantiate dummy base class",
            r"without ATen_cuda library", r"PyTorch was compiled without CUDA support",
            r"Cannot access accelerator device when none is available",
            r"No CUDA GPUs are available",
        ),
        "the script asks for a CUDA GPU, and this torch or this machine has none",
        "have the script take its device from torch.cuda.is_available(); fasttrain doctor tells"
        " what is missing",
    ),
    Cause(
        "device-number", Retry.NEVER, absent_device, "no {device} ({place}): {seen}", "{instead}",
    ),
    Cause(
        "map-location", Retry.NEVER, saved_elsewhere,
        "the file holds tensors of {device}, and {seen}",
        'load it with torch.load(..., map_location="cpu")',
    ),
    Cause(
        "no-nccl", Retry.NEVER,
        # Source: torch 2.13, torch/distributed/distributed_c10d.py, and ProcessGroupNCCL.cpp
        text(r"doesn't have NCCL built in", r"ProcessGroupNCCL is only supported with GPUs"),
        "the script's ranks meet by NCCL, which needs CUDA GPUs; this torch or machine has none",
        'have the script take "nccl" if torch.cuda.is_available() and "gloo" if not',
    ),
    Cause(
        "map-location", Retry.NEVER, text(r"Attempting to deserialize object on a CUDA device"),
        "the file holds tensors of a GPU, and none is visible here",
        'load it with torch.load(..., map_location="cpu")',
    ),
    Cause(
        "cuda-fork", Retry.NEVER, text(r"Cannot re-initialize CUDA in forked subprocess"),
        "a forked process used CUDA, which its parent had begun to use",
        'start it with the "spawn" method, or leave CUDA to the parent',
    ),
    # Disks, files, ports, networks.
    Cause(
        "disk-full", Retry.NEVER,
        number(
            (errno.ENOSPC, errno.EDQUOT),
            # torch.save of torch 2.13, for a file that it opens itself
            r"inline_container\.cc:\d+\] \. (?:unexpected pos|PytorchStreamWriter failed)",
            r"iostream error", r"No space left on device", r"Disk quota exceeded",
        ),
        "a file could not be written to its end; the disk or the quota is full",
        "make room, or write somewhere else (df -h and quota -s show how much there is)",
    ),
    Cause(
        "too-many-files", Retry.ONCE,
        number(
            (errno.EMFILE, errno.ENFILE), r"Too many open files", r"received 0 items of ancdata"
        ),
        "the limit of open files was reached",
        "raise it (ulimit -n 65536); where DataLoader workers hold the files,"
        ' torch.multiprocessing.set_sharing_strategy("file_system") helps, too',
    ),
    Cause(
        "port-in-use", Retry.ALWAYS,
        number((errno.EADDRINUSE,), r"EADDRINUSE", r"[Aa]ddress already in use"),
        "another process has the port that the script wants to open",
        "end that process, or choose another port; fasttrain's own ranks need none to be named",
    ),
    Cause(
        "disk-error", Retry.ALWAYS,
        # Source: errno(3): input/output error, stale NFS handle, no endpoint (FUSE), remote I/O
        number((errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EREMOTEIO), r"Stale file handle"),
        "a file system failed, or its server went away: {message}",
        "see whether it is there again (df, dmesg), and ask those who run it",
    ),
    Cause(
        "network", Retry.ALWAYS,
        any_of(
            unreachable,
            # Source: NCCL's documentation, ncclResult_t: a call to the system failed
            text(r"ncclSystemError", r"NCCL error.*?unhandled system error"),
        ),
        "another machine did not answer, or ended the connection: {message}",
        "see whether it can be reached from here, and whether its name is right",
    ),
    Cause(
        "file-missing", Retry.TRAINED, kind("FileNotFoundError", "NotADirectoryError"),
        "{no_file}; the working directory is {cwd}",
        "check the path, and whether it is meant from another directory",
    ),
    Cause(
        "not-permitted", Retry.TRAINED,
        kind("PermissionError"), "{no_right}",
        "look at its owner and mode (ls -l), or write somewhere else",
    ),
    # Modules.
    Cause(
        "module-missing", Retry.NEVER, module_here,
        "Python looks for {subject} beside the script, and it lies in {started_in}",
        "have Python look there: PYTHONPATH=., or fasttrain run {as_module}",
    ),
    Cause(
        "module-missing", Retry.NEVER, kind("ModuleNotFoundError"), "{no_module}",
        "{python} -m pip install the package that holds it, or run the script with the Python that"
        " has it",
    ),
    Cause(
        "library-missing", Retry.NEVER,
        text(r"(?P<library>\S+\.so[.\d]*): cannot open shared object file"),
        "the library {library} is not where the loader looks",
        "install what holds it, or add its directory to LD_LIBRARY_PATH",
    ),
    Cause(
        "built-for-another", Retry.NEVER,
        # Source: torch 2.13, torch/library.py; what torchvision does when it is imported
        text(r"operator (?P<package>torchvision|torchaudio)::\w+ does not exist"),
        "{package} was built for another version of torch than the one that is here",
        "{python} -m pip check names that version; install the {package} of this torch, from the"
        " same index as torch",
    ),
    Cause(
        "built-for-another", Retry.NEVER, text(r"undefined symbol", r"numpy\.dtype size changed"),
        "an extension was built for another version of what it is loaded into",
        "rebuild or reinstall it for the torch and numpy that are there",
    ),
    Cause(
        "import-failed", Retry.NEVER, kind("ImportError"), "{message}",
        "see whether the installed version of the package has that name",
    ),
    Cause("syntax", Retry.NEVER, kind("SyntaxError"), "{message}", "mend that line"),
)  # fmt: skip


# The table of causes: why a rank failed and what to do about it; special rows come first.


CAUSES = (*AROUND, *INSIDE)

# What a signal or an exit code alone shows; an exception is reported in its own words.
ENDS = (
    Cause("exception", Retry.TRAINED, other_exception, "{error}", ""),
    Cause(
        "killed", Retry.ALWAYS, signalled("SIGKILL"),
        "something killed it with SIGKILL; no sign that memory ran out was seen",
        "look for a job's memory or time limit, a cleaning script, or kill -9 by hand",
    ),
    Cause(
        "segfault", Retry.ONCE, signalled("SIGSEGV"),
        "compiled code reached outside of its memory{stack}",
        "look for an extension that was built for another version; run with --debug",
    ),
    Cause(
        "bus-error", Retry.ONCE, signalled("SIGBUS"),
        "memory that was mapped has nothing behind it: /dev/shm ({shm}) is full, or a mapped file"
        " was cut{stack}", SHM_FIX,
    ),
    Cause(
        "illegal-instruction", Retry.NEVER, signalled("SIGILL"),
        "compiled code uses an instruction that this CPU doesn't have{stack}",
        "install builds for this CPU; fasttrain doctor names what it has",
    ),
    Cause(
        "aborted", Retry.ONCE, signalled("SIGABRT"), "compiled code gave up{gave_up}{stack}",
        "look at the last lines of its log",
    ),
    Cause(
        "arithmetic", Retry.ONCE,
        signalled("SIGFPE"), "compiled code divided an integer by zero{stack}", "",
    ),
    Cause(
        "interrupted", Retry.NEVER,
        signalled("SIGINT"), "it was interrupted by SIGINT (ctrl-C)", "",
    ),
    Cause(
        "stopped", Retry.ALWAYS,
        signalled("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU"),
        "it was stopped from outside by {signal}",
        "",
    ),
    Cause("signal", Retry.ALWAYS, signalled(), "it died of {signal}{stack}", ""),
    Cause(
        "exit", Retry.TRAINED, exit_code,
        "the script ended itself with exit code {code}{exit_place}{exit_text}", "",
    ),
)  # fmt: skip

HUNG = "hang"  # the one cause without a row: no rank has failed, and the launcher ended them
_RETRY = {HUNG: Retry.ONCE} | {cause.slug: cause.retry for cause in (*CAUSES, *ENDS)}
# Causes that last while an exception is handled, so that what fails next may well fail by them. A
# missing file or module that was handled explains nothing of what came later.
LASTING = {
    "device-memory", "shared-memory", "host-memory", "device-fault", "device-assert",
    "illegal-access", "disk-full", "too-many-files", "disk-error",
}  # fmt: skip
_OF_PEERS = {cause.slug for cause in CAUSES if cause.of_a_peer}


def retry_of(slug: str) -> Retry:
    """Return whether another attempt can end better after a cause."""
    return _RETRY[slug]


def is_of_a_peer(slug: str) -> bool:
    """True if a cause is what a rank reports of another one that it lost or waited for."""
    return slug in _OF_PEERS


def _candidates(evidence: Evidence) -> Iterator[Cause]:
    return (
        cause for cause in CAUSES
        if not evidence.handled or cause.of_a_peer or cause.slug in LASTING
    )  # fmt: skip


def find_cause(evidence: Evidence) -> tuple[Cause, Facts]:
    """Return the first row that fits, and its facts.

    The exception that ended the script is asked first; where no row knows it, those that led to
    it: a script may turn torch's error about a full disk into a RuntimeError of its own. Of an
    exception that was only being handled then (no `raise ... from`), only what lasts is a cause.
    """
    for one in evidence.each():
        for cause in _candidates(one):
            if (facts := cause.rule(one)) is not None:
                return cause, facts
    for cause in ENDS:
        if (facts := cause.rule(evidence.telling())) is not None:
            return cause, facts
    raise AssertionError("the last row takes whatever is left")
