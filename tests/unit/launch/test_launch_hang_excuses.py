"""What only looks like a hang; the stacks are shortened from real ones."""

from __future__ import annotations

import pytest

from fasttrain.launch.hang.verdict import (
    AT_PROMPT,
    COMPILES,
    FOR_INPUT,
    IN_DEBUGGER,
    Doing,
    excuse,
    on_network,
)
from fasttrain.launch.process.procfs import Call
from fasttrain.model.hang import Frame, StuckProcess, StuckRank

Stack = tuple[Frame, ...]

WORKER, CHILD, LOADER = 100, 101, 102
SELECT = Frame("selectors.py", 415, "select")
SLEEPS = Frame("train.py", 28, "main", "time.sleep(600)", user=True)
QUEUE = (SELECT, Frame("multiprocessing/connection.py", 1136, "wait"), SLEEPS)
LOADING = (SELECT, Frame("torch/utils/data/dataloader.py", 1275, "_try_get_data"), SLEEPS)
SERVES = (SELECT, Frame("socketserver.py", 233, "serve_forever"), SLEEPS)
GRADIO = (Frame("gradio/blocks.py", 3030, "block_thread"), SLEEPS)
REDUCES = (Frame("torch/distributed/distributed_c10d.py", 3252, "all_reduce"), SLEEPS)
COMMUNICATES = (SELECT, Frame("subprocess.py", 2115, "_communicate"), SLEEPS)
UPLOADS = (Frame("ssl.py", 1210, "send"), Frame("http/client.py", 1055, "send"))
LOCKED = Frame("train.py", 30, "main", "lock.acquire()", user=True)


def rank(number: int, *threads: Stack) -> StuckRank:
    loader = StuckProcess(LOADER, "loader worker", ((SLEEPS,),))
    return StuckRank(number, 5, (StuckProcess(WORKER, "rank", threads), loader))


def worker(call: Call | None = None, *active: int, child: int = CHILD) -> dict[int, Doing]:
    return {WORKER: Doing(call or Call(), frozenset({child, LOADER}), frozenset(active))}


@pytest.mark.parametrize(
    ("inner", "why"),
    [
        (Frame("torch/_dynamo/convert_frame.py", 1, "_compile"), f"rank 1 {COMPILES}"),
        (Frame("torch/_inductor/compile_fx.py", 1, "compile_fx_inner"), f"rank 1 {COMPILES}"),
        (Frame("torch/_inductor/compile_fx.py", 1, "run"), ""),  # a compiled function that runs
        (Frame("torch/_dynamo/eval_frame.py", 1, "compile_wrapper"), ""),
        (Frame("bdb.py", 1, "dispatch_line"), f"rank 1 {IN_DEBUGGER}"),
        (Frame("/src/torch/_dynamo/convert_frame.py", 1, "_compile"), f"rank 1 {COMPILES}"),
        (Frame("IPython/terminal/embed.py", 1, "mainloop"), f"rank 1 {AT_PROMPT}"),
        (Frame("train.py", 9, "main", 'name = input("save as> ")'), f"rank 1 {FOR_INPUT}"),
        (Frame("train.py", 9, "main", "loss = model.input(x)"), ""),
        (Frame("train.py", 9, "main", "loss = model(inputs)"), ""),
        (LOCKED, ""),
    ],
)
@pytest.mark.parametrize("automatic", [True, False])
def test_by_where_the_main_thread_is(inner: Frame, why: str, automatic: bool) -> None:
    ranks = (rank(0, (SLEEPS,)), rank(1, (inner, SLEEPS)))
    assert excuse(ranks, {}, automatic=automatic) == why


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (Call("read", 0), f"rank 0 {FOR_INPUT}"),
        (Call("read", 5), ""),
        (Call("network", 0), ""),
    ],
)
@pytest.mark.parametrize("stack", [(SLEEPS,), ()])
def test_a_read(stack: Stack, call: Call, why: str) -> None:
    assert excuse((rank(0, stack),), worker(call), automatic=False) == why


def test_a_child_of_the_script_is_none_of_the_loaders() -> None:
    child = StuckProcess(CHILD, "child", ((SLEEPS,),))
    waits = StuckRank(0, 5, (*rank(0, COMMUNICATES).processes, child))
    assert excuse((waits,), worker(Call(), CHILD), automatic=True)
    assert not excuse((waits,), worker(Call(), LOADER), automatic=True)


@pytest.mark.parametrize(
    ("stack", "call", "active", "excused"),
    [
        ((SLEEPS,), Call("wait", CHILD), CHILD, True),  # os.system
        (COMMUNICATES, Call(), CHILD, True),
        ((SLEEPS,), Call("wait", CHILD), WORKER, False),  # the child is stuck too
        (COMMUNICATES, Call(), WORKER, False),
        (COMMUNICATES, Call(), LOADER, False),
        ((LOCKED,), Call(), CHILD, False),  # wandb's or TensorBoard's process goes on
        (LOADING, Call(), CHILD, False),
    ],
)
def test_waiting_for_a_child(stack: Stack, call: Call, active: int, excused: bool) -> None:
    ranks, doing = (rank(0, stack),), worker(call, active)
    assert bool(excuse(ranks, doing, automatic=True)) is excused
    assert excuse(ranks, doing, automatic=False) == "", "a time of the user's counts"


@pytest.mark.parametrize(
    ("threads", "call", "alone", "several"),
    [
        ([SERVES], Call(), True, True),
        ([GRADIO], Call(), True, True),
        ([(UPLOADS[0], SLEEPS)], Call(), True, True),
        ([(LOCKED,), UPLOADS], Call(), True, True),  # boto3 uploads by threads
        ([(SLEEPS,)], Call("network", 4), True, False),  # that may lead to another rank
        ([REDUCES], Call("network", 4), False, False),
        ([QUEUE], Call(), False, False),
        ([LOADING], Call(), False, False),
        ([COMMUNICATES], Call(), False, False),
        ([(LOCKED,), SERVES], Call(), False, False),
        ([(LOCKED, *SERVES)], Call(), False, False),  # in the answer to a request
        ([], Call("network", 4), True, False),
    ],
)
def test_on_the_network(threads: list[Stack], call: Call, alone: bool, several: bool) -> None:
    found = rank(0, *threads)
    assert on_network(found, worker(call), alone=True) is alone
    assert on_network(found, worker(call), alone=False) is several
