"""The parts of the launcher: the first cause, its text, and the ends that the worker set notices."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from argparse import Namespace

import pytest

from meshdist.launch import agent
from meshdist.launch.failures import Failure, first_cause, read_error_file
from meshdist.launch.meshrun import split_command
from meshdist.launch.node_rendezvous import NodeRendezvous
from meshdist.launch.node_rendezvous import _open as open_store
from meshdist.launch.options import Count, rendezvous_of
from meshdist.launch.reaper import Reaper
from meshdist.launch.worker_env import is_torchelastic_launched, new_job, worker_environment
from meshdist.launch.worker_set import Member, WorkerSet
from meshdist.store import TCPStore
from meshdist.system.deadline import Deadline
from meshdist.system.platform import available_cores, parse_num_ranks
from meshdist.system.processes import describe_status, shell_status


def failure(rank, time_s, secondary=False, **more):
    return Failure(rank, 100 + rank, "node", 1, time_s, time_s, secondary, **more)


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([failure(0, 5.0)], 0),
        ([failure(0, 5.0), failure(1, 4.0)], 1),
        ([failure(0, 3.0, secondary=True), failure(1, 4.0)], 1),
        ([failure(0, 3.0, secondary=True), failure(1, 2.0, secondary=True)], 1),
        ([failure(0, 3.0, secondary=True), failure(1, 5.0), failure(2, 4.0)], 2),
    ],
)
def test_cause_is_the_earliest_that_follows_from_no_other(failures, cause):
    assert first_cause(failures).rank == cause


@pytest.mark.parametrize(
    ("status", "says", "exit_status"),
    [(3, "exited with status 3", 3), (-9, "was killed by SIGKILL", 137), (-200, "was killed by signal 200", 328)],
)
def test_status_in_words_and_for_the_shell(status, says, exit_status):
    assert describe_status(status) == says
    assert shell_status(status) == exit_status


def test_headline_takes_the_first_line_of_the_message():
    said = failure(2, 1.0, kind="ValueError", message="one\ntwo", traceback="Traceback ...\n")
    assert said.headline() == "rank 2 (pid 102 on node) exited with status 1: ValueError: one"
    assert said.report() == "rank 2 (pid 102 on node) exited with status 1:\nTraceback ...\n"
    silent = failure(2, 1.0, kind="AssertionError", traceback="Traceback ...\n")
    assert silent.headline() == "rank 2 (pid 102 on node) exited with status 1: AssertionError"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (-9, "was killed by SIGKILL\n  if nobody killed it, the host may have run out of memory: `dmesg` shows"),
        (-11, "was killed by SIGSEGV\n  the environment variable PYTHONFAULTHANDLER=1 makes Python show the line"),
        (-7, "PYTHONFAULTHANDLER=1 makes Python show the line where this happens; is /dev/shm full"),
        (-15, "was killed by SIGTERM\n"),
        (3, "exited with status 3\n"),
    ],
)
def test_report_of_a_killed_rank_says_how_to_find_the_cause(status, words):
    report = failure(2, 1.0)._replace(status=status).report()
    assert words in report
    assert report.count("\n") == (2 if "\n " in words or "shm" in words else 1)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"\xff\xfe", json.dumps({"pid": "x"}).encode()])
def test_error_file_that_says_nothing_is_no_failure(tmp_path, content):
    path = tmp_path / "rank0.json"
    if content is not None:
        path.write_bytes(content)
    assert read_error_file(str(path), 0) is None


@pytest.mark.parametrize(
    ("arguments", "options", "command"),
    [
        (["s.py", "--x"], [], ["s.py", "--x"]),
        (["--nproc_per_node", "2", "s.py"], ["--nproc-per-node", "2"], ["s.py"]),
        (["--nproc_per_node=a_b", "-m", "my_mod", "--a_b"], ["--nproc-per-node=a_b", "-m"], ["my_mod", "--a_b"]),
        (["--no_python", "--log_dir", "my_logs", "prog"], ["--no-python", "--log-dir", "my_logs"], ["prog"]),
        (["--standalone", "--", "-s.py", "--"], ["--standalone"], ["-s.py", "--"]),
        (["--grace"], ["--grace"], []),
        (["-n", "2", "s.py"], ["-n", "2"], ["s.py"]),
        (["-n2", "s.py"], ["-n=2"], ["s.py"]),
    ],
)
def test_options_end_at_the_command(arguments, options, command):
    assert split_command(arguments) == (options, command)


def test_number_of_ranks():
    assert parse_num_ranks("3") == 3
    assert parse_num_ranks("cpu") == available_cores()
    assert parse_num_ranks("auto") >= 1
    for wrong in ("0", "-1", "1.5", "", "GPU", "²"):
        with pytest.raises(ValueError, match="expected a positive number, auto, cpu or gpu"):
            parse_num_ranks(wrong)


def test_gpu_needs_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = "from meshdist.system.platform import parse_num_ranks; parse_num_ranks('gpu')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "no CUDA GPU" in ran.stderr


def test_jobs_differ_and_ranks_share_theirs(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    one, other = (new_job(2, "secret", "127.0.0.1", 1234) for _ in range(2))
    assert one.run_id != other.run_id
    assert one.error_directory != other.error_directory
    assert not os.path.exists(one.error_directory)
    first, second = (worker_environment(one, rank) for rank in range(2))
    differing = {name for name in first if first[name] != second[name]}
    assert differing == {"RANK", "LOCAL_RANK", "ROLE_RANK", "MESHDIST_ERROR_FILE"}
    assert worker_environment(new_job(10_000, "s", "::1", 1), 0)["OMP_NUM_THREADS"] == "1"


def test_launched_is_what_the_environment_says(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not is_torchelastic_launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert is_torchelastic_launched()


def no_pidfd(pid):
    raise OSError("not here")


@pytest.mark.parametrize("pidfd", [True, False])
def test_worker_set_notices_every_end(monkeypatch, pidfd):
    if not pidfd:
        monkeypatch.setattr(os, "pidfd_open", no_pidfd)
    workers = WorkerSet(Reaper("/nonexistent"))
    try:
        processes = [
            subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
            for code in ("exit(4)", "import os; os.abort()", "import time; time.sleep(60)")
        ]
        for rank, process in enumerate(processes):
            workers.add(Member(rank, process.pid, process.poll))
        exits = {}
        while len(exits) < 2:
            found = workers.wait(20.0)
            assert found
            exits.update({exit.rank: exit.status for exit in found})
        assert exits == {0: 4, 1: -signal.SIGABRT}
        assert list(workers.running) == [2]
        assert workers.wait(0.05) == []
        workers.signal(signal.SIGTERM)
        assert [(exit.rank, exit.status) for exit in workers.wait(20.0) or workers.wait(20.0)] == [(2, -signal.SIGTERM)]
    finally:
        workers.close()


def test_worker_set_closes_its_descriptors():
    before = len(os.listdir("/proc/self/fd"))
    workers = WorkerSet(Reaper("/nonexistent"))
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    workers.add(Member(0, process.pid, process.poll))
    workers.close()
    assert process.returncode == -signal.SIGKILL
    assert len(os.listdir("/proc/self/fd")) == before


def test_launchers_of_two_jobs_on_one_host_meet_at_two_ports(monkeypatch):
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "node[1-2]"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    unset = dict.fromkeys(["standalone", "node_rank", "rdzv_endpoint", "master_addr", "rdzv_id", "rdzv_timeout"])
    meetings = []
    for job in ("1001", "1002", "1002"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        meetings.append(rendezvous_of(Namespace(**{**unset, "nnodes": Count(2, 2)})))
    first, second, again = meetings
    assert (first.host, first.node) == ("node1", 1)
    assert first.port != second.port == again.port


def passed_on(listening, port):
    """Take a connection and do not answer; pass the next on to a store."""
    silent, _ = listening.accept()
    with silent, listening.accept()[0] as client, socket.create_connection(("127.0.0.1", port)) as store:
        others = {client: store, store: client}
        while True:
            for sock in select.select(list(others), [], [])[0]:
                data = sock.recv(65536)
                if not data:
                    return
                others[sock].sendall(data)


def test_launchers_wait_for_a_store_on_a_busy_host(monkeypatch):
    monkeypatch.setenv("MESHDIST_SECRET", "s")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, secret=b"s")
        thread = threading.Thread(target=passed_on, args=(listening, master.port), daemon=True)
        thread.start()
        rendezvous = NodeRendezvous("127.0.0.1", listening.getsockname()[1], node=1, num_nodes=2)
        store = open_store(rendezvous, b"s", Deadline(20))
        assert store.add("count", 1) == 1
        store.close()
        thread.join(10)
        master.close()


def test_elastic_job_takes_as_many_hosts_as_slurm_has_started(monkeypatch):
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_STEP_NODELIST": "node[1-3]"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    unset = dict.fromkeys(["standalone", "node_rank", "rdzv_endpoint", "master_addr", "rdzv_id", "rdzv_timeout"])
    met = rendezvous_of(Namespace(**unset, nnodes=Count(2, 4), rdzv_last_call=7.0))
    assert (met.host, met.node, met.least_nodes, met.num_nodes, met.last_call_s) == ("node1", 2, 2, 4, 7.0)
    with pytest.raises(ValueError, match="--nnodes 4:5, but srun .* has started 3 processes"):
        rendezvous_of(Namespace(**unset, nnodes=Count(4, 5), rdzv_last_call=7.0))


def test_a_signal_while_ranks_are_started_ends_the_start(monkeypatch, capfd):
    started, start = [], agent._start

    def start_and_signal(settings, job, rank, outputs):
        started.append(rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return start(settings, job, rank, outputs)

    monkeypatch.setattr(agent, "_start", start_and_signal)
    assert agent.launch(agent.Settings("program", ["sleep", "60"], 4)) == 143
    assert started == [0, 1]
    assert capfd.readouterr().err == "meshrun: stopped by SIGTERM\n"
