"""init_process_group without ranks: processes that find and number themselves, over UDP and in a file."""

import os
import re
import sys
import time

import numpy as np
import pytest
from worlds import WorkerSet, report, worker_rank

import meshdist as dist
from meshdist.bootstrap.multicast import verify
from meshdist.bootstrap.multicast_socket import MulticastSocket
from meshdist.security.credentials import secret_from_environment
from meshdist.system.deadline import Deadline

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]


@pytest.fixture
def pair(worlds):
    with WorkerSet(worlds.nursery, 2) as workers:
        yield workers


@pytest.fixture
def four(worlds):
    with WorkerSet(worlds.nursery, 4) as workers:
        yield workers


def ipv6_url(port):
    address = "ff15:1e18:5d4c:4cf0:d02d:b659:53ba:b0a7"
    try:
        with MulticastSocket(address, port, this_host_only=True) as channel:
            channel.send(b"")
    except dist.DistNetworkError as error:
        pytest.skip(f"no IPv6 multicast here: {error}")
    return f"tcp://[{address}]:{port}"


@pytest.fixture(params=["IPv4", "IPv6", "file"])
def url(request, port, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/sharedfile"
    return ipv6_url(port) if request.param == "IPv6" else f"tcp://239.255.77.2:{port}"


@pytest.fixture(params=["IPv4", "file"])
def place(request, port, tmp_path):
    return f"file://{tmp_path}/sharedfile" if request.param == "file" else f"tcp://239.255.77.2:{port}"


def meet(url, world_size, rank=-1, group_name="", times=1):
    """Return this rank's number in each of the worlds, one after the other."""
    numbers = []
    for _ in range(times):
        dist.init_process_group(
            "gloo", init_method=url, world_size=world_size, rank=rank, group_name=group_name, timeout=30
        )
        assert dist.get_world_size() == world_size
        assert int(dist.all_reduce(np.array(1 << dist.get_rank()))) == (1 << world_size) - 1
        numbers.append(dist.get_rank())
        dist.destroy_process_group()
    return numbers


def test_ranks_are_assigned(four, url):
    four.start(meet, url, 4)
    assert sorted(four.gather()) == [[0], [1], [2], [3]]
    if url.startswith("file"):
        assert not os.path.exists(url.removeprefix("file://"))


def test_who_gives_a_rank_has_it(four, place):
    for rank, asked in enumerate([3, -1, 1, -1]):
        four.start(meet, place, 4, asked, ranks=[rank])
    numbers = four.gather()
    assert (numbers[0], numbers[2]) == ([3], [1])
    assert sorted([*numbers[1], *numbers[3]]) == [0, 2]


def test_all_ranks_given_at_a_multicast_address(pair, port):
    for rank in range(2):
        pair.start(meet, f"tcp://239.255.77.2:{port}", 2, 1 - rank, ranks=[rank])
    assert pair.gather() == [[1], [0]]


def test_again_and_again(pair, place):
    pair.start(meet, place, 2, -1, "", 4)
    for numbers in zip(*pair.gather(), strict=True):
        assert sorted(numbers) == [0, 1]


def test_jobs_of_other_group_names_share_the_place(four, place):
    for rank in range(4):
        four.start(meet, place, 2, -1, f"job {rank % 2}/x", ranks=[rank])
    numbers = four.gather()
    assert sorted(numbers[0::2]) == sorted(numbers[1::2]) == [[0], [1]]


def test_the_group_name_in_the_query(pair, place):
    pair.start(by_query, f"{place}?group_name=a%20b&world_size=2", ranks=[0])
    pair.start(meet, place, 2, -1, "a b", ranks=[1])
    assert sorted(pair.gather()) == [[0], [1]]


def by_query(url):
    dist.init_process_group(init_method=url, timeout=30)
    assert dist.get_world_size() == 2
    assert int(dist.all_reduce(np.array(1 << dist.get_rank()))) == 3
    number = dist.get_rank()
    dist.destroy_process_group()
    return [number]


def test_a_job_with_a_secret_and_one_without(worlds, port):
    """With a secret the store can be reached over the network; jobs with other secrets do not mix."""
    url = f"tcp://239.255.77.2:{port}"
    variables = [{"MESHDIST_SECRET": "one"}, {"MESHDIST_SECRET": "two"}]
    with WorkerSet(worlds.nursery, 2, variables[0]) as one, WorkerSet(worlds.nursery, 2, variables[1]) as two:
        for workers in (one, two):
            workers.start(meet, url, 2)
        for workers in (one, two):
            assert sorted(workers.gather()) == [[0], [1]]


# ---- Who is wrong, who does not come


def try_to_join(url, rank, world_size, timeout_s):
    start = time.monotonic()
    report("trying")
    try:
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size, timeout=timeout_s)
    except Exception as error:
        assert not dist.is_initialized()
        return time.monotonic() - start, type(error), str(error)
    return time.monotonic() - start, None, dist.get_rank()


def test_two_ranks_of_one_number(four, place):
    """Whichever of the two comes second is told at once; at a multicast address the others go on."""
    four.start(try_to_join, place, 1, 3, 30, ranks=[0, 1])
    assert [four.reported(rank) for rank in (0, 1)] == ["trying"] * 2
    refused, (took_s, kind, message) = four.first_outcome([0, 1])
    assert kind is ValueError
    assert re.search(r"rank 1 has already joined \(pid \d+ on .*\); give each process its own rank", message)
    assert took_s < 5
    if place.startswith("file"):  # where those who meet are of one job, the others do not wait for the right one
        took_s, kind, message = four.outcome(1 - refused)
        assert kind is ValueError
        assert "rank 1 has already joined" in message
        assert took_s < 5
        return
    four.start(try_to_join, place, -1, 3, 30, ranks=[2, 3])
    assert [four.reported(rank) for rank in (2, 3)] == ["trying"] * 2
    assert four.outcome(1 - refused)[1:] == (None, 1)
    assert sorted(four.outcome(rank)[2] for rank in (2, 3)) == [0, 2]


def test_who_did_not_come_is_said(pair, place):
    pair.start(try_to_join, place, -1, 3, 1.5)
    assert [pair.reported(rank) for rank in (0, 1)] == ["trying"] * 2
    for took_s, kind, message in pair.gather():
        assert kind is dist.DistTimeoutError
        assert 1.4 < took_s < 3.5
        assert re.search(r"\(3 ranks\): 2 ranks joined within 1.5 s \(pid \d+ on .*\); 1 missing", message)
        for pid in pair.pids:
            assert f"pid {pid} on" in message
    # Nothing is left that would keep them from meeting now.
    pair.start(meet, place, 2)
    assert sorted(pair.gather()) == [[0], [1]]


def test_a_file_left_over_is_named(worlds, tmp_path):
    """A rank that was killed leaves the file; who comes later is told that, and where it is."""
    url = f"file://{tmp_path}/sharedfile"
    with WorkerSet(worlds.nursery, 1) as killed:
        killed.start(try_to_join, url, -1, 2, 60)
        assert killed.reported(0) == "trying"
        deadline = time.monotonic() + 30
        while b"arrivals" not in file_of(tmp_path):
            assert time.monotonic() < deadline
    with WorkerSet(worlds.nursery, 1) as workers:
        workers.start(try_to_join, url, -1, 2, 60)
        assert workers.reported(0) == "trying"
        took_s, kind, message = workers.outcome(0)
    assert took_s < 5
    assert kind is dist.DistStoreError
    assert re.search(f"{tmp_path}/sharedfile: it was left over by an earlier run, .*delete it", message)


def file_of(folder):
    try:
        return (folder / "sharedfile").read_bytes()
    except FileNotFoundError:
        return b""


def test_a_killed_host_is_replaced(four, port):
    """The process that hosts the store is killed while it waits: the others find a new one."""
    url = f"tcp://239.255.77.2:{port}"
    with MulticastSocket("239.255.77.2", port, this_host_only=True) as ear:
        four.start(try_to_join, url, -1, 3, 60, ranks=[0])
        assert four.reported(0) == "trying"
        deadline = Deadline(30.0)
        while not ((came := ear.receive(0.1)) and verify(came[0], secret_from_environment()).port):
            assert not deadline.expired()
    four.start(try_to_join, url, -1, 3, 60, ranks=[1])
    assert four.reported(1) == "trying"
    four.signal(0, 9)
    assert four.ended(0)
    four.start(try_to_join, url, -1, 3, 60, ranks=[2, 3])
    assert [four.reported(rank) for rank in (2, 3)] == ["trying"] * 2
    outcomes = [four.outcome(rank) for rank in (1, 2, 3)]
    assert [kind for _, kind, _ in outcomes] == [None] * 3
    assert sorted(rank for _, _, rank in outcomes) == [0, 1, 2]


def held():
    return len(os.listdir("/proc/self/fd"))


def meet_and_count(url):
    meet(url, 2)
    before = held()
    meet(url, 2, times=3)
    return before, held(), worker_rank()


def test_cleanup(pair, place):
    pair.start(meet_and_count, place)
    for before, after, _ in pair.gather():
        assert after == before
