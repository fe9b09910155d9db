"""dry_run: worlds that are not there, of any size, begun and ended by scripts as real ones."""

import contextvars
import os
import socket
import sys
import threading
import time

import numpy as np
import pytest

import meshdist as dist
from meshdist.device_mesh import DeviceMesh

pytestmark = pytest.mark.timeout(60)


def script():
    """What stands in many a script."""
    dist.init_process_group("gloo", timeout=60)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size // 4, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    x = mesh["dp", "tp"].all_reduce(np.full(3, rank, np.float32))
    even = dist.new_group(range(0, size, 2))
    if rank % 2 == 0:
        dist.broadcast(x, src=0, group=even)
    out = [None] * size
    dist.all_gather_object(out, rank)
    dist.monitored_barrier()
    dist.barrier(async_op=True).wait()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    return mesh.get_coordinate(), x.tolist(), out


def test_every_rank_in_turn():
    results = []
    for rank in range(8):
        with dist.dry_run(8, rank):
            results.append(script())
    assert [place for place, _, _ in results] == [(k // 4, k // 2 % 2, k % 2) for k in range(8)]
    assert [x for _, x, _ in results] == [[4.0 * rank] * 3 for rank in range(8)]
    assert [out for _, _, out in results] == [[rank] * 8 for rank in range(8)]
    assert not dist.is_initialized()


def test_threads_at_once_are_runs_of_their_own():
    together, found = threading.Barrier(4), {}

    def main(rank):
        with dist.dry_run(100 + rank, rank):
            together.wait(30)
            found[rank] = dist.get_rank(), dist.get_world_size(), dist.all_reduce(np.ones(1)).item()
            together.wait(30)

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {rank: (rank, 100 + rank, 100.0 + rank) for rank in range(4)}


def test_a_thread_of_the_script_runs_in_a_copy_of_its_context():
    found = []
    with dist.dry_run(9, 3):
        thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(lambda: found.append((dist.get_rank(), dist.get_world_size())),),
        )
        thread.start()
        thread.join(30)
    assert found == [(3, 9)]


def test_runs_inside_runs_and_inside_a_world():
    def main():
        with dist.dry_run(1000, 7):
            with dist.dry_run(5):
                assert dist.get_world_size() == 5
            assert (dist.get_rank(), dist.get_world_size()) == (7, 1000)
            dist.destroy_process_group()
        return dist.all_reduce(np.ones(1)).item()

    assert dist.run(main, 2) == [2.0, 2.0]


def test_the_world_is_there_before_init_and_gone_after_destroy():
    with dist.dry_run(4, 1):
        assert dist.is_initialized()
        assert dist.get_backend() == "fake"
        dist.init_process_group()
        with pytest.raises(ValueError, match="the default process group is already initialized"):
            dist.init_process_group()
        dist.destroy_process_group()
        with pytest.raises(ValueError, match="the default process group has already been destroyed"):
            dist.all_reduce(np.ones(1))
        mesh = dist.init_device_mesh("cpu", (4,))  # which begins it again
        assert mesh.get_coordinate() == (1,)
    assert not dist.is_initialized()


def test_the_outer_world_is_back_after_an_exception():
    with pytest.raises(KeyError, match="mine"), dist.dry_run(4):
        raise KeyError("mine")
    assert not dist.is_initialized()


def test_groups_of_a_run_that_is_over_say_so():
    with dist.dry_run(4):
        group = dist.new_group([0, 1])
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"all_reduce on group .*the dry run has ended$"):
        group.all_reduce(np.ones(1))
    with pytest.raises(ValueError, match="the dry run has ended; create groups and meshes again"):
        mesh["tp"].all_reduce(np.ones(1))


@pytest.mark.parametrize("backend", ["gloo", "nccl", "mpi", "cpu:gloo,cuda:nccl", "fake", "threads"])
def test_any_backend_can_be_named(backend):
    with dist.dry_run(4):
        dist.init_process_group(backend)
        assert dist.get_backend() == backend
        assert dist.new_group([0, 1], backend=backend).size() == 2


def test_meshes_of_gpus_are_made_without_any():
    with dist.dry_run(16, 5):
        mesh = dist.init_device_mesh("cuda", (4, 4), mesh_dim_names=("dp", "tp"))
        assert mesh["tp"].mesh.tolist() == [4, 5, 6, 7]


BAD_INITS = {
    "backend": ({"backend": "fast"}, "unknown backend 'fast'"),
    "both": ({"store": dist.HashStore(), "init_method": "env://", "rank": 0, "world_size": 4}, "only one of them"),
    "other rank": ({"rank": 3}, "dry run of rank 1 of 4, got rank 3; leave rank out, or pass it to dry_run"),
    "other size": ({"world_size": 8}, "dry run of rank 1 of 4, got world_size 8"),
    "timeout": ({"timeout": -1}, "timeout must not be negative"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_INITS.values(), ids=BAD_INITS.keys())
def test_wrong_arguments_of_init_are_refused(arguments, message):
    with dist.dry_run(4, 1):
        with pytest.raises(ValueError, match=message):
            dist.init_process_group(**arguments)
        dist.init_process_group(rank=1, world_size=4)


BAD_RUNS = {
    "no rank": ((0,), ValueError, "world_size must be at least 1, got 0"),
    "rank": ((4, 4), ValueError, "rank must be 0 to 3, got 4"),
    "negative": ((4, -1), ValueError, "rank must be 0 to 3, got -1"),
    "float": ((4.0,), TypeError, "world_size must be an integer, got 4.0"),
}


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD_RUNS.values(), ids=BAD_RUNS.keys())
def test_wrong_arguments_are_refused(arguments, kind, message):
    with pytest.raises(kind, match=message), dist.dry_run(*arguments):
        pass
    with pytest.raises(ValueError, match="ranks_per_host must be at least 1"), dist.dry_run(4, ranks_per_host=0):
        pass


WRONG_CALLS = {
    "shape": (lambda: dist.all_gather_into_tensor(np.zeros(3), np.zeros(1)), ValueError, r"must have shape \(4,\)"),
    "read-only": (lambda: dist.all_reduce(np.broadcast_to(np.ones(1), 3)), ValueError, "read-only"),
    "dtype": (lambda: dist.all_reduce(np.array(["a"])), TypeError, "dtype <U1"),
    "op": (lambda: dist.all_reduce(np.ones(2, int), "avg"), TypeError, "AVG is not defined for int64"),
    "root": (lambda: dist.broadcast(np.ones(1), 4), ValueError, "src must be a rank in the group"),
    "oneself": (lambda: dist.send(np.ones(1), 0), ValueError, "dst is this rank, 0, which has posted no receive"),
    "list": (lambda: dist.gather(np.ones(1), [np.ones(1)], dst=1), ValueError, "pass None on the others"),
    "ranks": (lambda: dist.new_group([0, 4]), ValueError, "must be 0 to 3, got 4"),
    "device": (lambda: dist.new_group(backend="nccl").all_reduce(np.ones(1)), ValueError, "on device type 'cpu'"),
}


@pytest.mark.parametrize(("call", "kind", "message"), WRONG_CALLS.values(), ids=WRONG_CALLS.keys())
def test_calls_are_checked_as_real_ones(call, kind, message):
    with dist.dry_run(4):
        with pytest.raises(kind, match=message):
            call()
        assert dist.all_reduce(np.ones(1)).item() == 4


def test_the_backend_is_for_dry_runs_only(monkeypatch):
    assert not dist.is_backend_available("fake")
    with pytest.raises(dist.DistBackendError, match="'fake' backend is not available: it is for dry runs"):
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)


def test_hosts_are_made_up():
    with dist.dry_run(64, 13, ranks_per_host=8):
        assert dist.get_node_local_rank() == 5
        mine, subgroups = dist.new_subgroups()
        assert mine.ranks == tuple(range(8, 16))
        assert len(subgroups) == 8
        assert "node3 (8) and 4 more" in str(dist.init_device_mesh("cpu", (16, 4)))
    with dist.dry_run(64, 13):
        assert dist.get_node_local_rank() == 13


def test_ranks_outside_a_group_or_mesh():
    with dist.dry_run(8, 7):
        assert dist.new_group([0, 1]) is dist.GroupMember.NON_GROUP_MEMBER
        mesh = dist.init_device_mesh("cpu", (2, 2))
        assert mesh.get_coordinate() is None
        with pytest.raises(ValueError, match="outside the mesh"):
            mesh.get_group(0)


def test_a_world_that_shrinks():
    with dist.dry_run(8, 5, ranks_per_host=2) as dry:
        dist.shrink_group([0, 1, 6])
        assert (dist.get_rank(), dist.get_world_size()) == (3, 5)
        assert dist.all_reduce(np.ones(1)).item() == 5
        assert dist.new_subgroups()[0].ranks == (2, 3)
    assert dry.account.total().calls == 1


def use_store(store):
    store.set("key", "value")
    assert store.add("count", 2) == 2
    with dist.PrefixStore("mine", store) as mine:
        mine.set("key", "other")
        assert mine.get("key") == b"other"
    assert store.get("key") == b"value"
    with pytest.raises(dist.DistStoreError, match="'theirs' will not be set, since no other rank runs in a dry run"):
        store.wait(["key", "theirs"])
    assert not store.check(["theirs"])
    with pytest.raises(ValueError, match="decimal number"):
        store.add("key", 1)


def test_stores_of_the_script_are_tables(tmp_path):
    with dist.dry_run(4, 1):
        use_store(dist.TCPStore("localhost", 29500, 4, is_master=False))
        assert dist.TCPStore("localhost", 29500).get("key") == b"value"
        with dist.TCPStore("127.0.0.1", 0, is_master=True) as master:
            assert master.port > 0
            use_store(master)
        use_store(dist.FileStore(tmp_path / "store", 4))
        assert dist.FileStore(tmp_path / "store", 4).get("key") == b"value"
        dist.init_process_group(store=dist.FileStore(tmp_path / "store", 4), rank=1, world_size=4)
        with pytest.raises(ValueError, match="port 0 picks a free port on the master only"):
            dist.TCPStore("localhost", 0)
    with dist.dry_run(4, 1):
        assert not dist.FileStore(tmp_path / "store", 4).check(["key"])
    assert list(tmp_path.iterdir()) == []


def open_files():
    return sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(fd))


def is_open(fd):
    return os.path.islink(f"/proc/self/fd/{fd}")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nothing_is_made(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "socket", None)  # whoever makes one fails
    threads, files = threading.active_count(), open_files()
    for rank in (0, 7):
        with dist.dry_run(8, rank):
            script()
            dist.init_process_group()
            works = [dist.all_reduce(np.ones(1 << 20), async_op=True) for _ in range(3)]
            assert (threading.active_count(), open_files()) == (threads, files)
            assert all(work.wait() for work in works)
    assert list(tmp_path.iterdir()) == []


def test_callbacks_of_async_calls():
    with dist.dry_run(3):
        future = dist.all_reduce(np.ones(2), async_op=True).get_future().then(lambda done: done.value()[0].sum())
        assert future.wait() == 6


def test_error_messages_of_large_groups_are_short():
    with dist.dry_run(65536):
        assert len(repr(dist.group.WORLD)) < 200
        with pytest.raises(ValueError, match="src must be a rank in the group") as caught:
            dist.broadcast(np.ones(1), src=-1)
        assert len(str(caught.value)) < 300


def test_scale():
    begin = time.perf_counter()
    with dist.dry_run(131_072, rank=77_777):
        names = ("pp", "dp", "cp", "tp")
        mesh = dist.init_device_mesh("cpu", (64, 32, 32, 2), mesh_dim_names=names)
        slices = [mesh[one, other] for one in names for other in names if one != other]
        assert [group.size() for group in mesh.get_all_groups()] == [64, 32, 32, 2]
        assert all(part.collective_group.size() == part.size() for part in slices)
    # A bound for machines that are busy; benchmarks/mesh_scale.py measures.
    assert time.perf_counter() - begin < 5


def test_meshes_of_any_arrangement():
    with dist.dry_run(6, 4):
        mesh = DeviceMesh("cpu", [[5, 4], [3, 2]], mesh_dim_names=("a", "b"))
        assert mesh["b"].get_group().ranks == (5, 4)
        assert mesh["b"].all_gather_into_tensor(np.zeros(2), np.ones(1)).tolist() == [1, 1]
