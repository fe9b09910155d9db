"""Processes that cannot form a world: all that have met raise at once; a timeout gives the reason."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
import traceback

import numpy as np
import pytest
from until import until
from worlds import WorkerSet, report, worker_rank

import meshdist as dist
from meshdist.backends import Engine


def join(url, rank, world_size=2, backend="gloo", timeout_s=1.5, **variables):
    """Try to join and make a call; return how long that took, and the error."""
    os.environ.update(variables)
    report("about to join")
    began_s = time.monotonic()
    try:
        dist.init_process_group(
            backend, init_method=url, rank=rank, world_size=world_size, timeout=timeout_s, group_name=""
        )
        total = dist.all_reduce(np.ones(1)).item()
    except Exception as error:
        return time.monotonic() - began_s, type(error), str(error)
    dist.destroy_process_group()
    return time.monotonic() - began_s, None, str(total)


@pytest.fixture
def new_pair(worlds):
    with WorkerSet(worlds.nursery, 2) as workers:
        yield workers


@pytest.fixture(params=["tcp", "file"])
def url(request, port, tmp_path):
    return f"tcp://127.0.0.1:{port}" if request.param == "tcp" else f"file://{tmp_path}/meet"


# ---- The backends


@pytest.mark.parametrize("first", [0, 1])
def test_backends_that_disagree_are_an_error_on_all_ranks(new_pair, url, first):
    names = ("gloo", "cpu:gloo,cuda:nccl")
    for rank in (first, 1 - first):
        new_pair.start(join, url, rank, 2, names[rank], 20, ranks=[rank])
        if rank == first:
            new_pair.reported(rank)
    for rank in (0, 1):
        if rank != first:
            new_pair.reported(rank)
        took_s, kind, message = new_pair.outcome(rank)
        assert kind is ValueError, message
        assert re.match(rf"init_process_group \(rank {rank} of 2\): the backends disagree: rank", message)
        assert "'gloo'" in message
        assert "'cpu:gloo,cuda:nccl'" in message
        assert took_s < 10
    # Nothing is left of it in the way of the next.
    new_pair.start(join, url, 0, 2, "gloo", 20, ranks=[0])
    new_pair.start(join, url, 1, 2, "gloo", 20, ranks=[1])
    for rank in (0, 1):
        new_pair.reported(rank)
        assert new_pair.outcome(rank)[1:] == (None, "2.0")


def test_a_backend_that_is_not_for_processes_is_an_error_on_all_ranks(new_pair, url):
    for rank in (0, 1):
        new_pair.start(join, url, rank, 2, "threads", 20, ranks=[rank])
    for rank in (0, 1):
        new_pair.reported(rank)
        took_s, kind, message = new_pair.outcome(rank)
        assert kind is ValueError
        assert re.search(
            "the 'threads' backend is for ranks that are threads of meshdist.run; for processes use", message
        )
        assert took_s < 10


def test_a_backend_that_is_not_for_processes_is_refused_alone():
    for _ in range(2):
        with pytest.raises(ValueError, match=r"\(rank 0 of 1\): the 'threads' backend is for ranks"):
            dist.init_process_group("threads", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


class Refusing(Engine):
    """An engine that is never made on rank 1."""


def make_refusing(store, rank, size, timeout):
    if rank == 1:
        raise KeyError("no such card")
    return Refusing()


def join_refusing(url, rank):
    dist.Backend.register_backend("refusing", make_refusing)
    return join(url, rank, 2, "refusing", 20)


def test_a_registered_backend_that_cannot_be_made_is_an_error_on_all_ranks(new_pair, url):
    for rank in (0, 1):
        new_pair.start(join_refusing, url, rank, ranks=[rank])
    for rank in (0, 1):
        new_pair.reported(rank)
    took_s, kind, message = new_pair.outcome(0)
    assert kind is dist.DistBackendError
    assert (
        "on rank 1: backend 'refusing': the registered function make_refusing raised KeyError: 'no such card'"
        in message
    )
    assert "init_process_group (rank 0 of 2)" in message
    assert took_s < 10
    assert "no such card" in new_pair.outcome(1)[2]


# ---- Who waits in vain


@pytest.fixture
def soon_reminded(monkeypatch):
    monkeypatch.setattr("meshdist.system.deadline.FIRST_REMINDER_S", 0.2)


def test_a_wait_for_ranks_says_who_is_missing(soon_reminded, caplog, port):
    with pytest.raises(dist.DistTimeoutError):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2, timeout=1.6)
    assert re.search(
        r"init_process_group \(rank 0 of 2\) is still waiting after \d s: 1 of 2 ranks has joined"
        r" \(timeout in \d s\); rank 1 is missing",
        caplog.text,
    )


class PressCtrlC(logging.Handler):
    """Sends this process SIGINT once, at a reminder of who is missing."""

    def emit(self, record):
        if "is still waiting" in record.getMessage():
            logging.getLogger("meshdist").removeHandler(self)
            signal.raise_signal(signal.SIGINT)


def test_the_traceback_of_ctrl_c_ends_at_the_line_of_the_user(soon_reminded, port):
    handler = PressCtrlC()
    logging.getLogger("meshdist").addHandler(handler)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # of tests in the background, it is ignored
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2, timeout=30)
    finally:
        logging.getLogger("meshdist").removeHandler(handler)
        signal.signal(signal.SIGINT, before)
    mine, *frames = traceback.extract_tb(raised.value.__traceback__)
    assert mine.filename == __file__
    assert [frame.name for frame in frames] == ["init_process_group"]


def test_a_wait_for_the_other_processes_of_a_file_says_who_came(soon_reminded, caplog, tmp_path):
    with pytest.raises(dist.DistTimeoutError):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", world_size=2, timeout=1.6)
    assert re.search(r"init_process_group \(2 ranks\) is still waiting after \d s: 1 rank has joined", caplog.text)


def test_a_wait_for_the_store_says_where_none_answers(soon_reminded, caplog, port):
    with pytest.raises(dist.DistNetworkError):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2, timeout=0.9)
    assert re.search(
        rf"no store answers at 127.0.0.1:{port} after \d s \(.*refused\); trying for \d s more", caplog.text
    )


def test_a_wrong_secret_is_told_to_those_who_wait(new_pair, port):
    url = f"tcp://127.0.0.1:{port}"
    new_pair.start(join, url, 0, 2, "gloo", 2.5, ranks=[0])
    new_pair.reported(0)
    code = {"MESHDIST_SECRET": "another"}
    new_pair.start(join_with, code, url, 1, ranks=[1])
    new_pair.reported(1)
    _, kind, message = new_pair.outcome(1)
    assert issubclass(kind, dist.DistNetworkError)
    assert "belongs to another job" in message
    _, kind, message = new_pair.outcome(0)
    assert kind is dist.DistTimeoutError
    assert re.search(
        r"1 of 2 ranks joined within 2.5 s; rank 1 is missing: was it started with this store's address, \S+,"
        r" and MESHDIST_SECRET\?;"
        r" refused: 127.0.0.1:\d+, which belongs to job \w+, not to \w+: it has another MESHDIST_SECRET$",
        message,
    ), message


def test_a_wrong_secret_at_a_file_ends_the_wait_of_the_others(new_pair, tmp_path):
    url = f"file://{tmp_path}/meet"
    new_pair.start(join, url, 0, 2, "gloo", 30, ranks=[0])
    new_pair.reported(0)
    until((tmp_path / "meet").exists, "rank 0 has opened the file")
    new_pair.start(join_with, {"MESHDIST_SECRET": "another"}, url, 1, ranks=[1])
    new_pair.reported(1)
    _, kind, message = new_pair.outcome(1)
    assert issubclass(kind, dist.DistStoreError)
    assert "it belongs to another job, which has another MESHDIST_SECRET" in message
    took_s, kind, message = new_pair.outcome(0)
    assert kind is ValueError
    assert re.search(r"\(rank 0 of 2\): refused pid \d+ on \S+: it has another MESHDIST_SECRET$", message), message
    assert took_s < 10


def join_with(variables, url, rank):
    return join(url, rank, 2, "gloo", 2.5, **variables)


@pytest.mark.parametrize("size_of_0", [2, 3])
def test_a_wrong_world_size_ends_the_wait_of_the_others(new_pair, port, size_of_0):
    url = f"tcp://127.0.0.1:{port}"
    new_pair.start(join, url, 0, size_of_0, "gloo", 30, ranks=[0])
    new_pair.start(join, url, 1, 5 - size_of_0, "gloo", 30, ranks=[1])
    for place in (0, 1):
        new_pair.reported(place)
        took_s, kind, message = new_pair.outcome(place)
        assert kind is ValueError
        assert re.search("the other ranks say that the world size is [23], this one says [32]$", message), message
        assert took_s < 10


def test_two_ranks_0_at_one_port(new_pair, port):
    url = f"tcp://127.0.0.1:{port}"
    for place in (0, 1):
        new_pair.start(join, url, 0, 2, "gloo", 30, ranks=[place])
        new_pair.reported(place)
    outcomes = [new_pair.outcome(place) for place in (0, 1)]
    taken = f"127.0.0.1:{port} is taken by another socket.*; or is another process of this job rank 0"
    refusal = r"refused pid \d+ on .*: rank 0 has already joined; this is another rank 0 of 2$"
    assert all(took_s < 10 for took_s, _, _ in outcomes)
    assert sorted(bool(re.search(taken, message)) for _, _, message in outcomes) == [False, True], outcomes
    assert any(re.search(refusal, message) for _, _, message in outcomes), outcomes


def test_a_stranger_does_not_end_the_wait_of_a_rank(new_pair, port):
    """Whoever has not proven to be of the job is turned away, whatever it says."""
    url = f"tcp://127.0.0.1:{port}"
    new_pair.start(join, url, 0, 2, "gloo", 2.5, ranks=[0])
    new_pair.reported(0)
    new_pair.start(join_with_size, {"MESHDIST_SECRET": "another"}, url, 3, ranks=[1])
    new_pair.reported(1)
    assert new_pair.outcome(0)[1] is dist.DistTimeoutError
    new_pair.outcome(1)


def join_with_size(variables, url, world_size):
    return join(url, 2, world_size, "gloo", 2.5, **variables)


def join_named(url, name, timeout_s):
    with pytest.raises(dist.DistTimeoutError) as raised:
        dist.init_process_group("gloo", init_method=url, world_size=2, rank=0, group_name=name, timeout=timeout_s)
    return str(raised.value)


@pytest.mark.parametrize("names", [("", "a 0"), ("a 0", "")], ids=["without and with", "with and without"])
def test_another_group_name_at_one_file_is_told(new_pair, tmp_path, names):
    url = f"file://{tmp_path}/meet"
    new_pair.start(join_named, url, names[1], 4, ranks=[1])
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("meet*")):
        assert time.monotonic() < deadline
    new_pair.start(join_named, url, names[0], 0.5, ranks=[0])
    message = new_pair.outcome(0)
    assert "rank 1 is missing: was it started with this file" in message
    assert f"joined as group_name {names[0]!r}, and there is a meeting at this file as {names[1]!r}" in message
    new_pair.outcome(1)


# ---- The end


def test_a_second_destroy_says_that_it_is_one(new_pair, url):
    new_pair.start(destroy_twice, url)
    assert new_pair.gather() == ["the default process group has already been destroyed"] * 2


def destroy_twice(url):
    dist.init_process_group("gloo", init_method=url, rank=worker_rank(), world_size=2, timeout=20)
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="call meshdist.init_process_group") as raised:
        dist.destroy_process_group()
    return str(raised.value).partition(";")[0]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MESHDIST_DISABLE_SHM", "yes"),
        ("MESHDIST_SINGLE_COPY", "banana"),
        ("MESHDIST_INSECURE", "true"),
        ("MESHDIST_MPI_CUDA", "2"),
        ("MESHDIST_CORE", "fortran"),
        ("MESHDIST_EAGER_LIMIT", "64k"),
        ("MESHDIST_EAGER_LIMIT", "99999999"),
        ("MESHDIST_DEBUG", "LOUD"),
    ],
)
def test_a_variable_with_a_value_that_it_cannot_have_is_said_before_anybody_waits(monkeypatch, port, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable}.* got '{value}'"):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2, timeout=20)
