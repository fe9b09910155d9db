"""Elastic jobs: launchers on this machine, as if each were a host, are lost and come while the job runs."""

import os
import re
import signal
import socket

import pytest
from launching import finish, meshrun, reported, start_meshrun, write_script
from test_several_nodes import listens
from until import until

from meshdist._version import __version__
from meshdist.launch.failures import Failure
from meshdist.launch.job_verdict import Report, judge_elastic
from meshdist.launch.launchers_store import seat_key, sign_off
from meshdist.launch.node_numbering import NodeCard, order_launchers
from meshdist.store import TCPStore

pytestmark = pytest.mark.timeout(90)

# Every rank tells under the number of the start; the job ends when the file "enough" is there.
RUN = """
from meshdist.bootstrap.rendezvous import rendezvous
start, size = os.environ["RESTART_COUNT"], int(os.environ["WORLD_SIZE"])
store, found, _ = rendezvous("env://", timeout=30)
assert found == rank
if store.add("there", 1) == size:
    store.set("all", "")
store.wait(["all"])
tell(f"start{start}.rank{rank}", f"{size} {os.environ['GROUP_WORLD_SIZE']} {os.getpid()} {os.getppid()}")
while not os.path.exists("enough"):
    time.sleep(0.02)
"""


class ElasticJob:
    """Launchers of one elastic job; they are gone at the end of the test."""

    def __init__(self, directory):
        self.directory, self.launchers = directory, []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        write_script(directory, RUN)

    def start(self, *arguments, nnodes="1:3", last_call="0"):
        """Start a launcher; the first one keeps the store."""
        where = ["--nnodes", nnodes, "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-last-call", last_call]
        self.launchers.append(start_meshrun(self.directory, *where, *arguments, "script.py"))
        if len(self.launchers) == 1:
            until(lambda: listens(self.port), "the first launcher opens the store")
        return self.launchers[-1]

    def start_two(self):
        """Start a job of two hosts, which begins when both are there."""
        both = [self.start(nnodes="1:2", last_call="30") for _ in range(2)]
        assert self.launchers_of(0) == both
        return both

    def sizes(self, start):
        """Return the number of ranks and of hosts of a start, once its first rank has met the others."""
        path = self.directory / f"start{start}.rank0"
        until(path.exists, f"rank 0 tells of start {start}", 30)
        ranks, nodes, *_ = path.read_text().split()
        return int(ranks), int(nodes)

    def kill_rank(self, start, rank):
        os.kill(int(reported(self.directory, f"start{start}.rank{rank}").split()[2]), signal.SIGKILL)

    def headline(self):
        """Return the first line of `meshrun status`."""
        code, out, err = meshrun(self.directory, "status", f"127.0.0.1:{self.port}")
        assert (code, err) == (0, "")
        return out.splitlines()[0]

    def launchers_of(self, start):
        """Return the launcher of each rank of a start."""
        num_ranks, _ = self.sizes(start)
        pids = [int(reported(self.directory, f"start{start}.rank{rank}").split()[3]) for rank in range(num_ranks)]
        return [next(launcher for launcher in self.launchers if launcher.pid == pid) for pid in pids]

    def end(self):
        """Let the ranks end; return the exit status and stderr of each launcher."""
        (self.directory / "enough").touch()
        return [(launcher.returncode, text) for launcher, text in [(each, finish(each)) for each in self.launchers]]


@pytest.fixture
def job(tmp_path):
    job = ElasticJob(tmp_path)
    yield job
    for launcher in job.launchers:
        launcher.kill()
        launcher.communicate()


def test_job_grows_by_hosts_that_come_and_goes_on_without_one_that_is_killed(job):
    first = job.start()
    assert job.sizes(0) == (1, 1)
    second = job.start("-n", "2")
    assert job.sizes(1) == (3, 2)
    assert job.launchers_of(1) == [first, second, second]
    second.kill()
    assert job.sizes(2) == (1, 1)
    third = job.start()  # as the killed one would, started again
    assert job.sizes(3) == (2, 2)
    assert job.launchers_of(3) == [first, third]
    (status, said), (_, _), (third_status, third_said) = job.end()
    assert (status, third_status) == (0, 0)
    host = socket.gethostname()
    assert f"meshrun: node 1 ({host}) is lost: its launcher was killed, or the network to it is cut\n" in said
    assert said.count("meshrun: starting all ranks again, as the hosts have changed\n") == 3
    assert said.count(f"meshrun: new host: {host}\n") == 2
    assert "meshrun: start 3 has 2 ranks on 2 nodes; this one, node 0, has 1\n" in said
    assert third_said == (
        "meshrun: the job runs already: waiting for a place in it\n"
        "meshrun: start 3 has 2 ranks on 2 nodes; this one, node 1, has 1\n"
    )


def test_launchers_and_status_count_the_same_restarts(job):
    limit = ("--max-restarts", "2")
    job.start(*limit)
    assert job.sizes(0) == (1, 1)
    job.start(*limit)
    assert job.sizes(1) == (2, 2)
    job.kill_rank(1, 1)
    assert job.sizes(2) == (2, 2)
    job.start(*limit)
    assert job.sizes(3) == (3, 3)
    assert ": 3 ranks on 3 hosts, restart 1 of at most 2, hosts changed 2 times, for " in job.headline()
    job.kill_rank(3, 2)
    assert job.sizes(4) == (3, 3)
    assert ": 3 ranks on 3 hosts, restart 2 of at most 2, hosts changed 2 times, for " in job.headline()
    for (status, said), counted in zip(job.end(), ("12", "12", "2"), strict=True):  # the last one came after the first
        assert status == 0
        assert re.findall(r"starting all ranks again, restart (\d) of at most 2", said) == list(counted)


def test_two_hosts_that_come_at_once_are_taken_in_by_one_restart(job):
    job.start(last_call="30")  # which ends when there are three
    lost = [job.start(), job.start()]
    assert job.sizes(0) == (3, 3)
    for launcher in lost:
        launcher.kill()
    start = 1 if job.sizes(1) == (1, 1) else 2  # one loss may have been noticed before the other
    assert job.sizes(start) == (1, 1)
    job.start()
    job.start()
    assert job.sizes(start + 1) == (3, 3)
    del job.launchers[1:3]
    for launcher in lost:
        launcher.communicate()
    assert [status for status, _ in job.end()] == [0, 0, 0]


def test_spares_wait_for_the_place_of_a_host_that_is_terminated_or_for_the_end(job):
    first, second = job.start_two()
    other = job.start(nnodes="1:3")
    assert "the hosts disagree on --nnodes: " in finish(other)
    job.launchers.remove(other)
    spare = job.start(nnodes="1:2")
    assert "waiting for a place in it" in spare.stderr.readline()
    second.send_signal(signal.SIGTERM)
    assert job.launchers_of(1) == [first, spare]
    last = job.start(nnodes="1:2")
    assert "waiting for a place in it" in last.stderr.readline()
    (status, said), (left, left_said), (spare_status, _), (last_status, last_said) = job.end()
    assert (status, left, spare_status, last_status) == (0, 143, 0, 0)
    assert f"meshrun: node 1 ({socket.gethostname()}) was stopped by SIGTERM\n" in said
    assert left_said.splitlines()[-1] == "meshrun: stopped by SIGTERM"
    assert last_said == "meshrun: the job has ended before this host got a place in it\n"


def test_launcher_that_is_lost_before_its_first_ranks_start_costs_one_restart(job):
    job.start()
    assert job.sizes(0) == (1, 1)
    with TCPStore("127.0.0.1", job.port, wait_for_workers=False, timeout=30) as store:
        number = store.add("num_launchers", 1) - 1
        store.set(f"card/{number}", NodeCard("lost", 1, 3, version=f"meshdist {__version__}", least_nodes=1).encode())
        store.get(seat_key(number))
        sign_off(store, number)
    assert job.sizes(2) == (1, 1)
    ((status, said),) = job.end()
    assert status == 0
    assert "meshrun: new host: lost\n" in said
    assert "meshrun: node 1 (lost) is lost: its launcher was killed, or the network to it is cut\n" in said


def test_too_few_hosts_wait_for_others(job):
    first, second = job.start(nnodes="2:3"), job.start(nnodes="2:3")
    assert job.sizes(0) == (2, 2)
    second.kill()
    second.communicate()
    job.launchers.remove(second)
    third = job.start(nnodes="2:3")
    assert job.launchers_of(1) == [first, third]
    assert [status for status, _ in job.end()] == [0, 0]


def test_fewer_hosts_than_the_fewest_are_waited_for(job):
    job.start("--rdzv-timeout", "1", nnodes="2:3")
    (launcher,) = job.launchers
    said = finish(launcher)
    assert launcher.returncode == 1
    assert "1 of at least 2 hosts (--nnodes 2:3) joined within 1 s" in said


def test_loss_of_the_host_that_keeps_the_store_ends_the_job(job):
    first, second = job.start(nnodes="2:3"), job.start(nnodes="2:3")
    assert job.sizes(0) == (2, 2)
    first.kill()
    said = finish(second)
    assert second.returncode == 1
    assert "keeps the store of the launchers, which is gone" in said


def test_host_whose_rank_is_killed_leaves_when_no_restart_is_left(job):
    job.start_two()
    job.kill_rank(0, 1)
    assert job.sizes(1) == (1, 1)
    (status, _), (left, said) = job.end()
    assert (status, left) == (0, 137)
    assert "meshrun: no restart is left: the job goes on without this host\n" in said


def test_killed_ranks_are_not_started_again_if_the_user_allows_fewer(tmp_path):
    body = """
start, size = int(os.environ["RESTART_COUNT"]), int(os.environ["WORLD_SIZE"])
tell(f"start{start}.{rank}", size)
for other in range(size):
    hear(f"start{start}.{other}")
if rank == 0 and start < 3:
    os.kill(os.getpid(), signal.SIGKILL) if start != 1 else os._exit(3)
while start < 3:
    time.sleep(60)
"""
    write_script(tmp_path, body)
    process = start_meshrun(tmp_path, "-n", "2:4", "--max-restarts", "3", "script.py")
    said = finish(process)
    assert process.returncode == 0
    assert [reported(tmp_path, f"start{start}.0") for start in range(4)] == ["4", "3", "3", "2"]
    assert [line for line in said.splitlines() if re.search(r": start \d has ", line)] == [
        "meshrun: start 1 has 3 ranks",
        "meshrun: start 2 has 3 ranks",
        "meshrun: start 3 has 2 ranks",
    ]


def failed(rank, status):
    return Failure(rank, 100, "h", status, 1.0, 1.0)


def test_what_an_elastic_job_does_next():
    def judged(*reports, may_restart=False, least=1, newcomers=False):
        return judge_elastic(reports, may_restart, 0, least, newcomers)

    killed = Report(2, [failed(1, -9)])
    assert judged(Report(0), Report(2)) == judged(Report(0), Report(2))._replace(is_restart=False, status=0)
    assert judged(Report(0), Report(2), newcomers=True).is_restart
    assert judged(Report(0), killed, may_restart=True).is_counted
    assert judged(Report(0), killed).leaving == [2]
    assert not judged(Report(0), killed, least=2).is_restart
    assert not judged(Report(0), Report(2, [failed(1, 1)])).is_restart
    assert not judged(Report(0, [failed(0, -9)]), Report(2)).is_restart
    assert judged(Report(0), Report(2, signal=15)).leaving == [2]
    assert judged(Report(0), Report(2, signal=2))[:2] == (False, 130)
    assert judged(Report(0, signal=15), Report(2))[:2] == (False, 143)
    assert judged(Report(0, [failed(0, 1)]), Report(2, problem="was killed")).leaving == [2]


def test_order_of_hosts():
    cards = {number: NodeCard("h", 1, 3) for number in range(5)}
    assert order_launchers(cards, (), leader=2, most=3) == [2, 0, 1]
    assert order_launchers(cards, [2, 4], leader=2, most=3) == [2, 4, 0]
    given = {0: NodeCard("h", 1, 3, node=2), 1: NodeCard("h", 1, 3, node=0), 3: NodeCard("h", 1, 3, node=2)}
    assert order_launchers(given, [1, 0], leader=1, most=3) == [1, 0, 3]
