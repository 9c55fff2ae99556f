"""Causes outside of the script: other ranks, memory, devices, disks, installed modules."""

from __future__ import annotations

import errno

from fasttrain.launch.crash.cause_rules import (
    Cause,
    Retry,
    any_of,
    host_memory,
    kind,
    module_here,
    number,
    of_ranks,
    own_error,
    shared_memory,
    text,
    unreachable,
)
from fasttrain.model.vendors import VENDORS

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
