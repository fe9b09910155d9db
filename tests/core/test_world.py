"""init_process_group and destroy_process_group: every way to meet, what they refuse, again and again."""

import os
import re
import subprocess
import sys
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
from worlds import Crew, crew_rank

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
INIT = r"call meshdist.init_process_group\(\) first"


def held():
    """Return how many file descriptors and threads this process holds."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.fixture
def pair(worlds):
    with Crew(worlds.nursery, 2) as crew:
        yield crew


@pytest.fixture
def trio(worlds):
    with Crew(worlds.nursery, 3) as crew:
        yield crew


@pytest.fixture(params=["tcp", "file"])
def url(request, port, tmp_path):
    return f"tcp://127.0.0.1:{port}" if request.param == "tcp" else f"file://{tmp_path}/meet"


# ---- Before, twice, after


BEFORE = {
    "get_rank": lambda: dist.get_rank(),
    "get_world_size": lambda: dist.get_world_size(),
    "get_backend": lambda: dist.get_backend(),
    "get_process_group_ranks": lambda: dist.get_process_group_ranks(),
    "new_group": lambda: dist.new_group([0]),
    "all_reduce": lambda: dist.all_reduce(np.zeros(1)),
    "barrier": lambda: dist.barrier(),
    "send": lambda: dist.send(np.zeros(1), 1),
    "recv": lambda: dist.recv(np.zeros(1), 1),
    "destroy_process_group": lambda: dist.destroy_process_group(),
    "abort_process_group": lambda: dist.abort_process_group(),
}


@pytest.mark.parametrize("name", BEFORE)
def test_before_init(name):
    assert not dist.is_initialized()
    assert dist.group.WORLD is None
    with pytest.raises(ValueError, match=INIT):
        BEFORE[name]()


def alone(store):
    dist.init_process_group("GLOO", store=store, rank=0, world_size=1)
    assert dist.is_initialized()
    assert dist.get_backend() == "gloo"
    with pytest.raises(ValueError, match="init_process_group was called already; destroy_process_group"):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.all_reduce(np.ones(3)).tolist() == [1.0, 1.0, 1.0]
    dist.destroy_process_group()
    assert not dist.is_initialized()
    for call in (dist.destroy_process_group, dist.barrier):
        with pytest.raises(ValueError, match=INIT):
            call()


def alone_twice():
    for _ in range(2):
        alone(dist.HashStore())


def test_second_init_and_second_destroy(worlds):
    with Crew(worlds.nursery, 1) as crew:
        crew.start(alone_twice)
        crew.gather()


WRONG = {
    "unknown backend": ({"backend": "fast"}, ValueError, "unknown backend 'fast'; known are .*gloo.*threads"),
    "backend of another type": ({"backend": 3}, TypeError, "backend must be .*3|backend must be .*int"),
    "unknown scheme": (
        {"init_method": "foo://x"},
        ValueError,
        r"init_method must begin with .*env://.*tcp://.*'foo://x'",
    ),
    "no scheme": ({"init_method": "somewhere"}, ValueError, "init_method must begin with .*'somewhere'"),
    "method and store": ({"init_method": "env://", "store": dist.HashStore()}, ValueError, "init_method or store"),
    "store without rank": ({"store": dist.HashStore(), "world_size": 2}, ValueError, "store=, rank must be given"),
    "store without size": ({"store": dist.HashStore(), "rank": 0}, ValueError, "store=, world_size must be given"),
    "no store": ({"store": 3, "rank": 0, "world_size": 1}, TypeError, "store must be a Store, got int"),
    "rank too high": (
        {"store": dist.HashStore(), "rank": 2, "world_size": 2},
        ValueError,
        "rank must be given, 0 to 1, got 2",
    ),
    "rank too high over tcp": (
        {"init_method": "tcp://127.0.0.1:9", "rank": 2, "world_size": 2},
        ValueError,
        "rank must be between 0 and world_size - 1 = 1, got 2",
    ),
    "rank too high in a file": (
        {"init_method": "file:///nowhere/at/all", "rank": 5, "world_size": 4},
        ValueError,
        "rank must be between 0 and world_size - 1 = 3, got 5",
    ),
    "no rank over tcp": ({"init_method": "tcp://127.0.0.1:9"}, ValueError, "rank and world_size missing"),
    "env alone": ({}, ValueError, "MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE missing.*meshrun"),
    "timeout of another type": (
        {"timeout": "soon"},
        TypeError,
        "timeout must be a timedelta or a number of seconds, got str",
    ),
    "negative timeout": ({"timeout": -1}, ValueError, "timeout must not be negative"),
}


@pytest.fixture
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_launcher")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_leave_nothing(name):
    options, kind, words = WRONG[name]
    before = held()
    with pytest.raises(kind, match=words):
        dist.init_process_group(**options)
    assert not dist.is_initialized()
    assert held() == before


# ---- Every way to meet


def meet(url):
    dist.init_process_group("gloo", init_method=url, rank=crew_rank(), world_size=2, timeout=20)
    total = int(dist.all_reduce(np.array(dist.get_rank() + 1)))
    dist.destroy_process_group()
    return total


def test_tcp_and_file(pair, url):
    pair.start(meet, url)
    assert pair.gather() == [3, 3]


def meet_by_query(url):
    dist.init_process_group(init_method=f"{url}?rank={crew_rank()}&world_size=2", timeout=timedelta(seconds=20))
    assert (dist.get_rank(), dist.get_world_size()) == (crew_rank(), 2)
    assert dist.group.WORLD.timeout_s == dist.new_group().timeout_s == 20.0
    assert dist.new_group(timeout=3).timeout_s == 3.0
    dist.destroy_process_group()


def test_rank_in_the_query_and_the_timeout_of_all_groups(pair, url):
    pair.start(meet_by_query, url)
    pair.gather()


def meet_by_env(port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(crew_rank()), WORLD_SIZE="2")
    dist.init_process_group(timeout=20)
    total = int(dist.all_reduce(np.array(1)))
    dist.destroy_process_group()
    return total


def test_env(pair, port):
    pair.start(meet_by_env, port)
    assert pair.gather() == [2, 2]


def again_and_again(url, count):
    """Return what the process holds after the first and after the last world."""
    counts = []
    for step in range(count):
        dist.init_process_group("gloo", init_method=url, rank=crew_rank(), world_size=2, timeout=20)
        assert dist.all_reduce(np.full(3, step)).tolist() == [2 * step] * 3
        group = dist.new_group()
        group.all_reduce(np.ones(50_000), async_op=True).wait()
        if dist.get_rank() == 0:
            dist.send(np.ones(3), 1)
        else:
            dist.recv(np.ones(3), 0)
        dist.destroy_process_group()
        counts.append(held())
    return counts[0], counts[-1]


def test_init_and_destroy_20_times(pair, url):
    pair.start(again_and_again, url, 20)
    for first, last in pair.gather():
        assert last == first


def again_in_one_store(path, count):
    counts = []
    with dist.FileStore(path) as store:
        for step in range(count):
            dist.init_process_group("gloo", store=store, rank=crew_rank(), world_size=2, timeout=20)
            assert int(dist.all_reduce(np.array(step))) == 2 * step
            dist.destroy_process_group()
            counts.append(held())
    return counts[0], counts[-1]


def test_init_and_destroy_20_times_with_one_store(pair, tmp_path):
    pair.start(again_in_one_store, str(tmp_path / "store"), 20)
    for first, last in pair.gather():
        assert last == first


def many_groups(count, with_messages):
    dist.barrier()
    counts = []
    for step in range(count):
        group = dist.new_group()
        assert int(group.all_reduce(np.array(step))) == 2 * step
        group.all_reduce(np.ones(30_000), async_op=True).wait()
        if with_messages and dist.get_rank() == 0:
            dist.send(np.ones(3), 1, group=group)
        elif with_messages:
            dist.recv(np.ones(3), 0, group=group)
        counts.append(held())
    return counts[2], counts[-1]


@pytest.mark.parametrize("with_messages", [False, True], ids=["collectives", "messages"])
def test_descriptors_and_threads_are_flat_over_200_groups(pair, with_messages):
    pair.join()
    pair.start(many_groups, 200, with_messages)
    for early, late in pair.gather():
        # The progress thread may hold one or two for a moment.
        assert late[0] <= early[0] + 2
        assert late[1] == early[1]


# ---- Who is wrong is told at once


def try_to_join(url, rank, world_size, timeout_s):
    """Return how long it took, and what was raised."""
    start = time.monotonic()
    try:
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size, timeout=timeout_s)
    except Exception as error:
        assert not dist.is_initialized()
        return time.monotonic() - start, type(error), str(error)
    return time.monotonic() - start, None, f"rank {dist.get_rank()} of {dist.get_world_size()}"


def test_two_ranks_of_one_number(trio, url):
    """One of the two is refused at once, before all ranks are there; the other one is taken."""
    # Over TCP the store is at rank 0, which has to be there before anyone can tell.
    others = [0] if url.startswith("tcp") else []
    trio.start(try_to_join, url, 0, 3, 5, ranks=others)
    trio.start(try_to_join, url, 1, 3, 5, ranks=[1, 2])
    rank, (took_s, kind, message) = trio.first_outcome([1, 2])
    assert took_s < 1
    assert kind is ValueError
    assert re.search(r"rank 1 is there already, pid \d+ on .*give each process a rank of its own", message)
    trio.start(try_to_join, url, 2, 3, 5, ranks=[rank])
    trio.start(try_to_join, url, 0, 3, 5, ranks=[0] if not others else [])
    joined = [trio.outcome(each)[1:] for each in range(3)]
    assert sorted(joined, key=str) == [(None, "rank 0 of 3"), (None, "rank 1 of 3"), (None, "rank 2 of 3")]


def test_a_second_rank_0_is_refused_at_once(trio, url):
    trio.start(try_to_join, url, 0, 2, 5, ranks=[0, 2])
    rank, (took_s, kind, message) = trio.first_outcome([0, 2])
    trio.start(try_to_join, url, 1, 2, 5, ranks=[1])
    assert [trio.outcome(joined)[1] for joined in (1, 2 - rank)] == [None, None]
    assert took_s < 1
    assert issubclass(kind, (ValueError, dist.DistNetworkError, dist.DistStoreError))
    assert re.search("rank 0|127.0.0.1", message)


def test_world_sizes_that_disagree(pair, url):
    pair.start(try_to_join, url, 0, 2, 2, ranks=[0])
    pair.start(try_to_join, url, 1, 3, 2, ranks=[1])
    outcomes = pair.gather()
    refused = [(took_s, message) for took_s, kind, message in outcomes if kind is ValueError]
    assert len(refused) >= 1
    for took_s, message in refused:
        assert took_s < 1
        assert re.search("world size is [23], this one says [32]|world_size=[23], not [32]", message)


def test_missing_ranks_are_named_at_the_timeout(pair, url):
    pair.start(try_to_join, url, 0, 4, 1, ranks=[0])
    pair.start(try_to_join, url, 2, 4, 1, ranks=[1])
    outcomes = dict(zip((0, 2), pair.gather(), strict=True))
    if outcomes[2][1] is dist.DistNetworkError:
        # Over TCP the store ends with rank 0, whose time is over in the same moment.
        assert url.startswith("tcp")
        assert "lost the store" in outcomes.pop(2)[2]
    for rank, (took_s, kind, message) in outcomes.items():
        assert 0.8 < took_s < 2
        assert kind is dist.DistTimeoutError
        assert re.search(rf"init_process_group \(rank {rank} of 4\): 2 .*ranks joined within 1 s; missing: 1, 3$", message)


def test_many_missing_ranks_are_not_all_listed(worlds, tmp_path):
    with Crew(worlds.nursery, 1) as crew:
        crew.start(try_to_join, f"file://{tmp_path}/meet", 0, 1000, 0.5)
        [(_, kind, message)] = crew.gather()
    assert kind is dist.DistTimeoutError
    assert re.search(r"\(rank 0 of 1000\): 1 .*joined within 0.5 s; missing: 1, 2, 3", message)
    assert len(message) < 300


def alternate(url):
    # Refused once, right the second time.
    with pytest.raises(ValueError, match="rank must be between"):
        dist.init_process_group("gloo", init_method=url, rank=2, world_size=2)
    return meet(url)


def test_after_a_refusal_init_can_be_called_again(pair, url):
    pair.start(alternate, url)
    assert pair.gather() == [3, 3]


# ---- The end


SCRIPT = """
import numpy as np, meshdist as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(np.ones(3), async_op=True).wait()
print("last line")
"""


def test_exit_without_destroy_is_clean_and_says_so_once():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=30)
    assert (process.returncode, process.stdout) == (0, "last line\n")
    assert process.stderr.count("destroy_process_group") == 1
    assert len(process.stderr.splitlines()) == 1


def destroy_with_work_outstanding():
    dist.barrier()
    if dist.get_rank() == 1:
        dist.recv(np.zeros(1), 0)  # rank 0 is about to leave
        dist.destroy_process_group()
        return None
    work = dist.all_reduce(np.ones(3), async_op=True)
    dist.send(np.zeros(1), 1)
    dist.destroy_process_group()
    with pytest.raises(dist.DistError, match="all_reduce on group 'world'"):
        work.wait(timeout=10.0)
    return work.is_completed(), work.is_success()


def test_destroy_ends_what_is_outstanding(pair):
    pair.join()
    start = time.monotonic()
    pair.start(destroy_with_work_outstanding)
    assert pair.gather() == [(True, False), None]
    assert time.monotonic() - start < 10


def finish_work_in_destroy():
    dist.barrier()
    x = np.full(30_000, dist.get_rank())
    work = dist.all_reduce(x, async_op=True)
    dist.destroy_process_group()
    return work.wait(timeout=10.0), set(x.tolist())


def test_destroy_finishes_calls_that_all_ranks_have_made(pair):
    pair.join()
    pair.start(finish_work_in_destroy)
    assert pair.gather() == [(True, {1}), (True, {1})]


def abort_the_world():
    dist.barrier()
    if dist.get_rank() == 0:
        dist.abort_process_group()
        assert not dist.is_initialized()
        return
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="rank 0 .*abort_process_group"):
        dist.all_reduce(np.ones(3))
    assert time.monotonic() - start < 1


def test_abort_tells_the_others(pair):
    pair.join()
    pair.start(abort_the_world)
    pair.gather()
