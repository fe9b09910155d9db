"""`attach` reports which ranks of a running job wait for which, and where."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
from by_hand import KILLED
from trying import attempt
from until import until
from worlds import report

import meshdist as dist
from meshdist.debug.attach import attach, hang_at_the_end, jobs_here
from meshdist.debug.hang_report import hang_report
from meshdist.debug.wait_graph import who_waits

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]


def wait_and_answer():
    group = dist.new_group(timeout=20.0, group_desc="patient")
    group.barrier()
    report("waits")
    if dist.get_rank() == 1:
        end = time.monotonic() + 60
        while time.monotonic() < end and not os.environ.get("NEVER"):
            sum(range(1000))
    group.all_reduce(np.ones(4))


def wait_until_ended():
    dist.barrier()
    if dist.get_rank() == 0:
        dist.recv(np.ones(4), src=1, tag=2)
    report("waits")
    threading.Event().wait(60)


def refuse(*args):
    raise AssertionError("a new connection")


@pytest.mark.slow
def test_ctrl_c_asks_the_ranks_without_another_connection(new_workers, monkeypatch):
    workers = new_workers(2, timeout_s=60.0)
    host, _, port = workers.address.rpartition(":")
    with dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False) as store:
        workers.start(wait_until_ended)
        workers.reported(1)
        monkeypatch.setattr(socket.socket, "connect", refuse)  # on a busy host, the store may take long to accept one

        lines = until(lambda: hang_at_the_end(store, workers.address), "rank 0 has waited for long")
    words = "rank 1 has not sent the message that rank 0 is waiting for in recv(float64[4] from rank 1, tag=2)"
    assert lines[0].startswith(words), lines


def test_attach_asks_a_running_job(new_workers):
    workers = new_workers(3, timeout_s=20.0)
    workers.start(wait_and_answer)
    for rank in range(3):
        workers.reported(rank)
    for rank in (0, 2):
        workers.until_asleep(rank)
    found = attach(workers.address)
    assert sorted(found.states) == [0, 1, 2]
    assert found.world_size == 3
    text = "\n".join(hang_report(who_waits(found.states, found.gone), found.world_size))
    assert "rank 1 has not reached all_reduce(float64[4], op=sum), call 2 on 'patient'" in text
    assert re.search(
        r"rank 1 is not in a meshdist call; it has been at test_hang_attach.py:\d+ in wait_and_answer", text
    )
    # A rank that dies meanwhile is told of as dead. The others give up then, and may have left when they are asked.
    workers.signal(1, signal.SIGKILL)
    assert workers.ended(1)
    again = attach(workers.address)
    assert re.fullmatch(KILLED, again.gone[1])


def test_attach_by_the_command_line(new_workers):
    workers = new_workers(2, timeout_s=20.0)
    workers.start(wait_and_answer)
    for rank in range(2):
        workers.reported(rank)
    command = [sys.executable, "-m", "meshdist.debug", "attach", "--store", workers.address, "--stacks"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Flight records of all 2 ranks" in done.stdout
    assert "in wait_and_answer" in done.stdout


def shrink_twice_and_wait():
    rank = dist.get_rank()
    if rank in (0, 2):
        report("excluded")
        return
    dist.shrink_group([2])
    dist.shrink_group([0])
    report(dist.get_rank())
    if rank == 3:
        end = time.monotonic() + 60
        while time.monotonic() < end and not os.environ.get("NEVER"):
            sum(range(1000))
    dist.new_group(timeout=20.0, group_desc="patient").barrier()


def test_attach_finds_a_world_that_was_shrunk(new_workers, capsys):
    from meshdist.debug.__main__ import main

    workers = new_workers(5, timeout_s=20.0)
    workers.start(shrink_twice_and_wait)
    assert [workers.reported(rank) for rank in range(5)] == ["excluded", 0, "excluded", 1, 2]
    for rank in (1, 4):
        workers.until_asleep(rank)
    found = attach(workers.address)
    assert sorted(found.states) == [0, 1, 2]
    assert (found.world_size, found.gone, list(found.joined_as)) == (3, {}, [1, 3, 4])
    assert [found.states[rank].pid for rank in range(3)] == [workers.pids[rank] for rank in (1, 3, 4)]
    assert main(["attach", "--store", workers.address]) == 0
    said = capsys.readouterr().out
    assert said.startswith("The world was shrunk: its ranks 0 to 2 joined as ranks 1, 3, 4.\n")
    assert "rank 1 has not reached barrier(), call 1 on 'patient'" in said
    workers.signal(4, signal.SIGKILL)
    assert workers.ended(4)
    gone = attach(workers.address).gone
    assert gone.keys() == {2}
    assert re.fullmatch(KILLED, gone[2])


def shrink_by_some():
    if dist.get_rank() == 2:
        report("late")
        end = time.monotonic() + 60
        while time.monotonic() < end and not os.environ.get("NEVER"):
            sum(range(1000))
    if dist.get_rank() != 1:
        dist.shrink_group([1])
        report("shrunk")
        dist.barrier()


def test_attach_says_who_has_not_come_to_shrink_the_world(new_workers):
    workers = new_workers(3, timeout_s=20.0)
    workers.start(shrink_by_some)
    assert (workers.reported(0), workers.reported(2)) == ("shrunk", "late")
    workers.until_asleep(0)
    found = attach(workers.address)
    assert sorted(found.states) == [0]
    assert re.search(
        r"has not called shrink_group: as rank 2, it is not in a meshdist call; it has been at .*:\d+ in shrink_by",
        found.gone[1],
    )


RANK = """
import sys, time
import meshdist as dist
dist.init_process_group(timeout=60)
print("ready", flush=True)
sys.stdin.readline()
dist.destroy_process_group()
"""


def test_attach_to_the_job_of_a_process(tmp_path, monkeypatch, capsys):
    from meshdist.debug.__main__ import main

    (tmp_path / "secret").write_text("nobody knows")
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.delenv("MESHDIST_SECRET", raising=False)
    for name in ("MESHDIST_SECRET", "MESHDIST_SECRET_FILE", "MESHDIST_INSECURE"):
        monkeypatch.setenv(name, "")  # so that what attach sets is taken back
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **place, "MESHDIST_SECRET_FILE": "secret"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", RANK], cwd=tmp_path, env=environment, **pipes) as rank:
        try:
            assert rank.stdout.readline() == "ready\n"
            assert main(["attach", "--pid", str(rank.pid)]) == 0
            assert "Flight records of the only rank" in capsys.readouterr().out
            (job,) = (job for job in jobs_here() if job.address == f"127.0.0.1:{port}")  # the tests have others
            for jobs, status, words in (
                ([job], 0, ""),
                ([job] * 2, 1, f"2 jobs on this host: pass --store with one of {job.address}"),
                ([], 1, "none of your jobs is running on this host; pass --store"),
            ):
                monkeypatch.setattr("meshdist.debug.attach.jobs_here", lambda jobs=jobs: jobs)
                assert main(["attach"]) == status
                assert words in capsys.readouterr().err
            rank.communicate("go on\n", timeout=30)
        finally:
            rank.kill()
    assert main(["attach", "--pid", str(rank.pid)]) == 1
    assert f"there is no process {rank.pid} on this host" in capsys.readouterr().err


def test_attach_to_a_process_that_is_no_rank(capsys):
    from meshdist.debug.__main__ import main

    variables = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    with subprocess.Popen(["sleep", "60"], env=variables) as sleeper:
        assert main(["attach", "--pid", str(sleeper.pid)]) == 1
        sleeper.kill()
    assert "has no MASTER_ADDR and MASTER_PORT in its environment; pass the pid of a rank" in capsys.readouterr().err


CHILD = "import os, sys; print(os.getpid(), flush=True); sys.stdin.readline()"


def test_attach_to_the_parent_of_the_ranks_names_them(capsys):
    from meshdist.debug.__main__ import main

    variables = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    shell = ["sh", "-c", 'RANK=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 "$0" -c "$1"; exit', sys.executable, CHILD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(shell, env=variables, **pipes) as parent:
        child = parent.stdout.readline().strip()
        assert main(["attach", "--pid", str(parent.pid)]) == 1
        parent.communicate("end\n", timeout=30)
    assert f"process {parent.pid} is not a rank" in (words := capsys.readouterr().err)
    assert f"it has started ranks: pass --pid {child} (rank 3), or --store" in words


@pytest.mark.parametrize(
    ("secret", "words"), [("", "MESHDIST_SECRET is missing for the job"), ("b", "MESHDIST_SECRET here is not that of")]
)
def test_attach_without_the_secret_says_so(monkeypatch, capsys, secret, words):
    from meshdist.debug.__main__ import main

    monkeypatch.delenv("MESHDIST_SECRET_FILE", raising=False)
    monkeypatch.setenv("MESHDIST_SECRET", secret)
    with dist.TCPStore("127.0.0.1", 0, is_master=True, secret=b"a") as store:
        assert main(["attach", "--store", f"127.0.0.1:{store.port}"]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert "port" not in said


@pytest.mark.parametrize(
    ("address", "message"),
    [("nowhere", "must be host:port"), ("127.0.0.1:1", "no store answered at 127.0.0.1:1")],
)
def test_attach_to_no_store(capsys, monkeypatch, address, message):
    from meshdist.debug.__main__ import main

    monkeypatch.setattr("meshdist.debug.attach.attach", partial(attach, connect_s=0.5))
    assert main(["attach", "--store", address]) == 1
    assert message in capsys.readouterr().err


def test_attach_to_a_store_without_a_world(capsys):
    from meshdist.debug.__main__ import main

    with dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store:
        assert main(["attach", "--store", f"127.0.0.1:{store.port}"]) == 1
    assert "has no world: no rank has called init_process_group there yet" in capsys.readouterr().err


def give_up_and_leave():
    everyone = dist.new_group(timeout=20.0, group_desc="patient")
    pair = dist.new_group([1, 2], timeout=2.0, group_desc="pair")
    everyone.barrier()
    if dist.get_rank() == 2:
        failure = attempt(pair.barrier)
        dist.destroy_process_group()
        report(failure)
        return
    if dist.get_rank() == 1:
        end = time.monotonic() + 60
        while time.monotonic() < end and not os.environ.get("NEVER"):
            sum(range(1000))
    everyone.recv(np.ones(4), src=1)


def test_attach_finds_how_the_last_wait_of_a_rank_ended_that_is_gone(new_workers):
    workers = new_workers(3, timeout_s=20.0)
    workers.start(give_up_and_leave)
    assert workers.reported(2).kind is dist.DistTimeoutError
    found = attach(workers.address)
    assert list(found.gone) == [2]
    assert found.states[2].is_last
    waits = who_waits(found.states, found.gone)
    assert sorted(waits.graph.edges) == [(0, 1), (2, 1)]
    text = "\n".join(hang_report(waits, 3))
    assert "rank 1 has not sent the message that rank 0 is waiting for in recv(float64[4] from rank 1, tag=0)" in text
    assert re.search(
        r"rank 2 was in barrier\(\), call 1 on 'pair', at .*, for [2-9]\.\d s, waiting for rank 1, and timed out", text
    )
