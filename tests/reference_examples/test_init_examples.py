"""The documented ways to start: by address, file, environment, store and mesh; and the questions asked afterwards."""

import os
import socket
from datetime import timedelta

import numpy as np
import pytest
from worlds import worker_rank

import meshdist as dist
from meshdist.device_mesh import init_device_mesh

pytestmark = pytest.mark.timeout(60)
TIMEOUT = timedelta(seconds=30)


def look_around():
    """Return what the default group looks like, use it, and end it."""
    rank = dist.get_rank()
    total = np.array([rank])
    dist.all_reduce(total)
    found = rank, dist.get_world_size(), dist.get_backend(), dist.is_initialized(), total.item()
    dist.destroy_process_group()
    return *found, dist.is_initialized()


def looks(size):
    """Return what every rank is to see."""
    return [(rank, size, "gloo", True, sum(range(size)), False) for rank in range(size)]


def by_init_method(init_method, size):
    dist.init_process_group("gloo", init_method=init_method, rank=worker_rank(), world_size=size, timeout=TIMEOUT)
    return look_around()


def test_address_of_one_of_the_machines(bare, port):
    bare.start(by_init_method, f"tcp://127.0.0.1:{port}", bare.size)
    assert bare.gather() == looks(bare.size)


def test_shared_file(bare, tmp_path):
    bare.start(by_init_method, f"file://{tmp_path}/sharedfile", bare.size)
    assert bare.gather() == looks(bare.size)


def in_the_url(init_method, size):
    dist.init_process_group("gloo", f"{init_method}?rank={worker_rank()}&world_size={size}", TIMEOUT)
    return look_around()


def test_rank_and_world_size_in_the_url(bare, port):
    bare.start(in_the_url, f"tcp://127.0.0.1:{port}", bare.size)
    assert bare.gather() == looks(bare.size)


def by_environment(port, size, as_arguments):
    os.environ.update(MASTER_PORT=str(port))
    if worker_rank() != 0:  # "required (except for rank 0)"
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    rank = {"rank": worker_rank(), "world_size": size}
    if not as_arguments:
        os.environ.update(RANK=str(worker_rank()), WORLD_SIZE=str(size))
        rank = {}
    dist.init_process_group(backend="gloo", **({"init_method": "env://"} if as_arguments else {}), **rank)
    return look_around()


@pytest.mark.parametrize("as_arguments", [False, True])
def test_environment(bare, port, as_arguments):
    bare.start(by_environment, port, bare.size, as_arguments)
    assert bare.gather() == looks(bare.size)


def by_store(port, size):
    with dist.TCPStore("127.0.0.1", port, size, worker_rank() == 0, TIMEOUT) as store:
        dist.init_process_group(None, store=store, rank=worker_rank(), world_size=size)
        found = look_around()
        store.set(f"left by {worker_rank()}", "")
        if worker_rank() == 0:
            store.wait([f"left by {rank}" for rank in range(size)])  # the store ends with this rank
    return found


def test_store(bare, port):
    bare.start(by_store, port, bare.size)
    assert bare.gather() == looks(bare.size)


def by_mesh(port, size):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(worker_rank()), WORLD_SIZE=str(size))
    before = dist.is_initialized()
    mesh_1d = init_device_mesh("cpu", mesh_shape=(size,))
    assert mesh_1d.get_coordinate() == (worker_rank(),)
    return before, look_around()


def test_mesh_makes_the_default_group(bare, port):
    bare.start(by_mesh, port, bare.size)
    assert bare.gather() == [(False, look) for look in looks(bare.size)]


def automatically(init_method, size, group_name):
    dist.init_process_group("gloo", init_method, TIMEOUT, world_size=size, group_name=group_name)
    return look_around()


def test_ranks_of_two_jobs_are_given_out_by_one_file(bare, tmp_path):
    for name in ("one", "another"):
        bare.start(automatically, f"file://{tmp_path}/sharedfile", bare.size, name)
        assert sorted(bare.gather()) == looks(bare.size)


MULTICAST = "ff15:1e18:5d4c:4cf0:d02d:b659:53ba:b0a7"


def can_multicast():
    """Return whether a datagram to the page's multicast address goes out here."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"", (MULTICAST, 9))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not can_multicast(), reason="there is no route for multicast datagrams over IPv6")
def test_ranks_are_given_out_over_a_multicast_address(bare, port):
    bare.start(automatically, f"tcp://[{MULTICAST}]:{port}", bare.size, "")
    assert sorted(bare.gather()) == looks(bare.size)


def test_what_is_available():
    assert dist.is_available()
    assert dist.is_gloo_available()
    assert isinstance(dist.is_mpi_available(), bool)
    assert isinstance(dist.is_nccl_available(), bool)


def test_nothing_works_before_init():
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="init_process_group"):
        dist.get_rank()


@pytest.mark.parametrize("run_id", [None, "7"])
def test_is_torchelastic_launched(monkeypatch, run_id):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run_id is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    assert dist.is_torchelastic_launched() == (run_id is not None)


def test_backend_parses_any_case():
    assert dist.Backend("GLOO") == "gloo"
    assert dist.Backend("gloo") == dist.Backend.GLOO
    assert dist.Backend.NCCL == "nccl"
    with pytest.raises(ValueError, match="gloo"):
        dist.Backend("no such backend")


def by_backend_string(init_method, size):
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method, TIMEOUT, rank=worker_rank(), world_size=size)
    total = np.array([worker_rank()])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def test_backends_by_device(bare, port):
    bare.start(by_backend_string, f"tcp://127.0.0.1:{port}", bare.size)
    assert bare.gather() == [sum(range(bare.size))] * bare.size
