from __future__ import annotations

import pytest


def _processes(make, *args, **options):
    return make.plan(*args, **options).processes.value


def test_one_process_needs_no_agent(make):
    processes = _processes(make, make.machine())
    assert (processes.backend, processes.world_size, processes.master_port) == ("direct", 1, 0)
    assert _processes(make, make.gpus(8), gpus="5").backend == "direct"


def test_one_process_per_chosen_gpu_unless_told_otherwise(make):
    processes = _processes(make, make.gpus(8), gpus="0,3")
    assert (processes.backend, processes.nproc_per_node) == ("torchrun", 2)
    assert _processes(make, make.gpus(8), gpus="0,3", nproc_per_node=1).backend == "direct"
    assert _processes(make, make.gpus(8), nproc_per_node=8).nproc_per_node == 8


def test_the_cpu_takes_any_number(make):
    assert _processes(make, make.machine(), nproc_per_node=64).nproc_per_node == 64


@pytest.mark.parametrize("options", [{"gpus": "0,3"}, {}])
def test_more_processes_than_devices(make, options):
    error = make.refused(make.gpus(2 if not options else 4), nproc_per_node=3, **options)
    assert (error.slug, error.exit_code) == ("nproc-devices", 78)


def test_one_process_needs_no_torchrun_to_be_restarted(make):
    processes = _processes(make, make.machine(), max_restarts=2)
    assert (processes.backend, processes.max_restarts) == ("direct", 2)


def test_a_static_run_on_several_nodes(make):
    options = {"nodes": "2", "node_rank": 1, "master_addr": "head"}
    plan = make.plan(make.gpus(8), gpus="all", **options)
    processes = plan.processes.value
    assert (processes.min_nodes, processes.max_nodes, processes.node_rank) == (2, 2, 1)
    assert (processes.master_addr, processes.master_port) == ("head", 29500)
    assert processes.world_size == 16
    assert "29500" in plan.processes.reason
    own = _processes(make, make.gpus(8), master_port=7, **options)
    assert (own.master_port, own.backend) == (7, "torchrun")


def test_an_elastic_run(make):
    options = {"nodes": "1:4", "rdzv_endpoint": "head:29400"}
    processes = _processes(make, make.machine(), **options)
    assert (processes.min_nodes, processes.max_nodes, processes.world_size) == (1, 4, 4)
    assert (processes.rdzv_backend, processes.rdzv_endpoint) == ("c10d", "head:29400")
    assert (processes.rdzv_id, processes.master_port) == ("none", 0)
    named = _processes(make, make.machine(), rdzv_id="job", rdzv_backend="etcd-v2", **options)
    assert (named.rdzv_id, named.rdzv_backend) == ("job", "etcd-v2")


def test_a_rendezvous_stands_in_for_rank_and_address(make):
    processes = _processes(make, make.machine(), nodes="2", rdzv_endpoint="head")
    assert (processes.min_nodes, processes.max_nodes) == (2, 2)
    assert processes.backend == "torchrun"


@pytest.mark.parametrize("nodes", ["0", "", "x", "2:1", "1:", ":2", "1:2:3", "-1", "1.5", "0:2"])
def test_malformed_nodes(make, nodes):
    error = make.refused(make.machine(), nodes=nodes, rdzv_endpoint="head")
    assert (error.slug, error.exit_code) == ("nodes-syntax", 2)


def test_a_range_of_nodes_needs_a_rendezvous(make):
    assert make.refused(make.machine(), nodes="1:4").slug == "nodes-rdzv"
    assert _processes(make, make.machine(), nodes="1:1").backend == "direct"


@pytest.mark.parametrize(
    "options", [{}, {"node_rank": 0}, {"master_addr": "head"}, {"node_rank": 0, "master_addr": ""}]
)
def test_a_static_run_needs_rank_and_address(make, options):
    error = make.refused(make.machine(), nodes="2", **options)
    assert (error.slug, error.exit_code) == ("nodes-master", 78)


@pytest.mark.parametrize("options", [{"node_rank": 1}, {"nodes": "2", "node_rank": 2}])
def test_a_node_rank_that_does_not_exist(make, options):
    error = make.refused(make.machine(), master_addr="head", **options)
    assert (error.slug, error.exit_code) == ("node-rank", 78)


def test_what_the_way_of_meeting_does_not_use_is_told(make):
    one = make.plan(make.machine(), node_rank=0, master_addr="head", master_port=1, rdzv_id="x")
    told = [warning.split()[0] for warning in one.warnings]
    assert told == ["--node-rank", "--master-addr", "--master-port", "--rdzv-id"]
    elastic = make.plan(make.machine(), nodes="1:2", rdzv_endpoint="h", rdzv_id="x", node_rank=0)
    assert [warning.split()[0] for warning in elastic.warnings] == ["--node-rank"]


@pytest.mark.parametrize(
    ("text", "ranks"), [("0", (0,)), ("all", None), ("0,3", (0, 3)), ("3, 0,3", (3, 0))]
)
def test_show_ranks(make, text, ranks):
    assert make.plan(make.gpus(4), gpus="all", show_ranks=text).show_ranks == ranks


@pytest.mark.parametrize("text", ["", "a", "0,,1", "-1", "0-2", "all,1"])
def test_malformed_show_ranks(make, text):
    error = make.refused(make.machine(), show_ranks=text)
    assert (error.slug, error.exit_code) == ("show-ranks", 2)


def test_a_shown_rank_that_does_not_exist(make):
    error = make.refused(make.gpus(4), gpus="0,1", show_ranks="0,2")
    assert (error.slug, error.exit_code) == ("show-ranks", 78)
