"""The launcher's values and small objects: messages between launchers, paths, environments, exits."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from meshdist.launch.agent import Settings
from meshdist.launch.error_files import Ending, ErrorFiles
from meshdist.launch.failures import Failure
from meshdist.launch.interrupts import Interrupts
from meshdist.launch.job_verdict import OneNode, Report, Stop, Verdict, judge
from meshdist.launch.mpirun import refusal
from meshdist.launch.node_numbering import NodeCard, Plan, number_nodes
from meshdist.launch.node_rendezvous import NodeRendezvous, meet
from meshdist.launch.outputs import STDERR, STDOUT, Outputs, Routing, Streams, parse_streams
from meshdist.launch.reaper import Reaper
from meshdist.launch.several_nodes import SeveralNodes
from meshdist.launch.supervisor import Supervisor
from meshdist.launch.worker_env import new_job, worker_environment
from meshdist.launch.worker_set import Member, WorkerSet
from meshdist.system.deadline import Deadline


def a_job(world_size=1):
    return new_job(world_size=world_size, secret="s", master_addr="127.0.0.1", master_port=0)


def test_launchers_decode_the_messages_of_each_other():
    stop = Stop(launcher=1, problem="no more processes")
    assert Stop.decode(stop.encode()) == stop
    assert Report.decode(Report(launcher=0).encode()).failures == []
    assert NodeCard.decode(NodeCard("node1", num_ranks=8, num_nodes=2).encode()).host == "node1"
    verdict = judge([Report(launcher=0), Report(launcher=1)], may_restart=True)
    assert verdict == Verdict(is_restart=False, status=0, launcher=0, cause=None, problem="")
    assert Verdict.decode(verdict.encode()) == verdict


def test_plan_numbers_hosts_and_ranks():
    plan = Plan(launchers=[1, 0], num_ranks=[4, 2], hosts=["a", "b"], run_id="x", nonce="n", max_restarts=0)
    assert (plan.first_rank(1), plan.world_size) == (4, 6)
    cards = [NodeCard("a", 1, 3), NodeCard("b", 1, 3), NodeCard("c", 1, 3, node=1)]
    assert number_nodes(cards, leader=1) == [2, 0, 1]
    assert NodeRendezvous("node1", 29400, num_nodes=2).node is None


def test_paths_and_streams():
    assert ErrorFiles("logs").path(2, num_restarts=1) == "logs/rank2.restart1.error.json"
    assert parse_streams("0:1,2:3").of(2) == 3
    routing = Routing("logs", redirects=Streams(3))
    assert routing.path(rank=1, stream=STDERR, num_restarts=0) == "logs/rank1.stderr.log"
    with Outputs(Routing(), num_restarts=0) as outputs, contextlib.ExitStack() as stack:
        assert outputs.open(rank=0, local_rank=0, stream=STDOUT, stack=stack) is None


def test_defaults_and_words():
    settings = Settings(kind="script", command=["train.py", "--steps", "100"], num_ranks=4)
    assert settings.master_addr == "127.0.0.1"
    assert Ending(rank=3).how("after the first failure") == "runs on: it cannot be killed"
    killed = Failure(rank=2, pid=77, host="node", status=-9, time_s=0.0, monotonic_s=0.0)
    assert killed.headline() == "rank 2 (pid 77 on node) was killed by SIGKILL"
    assert worker_environment(a_job(2), rank=1)["RANK"] == "1"


def test_mpirun_refuses_what_it_cannot_do():
    assert refusal(["-n", "4", "--nnodes=1"], 1) is None
    assert refusal(["--nnodes", "2"], 2) == (
        "--nnodes 2 does not work with --launcher mpi: one mpirun starts the ranks of all hosts: "
        "mpirun -n RANKS --hostfile FILE python script.py"
    )


def test_interrupts_are_taken_in_order():
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        assert [number.name for number in interrupts.take()] == ["SIGTERM"]
        assert not interrupts.pending()


def test_hosts_begin_a_job():
    nodes = OneNode(num_ranks=2, master_addr="127.0.0.1")
    assert nodes.begin(num_restarts=0).world_size == 2
    nodes.close()
    with Interrupts() as interrupts:
        met = meet(NodeRendezvous("127.0.0.1", 0, num_nodes=1, node=0), 4, 0, interrupts)
        several = SeveralNodes(met, interrupts, master_port=0, grace_s=1.0)
        job = several.begin(num_restarts=0)
        several.close()
    assert (job.world_size, job.node) == (4, 0)


def test_workers_that_end_are_noticed():
    workers = WorkerSet(Reaper(error_directory="/nonexistent"))
    process = subprocess.Popen([sys.executable, "-c", "exit(3)"], start_new_session=True)
    workers.add(Member(0, process.pid, process.poll))
    assert [exit.status for exit in workers.wait(10.0)] == [3]
    workers.close()
    supervisor = Supervisor(a_job())
    assert supervisor.watch(Deadline(1.0))  # no rank is running
    supervisor.close()


@pytest.mark.parametrize("secondary", [False, True])
def test_a_failed_call_is_not_long_taken_for_the_effect_of_another_failure(monkeypatch, secondary):
    monkeypatch.setattr("meshdist.launch.supervisor._SETTLE_S", 60.0 if not secondary else 0.0)
    monkeypatch.setattr("meshdist.launch.supervisor._SETTLE_SHARED_S", 60.0 if secondary else 0.0)
    supervisor = Supervisor(a_job(2))
    computes = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], start_new_session=True)
    supervisor.add(Member(1, computes.pid, computes.poll))
    try:
        failed = {"pid": 1, "host": "here", "status": 1, "time_s": 0, "monotonic_s": 0, "secondary": secondary}
        failed |= {"type": "DistTimeoutError", "message": "rank 1 is missing", "traceback": "", "shared": True}
        os.makedirs(supervisor.job.error_directory)
        with open(supervisor.job.error_file(1), "w", encoding="utf-8") as file:
            json.dump(failed, file)
        assert supervisor.watch(Deadline(20.0))
        assert supervisor.running == [1]
        assert [failure.message for failure in supervisor.failures] == ["rank 1 is missing"]
    finally:
        computes.kill()
        computes.wait()
        supervisor.close()
