"""init_process_group and destroy_process_group: every way to meet, what they refuse, again and again."""

import os
import re
import sys
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
from worlds import WorkerSet, report, worker_rank

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
    with WorkerSet(worlds.nursery, 2) as workers:
        yield workers


@pytest.fixture
def trio(worlds):
    with WorkerSet(worlds.nursery, 3) as workers:
        yield workers


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
    with pytest.raises(ValueError, match=r"already initialized; call destroy_process_group\(\) before"):
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
    with WorkerSet(worlds.nursery, 1) as workers:
        workers.start(alone_twice)
        workers.gather()


WRONG = {
    "unknown backend": ({"backend": "fast"}, ValueError, "unknown backend 'fast'; choose from .*gloo.*threads"),
    "backend of a different type": ({"backend": 3}, TypeError, "backend must be .*3|backend must be .*int"),
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
    "rank too high without an address": (
        {"rank": 1, "world_size": 1},
        ValueError,
        "^env://: rank must be between 0 and world_size - 1 = 0, got 1",
    ),
    "no ranks": ({"world_size": 0}, ValueError, "^env://: world_size must be at least 1, got 0"),
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
    "rank alone": ({"rank": 0}, ValueError, "MASTER_ADDR, MASTER_PORT, WORLD_SIZE are missing.*meshrun"),
    "size alone": ({"world_size": 1}, ValueError, "MASTER_ADDR, MASTER_PORT, RANK are missing.*meshrun"),
    "timeout of a different type": (
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
def test_wrong_arguments_leave_nothing(name, monkeypatch):
    monkeypatch.setattr("meshdist.bootstrap.rendezvous._TELL_WITHIN_S", 0.05)  # there is nobody to tell
    options, kind, words = WRONG[name]
    before = held()
    with pytest.raises(kind, match=words):
        dist.init_process_group(**options)
    assert not dist.is_initialized()
    assert held() == before


@pytest.mark.usefixtures("_no_launcher")
@pytest.mark.parametrize("options", [{}, {"rank": 0, "world_size": 1}, {"backend": "gloo", "init_method": "env://"}])
def test_without_a_launcher_a_process_is_a_world_of_one(options):
    for _ in range(2):
        dist.init_process_group(**options)
        assert (dist.get_rank(), dist.get_world_size(), dist.all_reduce(np.ones(2)).sum()) == (0, 1, 2)
        dist.destroy_process_group()


@pytest.mark.usefixtures("_no_launcher")
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0"}, "MASTER_ADDR, MASTER_PORT, WORLD_SIZE are missing"),
        ({"WORLD_SIZE": "1"}, "MASTER_ADDR, MASTER_PORT, RANK are missing"),
        ({"MASTER_ADDR": "localhost"}, "MASTER_PORT, RANK, WORLD_SIZE are missing"),
        ({"SLURM_JOB_ID": "7"}, "write srun python"),
    ],
)
def test_a_part_of_the_variables_makes_no_world_of_one(variables, words, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        dist.init_process_group()
    assert not dist.is_initialized()


# ---- Every way to meet


def meet(url):
    dist.init_process_group("gloo", init_method=url, rank=worker_rank(), world_size=2, timeout=20)
    total = int(dist.all_reduce(np.array(dist.get_rank() + 1)))
    dist.destroy_process_group()
    return total


def test_tcp_and_file(pair, url):
    pair.start(meet, url)
    assert pair.gather() == [3, 3]


def meet_by_query(url):
    dist.init_process_group(init_method=f"{url}?rank={worker_rank()}&world_size=2", timeout=timedelta(seconds=20))
    assert (dist.get_rank(), dist.get_world_size()) == (worker_rank(), 2)
    assert dist.group.WORLD.timeout_s == dist.new_group().timeout_s == 20.0
    assert dist.new_group(timeout=3).timeout_s == 3.0
    dist.destroy_process_group()


def test_rank_in_the_query_and_the_timeout_of_all_groups(pair, url):
    pair.start(meet_by_query, url)
    pair.gather()


def meet_by_env(port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(worker_rank()), WORLD_SIZE="2")
    dist.init_process_group(timeout=20)
    total = int(dist.all_reduce(np.array(1)))
    dist.destroy_process_group()
    return total


def test_env(pair, port):
    pair.start(meet_by_env, port)
    assert pair.gather() == [2, 2]


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


def test_two_ranks_of_one_number_end_the_wait_of_all(trio, url):
    """Before all ranks are there; and nothing is left of it in the way of the next."""
    # Over TCP the store is at rank 0, which has to be there before anyone can tell.
    others = [0] if url.startswith("tcp") else []
    trio.start(try_to_join, url, 0, 3, 30, ranks=others)
    trio.start(try_to_join, url, 1, 3, 30, ranks=[1, 2])
    outcomes = [trio.outcome(rank) for rank in (*others, 1, 2)]
    for took_s, kind, message in outcomes:
        assert took_s < 10
        assert kind is ValueError
        assert re.search(r"rank 1 has already joined \(pid \d+ on .*\); give each process its own rank", message)
    reports = [
        message for _, _, message in outcomes if re.search(r"refused pid \d+ on .*rank 1 has already joined", message)
    ]
    assert len(reports) == len(outcomes) - 1
    for rank in range(3):
        trio.start(try_to_join, url, rank, 3, 30, ranks=[rank])
    assert [trio.outcome(rank)[1:] for rank in range(3)] == [(None, f"rank {rank} of 3") for rank in range(3)]


def test_a_second_rank_0_ends_the_wait_of_the_first(trio, url):
    trio.start(try_to_join, url, 0, 2, 30, ranks=[0, 2])
    for took_s, kind, message in (trio.outcome(0), trio.outcome(2)):
        assert took_s < 10
        assert issubclass(kind, (ValueError, dist.DistNetworkError))
        assert re.search("rank 0 has already joined|is another process of this job rank 0", message)


def test_world_sizes_that_disagree(pair, url):
    pair.start(try_to_join, url, 0, 2, 30, ranks=[0])
    pair.start(try_to_join, url, 1, 3, 30, ranks=[1])
    outcomes = pair.gather()
    for took_s, kind, message in outcomes:
        assert took_s < 10
        assert kind is ValueError
        assert re.search("world size is [23], this one says [32]", message)
    assert sum("refused pid" in message for _, _, message in outcomes) == 1
    # Nothing is left of it in the way of the next.
    for rank in (0, 1):
        pair.start(try_to_join, url, rank, 2, 30, ranks=[rank])
    assert [pair.outcome(rank)[1:] for rank in (0, 1)] == [(None, "rank 0 of 2"), (None, "rank 1 of 2")]


def test_a_rank_that_the_world_does_not_have_ends_the_wait_of_the_others(pair, tmp_path, port):
    for place in (f"tcp://127.0.0.1:{port}", f"file://{tmp_path}/meet"):
        pair.start(try_to_join, place, 0, 2, 30, ranks=[0])
        deadline = time.monotonic() + 30
        while place.startswith("file") and not list(tmp_path.glob("meet")):
            assert time.monotonic() < deadline
        if place.startswith("file"):
            while b"arrivals" not in (tmp_path / "meet").read_bytes():
                assert time.monotonic() < deadline
        pair.start(try_to_join, place, 2, 2, 30, ranks=[1])
        for took_s, kind, message in pair.gather():
            assert took_s < 10
            assert issubclass(kind, ValueError)
            assert "rank must be between 0 and world_size - 1 = 1, got 2" in message


def test_who_is_not_of_a_world_that_has_begun_does_not_disturb_it(trio):
    with dist.TCPStore("127.0.0.1", 0, is_master=True) as store:
        for rank in (0, 1):
            trio.start(stay_in_the_world, store.port, rank, ranks=[rank])
        assert [trio.reported(rank) for rank in (0, 1)] == ["joined"] * 2
        cases = ((1, 2, "rank 1 has already joined"), (1, 3, "world size is 2, this one says 3"))
        for rank, world_size, words in cases:
            trio.start(join_late, store.port, rank, world_size, ranks=[2])
            assert words in trio.outcome(2)
        store.set("go on", "")
        assert [trio.outcome(rank) for rank in (0, 1)] == [2.0, 2.0]


def stay_in_the_world(port, rank):
    store = dist.TCPStore("127.0.0.1", port, timeout=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=30)
    report("joined")
    store.get("go on")
    total = dist.all_reduce(np.ones(1)).item()
    dist.destroy_process_group()
    return total


def join_late(port, rank, world_size):
    store = dist.TCPStore("127.0.0.1", port, timeout=30)
    with pytest.raises(ValueError, match=r"init_process_group \(rank 1") as raised:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=30)
    return str(raised.value)


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
        assert re.search(
            rf"init_process_group \(rank {rank} of 4\): 2 of 4 ranks joined within 1 s; ranks 1, 3 are missing:"
            " were they started with this (file|store's address, \\S+, and MESHDIST_SECRET)\\?$",
            message,
        )


def test_many_missing_ranks_are_not_all_listed(worlds, tmp_path):
    with WorkerSet(worlds.nursery, 1) as workers:
        workers.start(try_to_join, f"file://{tmp_path}/meet", 0, 1000, 0.5)
        [(_, kind, message)] = workers.gather()
    assert kind is dist.DistTimeoutError
    assert re.search(r"\(rank 0 of 1000\): 1 of 1000 ranks joined within 0.5 s; ranks 1-999 are missing", message)
    assert len(message) < 300


def be_refused(url):
    with pytest.raises(ValueError, match="rank must be between"):
        dist.init_process_group("gloo", init_method=url, rank=2, world_size=2)


def test_after_a_refusal_init_can_be_called_again(pair, url):
    pair.start(be_refused, url)
    pair.gather()
    pair.start(meet, url)
    assert pair.gather() == [3, 3]
