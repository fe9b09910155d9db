"""init_process_group as scripts call it: by position, with all the arguments, from threads; and what it refuses."""

import inspect
import re
import threading
import time
from contextvars import copy_context
from datetime import timedelta

import numpy as np
import pytest
from worlds import WorkerSet, report, worker_rank

import meshdist as dist

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("_own_environment")]

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture
def _own_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pair(worlds):
    with WorkerSet(worlds.nursery, 2) as workers:
        yield workers


@pytest.fixture
def _destroyed():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_arguments_have_their_places():
    names = "backend, init_method, timeout, world_size, rank, store, group_name, pg_options, device_id"
    assert ", ".join(inspect.signature(dist.init_process_group).parameters) == names
    names = (
        "host_name, port, world_size, is_master, timeout, wait_for_workers, multi_tenant, master_listen_fd, use_libuv"
    )
    assert ", ".join(inspect.signature(dist.TCPStore).parameters).startswith(names)


def by_keywords(url):
    dist.init_process_group(
        backend="gloo",
        init_method=url,
        timeout=timedelta(seconds=20),
        world_size=np.int64(2),
        rank=np.int32(worker_rank()),
        group_name="train",
        pg_options=None,
        device_id=None,
    )
    return finish()


def by_position(url):
    dist.init_process_group("gloo", url, timedelta(seconds=20), 2, worker_rank())
    return finish()


def by_store(port):
    store = dist.TCPStore("127.0.0.1", port, 2, worker_rank() == 0, timedelta(seconds=20))
    dist.init_process_group("gloo", rank=worker_rank(), world_size=2, store=store, device_id=0)
    return finish()


def by_one_store_twice(port):
    with dist.TCPStore("127.0.0.1", port, 2, worker_rank() == 0, timedelta(seconds=20)) as store:
        totals = []
        for name in ("first", "second"):
            part = dist.PrefixStore(name, store)
            dist.init_process_group("gloo", rank=worker_rank(), world_size=2, store=part)
            totals.append(finish())
        store.add("ended", 1)
        if worker_rank() == 0:  # the store is here: it stays until the other needs it no more
            store.wait(["left"], timedelta(seconds=20))
        else:
            store.set("left", "")
    return sum(totals) // 2


def in_threads(url):
    """Every call of the world from another thread than the one before."""
    results = []

    def join():
        dist.init_process_group("gloo", init_method=url, rank=worker_rank(), world_size=2, timeout=20)

    for step in (join, lambda: results.append(int(dist.all_reduce(np.array(1)))), dist.destroy_process_group):
        thread = threading.Thread(target=copy_context().run, args=(step,))
        thread.start()
        thread.join(timeout=30)
        assert not thread.is_alive()
    return results[0]


def finish():
    total = int(dist.all_reduce(np.array(1)))
    dist.destroy_process_group()
    return total


@pytest.mark.parametrize("program", [by_keywords, by_position, in_threads])
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_ways_to_call_it(pair, program, kind, port, tmp_path):
    pair.start(program, f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"file://{tmp_path}/meet")
    assert pair.gather() == [2, 2]


@pytest.mark.parametrize("program", [by_store, by_one_store_twice])
def test_with_a_store(pair, program, port):
    pair.start(program, port)
    assert pair.gather() == [2, 2]


def test_the_file_of_the_older_documents(pair, tmp_path):
    """`file:////` and more slashes, as for a share, mean a path as well."""
    pair.start(by_position, f"file:////{tmp_path}/some_file")
    assert pair.gather() == [2, 2]


REFUSED = {
    "both": ({"init_method": "env://", "store": dist.HashStore()}, ValueError, "init_method or store"),
    "rank is text": (
        {"store": dist.HashStore(), "rank": "0", "world_size": 1},
        TypeError,
        "rank must be an integer.*'0'",
    ),
    "rank is true": ({"init_method": "tcp://127.0.0.1:9", "rank": True}, TypeError, "rank must be an integer.*bool"),
    "size is a float": (
        {"init_method": "tcp://127.0.0.1:9", "world_size": 2.0},
        TypeError,
        "world_size must be an integer",
    ),
    "group_name is no text": (
        {"init_method": "tcp://127.0.0.1:9", "group_name": 3},
        TypeError,
        "group_name must be a str",
    ),
    "init_method is empty": ({"init_method": ""}, ValueError, "init_method must begin with"),
    "rank twice": ({"init_method": "tcp://127.0.0.1:9?rank=0", "rank": 1, "world_size": 2}, ValueError, "given twice"),
    "size twice in env": ({"init_method": "env://?world_size=3", "world_size": 2}, ValueError, "given twice"),
    "size twice in a file": ({"init_method": "file:///x?world_size=3", "world_size": 2}, ValueError, "given twice"),
    "unknown key": (
        {"init_method": "file:///x?size=3", "world_size": 2},
        ValueError,
        "the query may have rank, world_size and group_name, got 'size'",
    ),
    "no world size at a multicast address": ({"init_method": "tcp://239.1.1.1:9"}, ValueError, "world_size missing"),
    "no world size in a file": ({"init_method": "file:///x", "group_name": "a"}, ValueError, r"\?world_size=2"),
    "rank too high in a file": ({"init_method": "file:///x", "rank": 2, "world_size": 2}, ValueError, "= 1, got 2"),
    "negative rank": ({"init_method": "tcp://239.1.1.1:9", "rank": -3, "world_size": 2}, ValueError, "= 1, got -3"),
    "no directory": (
        {"init_method": "file:///nonesuch/folder/x", "world_size": 2},
        dist.DistStoreError,
        "directory /nonesuch/folder does not exist",
    ),
    "a long group name": (
        {"init_method": "tcp://239.1.1.1:9", "world_size": 2, "group_name": "x" * 2000},
        ValueError,
        "group_name must have at most 1000 characters",
    ),
}


@pytest.mark.usefixtures("_destroyed")
@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    options, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        dist.init_process_group("gloo", **options)
    assert not dist.is_initialized()


@pytest.mark.parametrize("missing", VARIABLES[:2] + VARIABLES[3:5])
def test_a_missing_variable_is_named_alone(monkeypatch, missing):
    # Rank 0 would need no MASTER_ADDR.
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"env:// rendezvous: {missing} (is|are) missing from the environment"):
        dist.init_process_group("gloo")


# ---- Again, after some did not come


def too_early(port, rank):
    """Rank 0 is there alone first, in vain, and comes again when the other one is there."""
    store = dist.TCPStore("127.0.0.1", port, timeout=20)
    if rank == 0:
        for _ in range(2):
            with pytest.raises(dist.DistTimeoutError, match=r"1 of 2 ranks joined within 0.2 s; rank 1 is missing"):
                dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=0.2)
        store.set("others may come", "")
    else:
        store.get("others may come")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=20)
    return finish()


def test_a_rank_that_gave_up_may_come_again_in_the_same_store(pair):
    with dist.TCPStore("127.0.0.1", 0, is_master=True) as store:
        for rank in range(2):
            pair.start(too_early, store.port, rank, ranks=[rank])
        assert pair.gather() == [2, 2]


def in_a_file(url, rank):
    if rank == 0:
        with pytest.raises(dist.DistTimeoutError, match=r"1 of 2 ranks joined within 0.2 s; rank 1 is missing"):
            dist.init_process_group("gloo", init_method=url, rank=0, world_size=2, timeout=0.2)
        report("gave up")
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2, timeout=20)
    return finish()


def test_a_rank_that_gave_up_may_come_again_in_the_same_file(pair, tmp_path):
    pair.start(in_a_file, f"file://{tmp_path}/meet", 0, ranks=[0])
    assert pair.reported(0) == "gave up"
    pair.start(in_a_file, f"file://{tmp_path}/meet", 1, ranks=[1])
    assert pair.gather() == [2, 2]


def test_the_error_says_the_timeout_that_was_given(tmp_path):
    with pytest.raises(dist.DistTimeoutError, match="1 of 2 ranks joined within 0.001 s; rank 1 is missing"):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=2, timeout=0.001)


# ---- Who was refused is said to those who wait


def refused_by(place, rank, world_size, timeout_s):
    if isinstance(place, int):
        options = {"store": dist.TCPStore("127.0.0.1", place, timeout=20)}
    else:
        options = {"init_method": place}
    with pytest.raises(ValueError, match="init_process_group") as raised:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout_s, **options)
    return raised.type, str(raised.value)


@pytest.mark.parametrize("kind", ["store", "file"])
@pytest.mark.parametrize(
    ("rank", "world_size", "words"), [(0, 2, "rank 0 has already joined"), (1, 3, "world size is 2, this one says 3")]
)
def test_who_waits_learns_who_was_refused(pair, tmp_path, kind, rank, world_size, words):
    with dist.TCPStore("127.0.0.1", 0, is_master=True) as store:
        place = store.port if kind == "store" else f"file://{tmp_path}/meet"
        pair.start(refused_by, place, 0, 2, 30, ranks=[0])
        if kind == "file":
            until_it_holds(tmp_path / "meet", b"arrivals")
        else:
            store.get("world/0/arrived")
        pair.start(refused_by, place, rank, world_size, 30, ranks=[1])
        (waited, message), (refused, own) = pair.gather()
    who = f"pid {pair.pids[1]} on "
    assert (waited, refused) == (ValueError, ValueError)
    assert words in own
    assert re.search(rf"init_process_group \(rank 0 of 2\): refused {who}.*{words}", message)


def test_the_host_of_a_store_learns_who_was_refused(caplog):
    with dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False) as store:
        with pytest.raises(ValueError, match="world_size=2, not 3"):
            dist.TCPStore("127.0.0.1", store.port, 3)
        store.check([])  # answered by the same thread, after what it had to say
    assert re.search(r"the store refused 127.0.0.1:\d+: this store is for world_size=2, not 3", caplog.text)


def until_it_holds(path, text):
    deadline = time.monotonic() + 30
    while not path.exists() or text not in path.read_bytes():
        assert time.monotonic() < deadline


# ---- Before init


def needs_a_world():
    found = []
    for name in dist.__all__:
        function = getattr(dist, name)
        if not inspect.isclass(function) and callable(function):
            parameters = inspect.signature(function).parameters
            without = ("coalescing_manager", "destroy_process_group", "init_device_mesh")
            if "group" in parameters and name not in without:
                found.append(pytest.param(function, parameters, id=name))
    return found


@pytest.mark.parametrize(("function", "parameters"), needs_a_world())
def test_before_init_every_call_says_what_to_do(function, parameters):
    numbers = {"src", "dst", "rank", "global_rank", "group_rank"}
    arguments = {}
    for name, parameter in parameters.items():
        if name == "group" or parameter.default is parameter.empty:
            value = np.zeros(2) if "list" not in name and not name.endswith("s") else [np.zeros(2)]
            arguments[name] = None if name == "group" else 0 if name in numbers else value
    with pytest.raises(ValueError, match=r"init_process_group\(\) first"):
        function(**arguments)
