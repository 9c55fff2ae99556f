from __future__ import annotations

from fasttrain.model.plan import Target

PYTHON = "/usr/bin/python3"
AGENT = (PYTHON, "/lib/shim/agent.py", "/home/me/runs/r1/plan.json")
WORKER = (PYTHON, "/lib/shim/__main__.py", "/home/me/runs/r1/plan.json", "script", "train.py",
          "--lr", "3")  # fmt: skip


def test_one_process_is_the_worker_itself(make):
    assert make.plan(make.machine()).argv == WORKER


def test_a_module_and_its_arguments_arrive_whole(make):
    target = Target("module", "pkg.train", ("--", "a b", "", "\n", "--nproc-per-node=9"))
    argv = make.plan(make.machine(), target=target).argv
    assert argv == (*WORKER[:3], "module", "pkg.train", *target.args)


def test_a_command_is_started_without_the_shim(make):
    assert make.plan(make.machine(), target=make.command).argv == ("./train.sh", "--", "a b")


def test_several_on_one_node_meet_on_a_free_port_of_loopback(make):
    assert make.plan(make.gpus(4), gpus="0,3").argv == (
        *AGENT, "--nnodes=1", "--nproc-per-node=2",
        "--rdzv-backend=loopback", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=r1",
        "--local-addr=127.0.0.1", "--max-restarts=0", "--no-python", "--", *WORKER,
    )  # fmt: skip


def test_static_nodes_meet_at_the_master(make):
    argv = make.plan(
        make.gpus(2), gpus="all", nodes="2", node_rank=1, master_addr="head", max_restarts=3
    ).argv
    assert argv == (
        *AGENT, "--nnodes=2", "--nproc-per-node=2",
        "--node-rank=1", "--master-addr=head", "--master-port=29500", "--max-restarts=3",
        "--no-python", "--", *WORKER,
    )  # fmt: skip


def test_elastic_nodes_meet_at_the_rendezvous(make):
    argv = make.plan(
        make.machine(), nodes="1:4", rdzv_endpoint="head:1", rdzv_id="job", target=make.command
    ).argv
    assert argv == (
        *AGENT, "--nnodes=1:4", "--nproc-per-node=1",
        "--rdzv-backend=c10d", "--rdzv-endpoint=head:1", "--rdzv-id=job", "--max-restarts=0",
        "--no-python", "--", "./train.sh", "--", "a b",
    )  # fmt: skip
