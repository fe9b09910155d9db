"""Accounts: which calls count, under which axes, with how many bytes, in dry runs and in real worlds."""

import builtins
import pickle

import numpy as np
import pytest

import meshdist as dist
from meshdist.collectives.definition import Collective
from meshdist.collectives.methods import CollectiveMethods
from meshdist.collectives.registry import functions, sent_bytes
from meshdist.device_mesh import DeviceMesh

pytestmark = pytest.mark.timeout(60)
NAMES = ("dp", "cp", "tp")


def counted(calls, nbytes, inside, between=0):
    return {"calls": calls, "nbytes": nbytes, "inside": inside, "between": between}


def mesh_of_8():
    return dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)


def call_along_all_kinds_of_axes():
    mesh, x = mesh_of_8(), np.zeros(100, np.uint8)
    with mesh.account() as account:
        mesh["tp"].all_reduce(x)
        dist.all_reduce(x, group=mesh.get_group("tp"))
        mesh["cp", "tp"]["tp"].all_reduce(x)
        mesh["dp", "tp"].all_reduce(x)
        mesh["tp", "dp"].all_reduce(x, async_op=True).wait()
        mesh.all_reduce(x)
        dist.all_reduce(x)
        dist.new_group(mesh["cp"].mesh.tolist(), group_desc="mine").all_reduce(x)
        if dist.get_rank() in (0, 3):
            dist.new_group([0, 3], group_desc="diagonal").all_reduce(x)
    mesh["tp"].all_reduce(x)  # after the block
    return account.as_dict()


def test_groups_count_under_the_axes_that_they_run_along(worlds):
    results = worlds.world("threads", 8).run(call_along_all_kinds_of_axes)
    want = {
        "tp": {"all_reduce": counted(3, 300, 300)},
        "dp,tp": {"all_reduce": counted(2, 200, 300)},
        "dp,cp,tp": {"all_reduce": counted(2, 200, 350)},
        "cp": {"all_reduce": counted(1, 100, 100)},
    }
    outside = {"group 'diagonal'": {"all_reduce": counted(1, 100, 100)}}
    assert results == [{**want, **outside} if rank in (0, 3) else want for rank in range(8)]


def call_in_a_real_world():
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    with mesh.account() as account:
        mesh.all_reduce(np.zeros(4))
        mesh.barrier()
    return account.as_dict()


def test_real_worlds(world):
    size = world.size
    cost = round(sent_bytes("all_reduce", 32, size))
    want = {"dp": {"all_reduce": counted(1, 32, cost), "barrier": counted(1, 0, 0)}}
    found = world.run(call_in_a_real_world)
    for counts in found:  # some of these worlds make several hosts of this one
        reduced = counts["dp"]["all_reduce"]
        reduced["inside"] += reduced["between"]
        reduced["between"] = 0
    assert found == [want] * size


def test_sizes_of_all_collectives():
    x, n = np.zeros(10, np.uint8), 4
    whole, blocks = np.zeros(40, np.uint8), [np.zeros(10, np.uint8) for _ in range(n)]
    with dist.dry_run(n, 1):
        mesh = dist.init_device_mesh("cpu", (n,), mesh_dim_names=("x",))
        with mesh.account() as account:
            mesh.all_gather_into_tensor(whole, x)
            mesh.all_gather(blocks, x)
            mesh.reduce_scatter_tensor(x, whole)
            mesh.reduce_scatter(x, blocks)
            mesh.all_to_all_single(whole, whole.copy())
            mesh.all_to_all([b.copy() for b in blocks], blocks)
            mesh.broadcast(x, src=1)
            mesh.reduce(x, dst=0)
            mesh.gather(x, blocks, dst=1)
            mesh.scatter(x, None, src=0)
            mesh.send(x, 0)
            mesh.irecv(x, 0).wait()
            mesh.all_reduce_coalesced([x.copy(), x.copy()])
            mesh.all_reduce_multigpu([x.copy(), x.copy()])
            mesh.all_gather_multigpu([[x.copy() for _ in range(8)] for _ in range(2)], [x.copy(), x.copy()])
            mesh.monitored_barrier()
    assert account.as_dict()["x"] == {
        "all_gather_into_tensor": counted(1, 40, 30),
        "all_gather": counted(1, 40, 30),
        "reduce_scatter_tensor": counted(1, 40, 30),
        "reduce_scatter": counted(1, 40, 30),
        "all_to_all_single": counted(1, 40, 30),
        "all_to_all": counted(1, 40, 30),
        "broadcast": counted(1, 10, 10),
        "reduce": counted(1, 10, 10),
        "gather": counted(1, 40, 0),
        "scatter": counted(1, 10, 0),
        "send": counted(1, 10, 10),
        "irecv": counted(1, 10, 0),
        "all_reduce_coalesced": counted(1, 20, 30),
        "all_reduce_multigpu": counted(1, 10, 15),
        "all_gather_multigpu": counted(1, 80, 60),
        "monitored_barrier": counted(1, 0, 0),
    }


def test_roots_of_gather_and_scatter():
    x, blocks = np.zeros(10, np.uint8), [np.zeros(10, np.uint8) for _ in range(4)]
    with dist.dry_run(4, 0, ranks_per_host=2) as dry:
        dist.gather(x, None, dst=2)
        dist.scatter(x, blocks, src=0)
        dist.all_to_all_single(x, np.zeros(20, np.uint8), [1, 2, 3, 4], [2, 4, 6, 8])
    found = dry.account.as_dict()["group 'world'"]
    assert found["gather"] == counted(1, 10, 0, 10)
    assert found["scatter"] == counted(1, 40, 10, 20)
    assert found["all_to_all_single"] == counted(1, 20, 4, 14)


def test_hosts_of_a_hybrid_mesh():
    with dist.dry_run(64, 9, ranks_per_host=8) as dry:
        mesh = dist.init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp"))
        mesh["tp"].all_reduce(np.zeros(800, np.uint8))
        mesh["dp"].all_reduce(np.zeros(800, np.uint8))
        mesh.all_reduce(np.zeros(640, np.uint8))
    assert dry.account.along(mesh).as_dict() == {
        "tp": {"all_reduce": counted(1, 800, 1400)},
        "dp": {"all_reduce": counted(1, 800, 0, 1400)},
        "dp,tp": {"all_reduce": counted(1, 640, 1120, 140)},
    }
    assert list(dry.account.as_dict()) == ["group 'tp'", "group 'dp'", "group 'world'"]
    total = dry.account.total()
    assert (total.calls, total.nbytes, total.inside, total.between) == (3, 2240, 2520, 1540)


def call_with_objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    with mesh.account() as account:
        mesh.all_gather_object([None] * size, "object")
        mesh.gather_object("object", [None] * size if rank == 1 else None, dst=1)
        mesh.scatter_object_list([None], ["object"] * size if rank == 1 else None, src=1)
        objects = ["object", "another"] if rank == 1 else [None, None]
        mesh.broadcast_object_list(objects, src=1)
        mesh.broadcast_object_list([], src=1)
        if rank == 0:
            mesh.send_object_list(["object"], 1)
            mesh.isend_object_list(["another"], 1).wait()
        if rank == 1:
            received = [None]
            mesh.recv_object_list(received, 0)
            assert received == ["object"]
            assert mesh.irecv_object_list(0).result() == ["another"]
    return account.as_dict()["x"], objects


def test_objects_count_once_with_the_bytes_of_their_pickles(worlds):
    n = len(pickle.dumps("object", pickle.HIGHEST_PROTOCOL))
    sent = sent_later = 256  # short lists are padded
    both = n + len(pickle.dumps("another", pickle.HIGHEST_PROTOCOL))
    (of_0, objects), (of_1, _), (of_2, _) = worlds.world("threads", 3).run(call_with_objects)
    common = {"all_gather_object": counted(1, 3 * n, 2 * n)}
    assert objects == ["object", "another"]
    assert of_0 == {
        **common,
        "gather_object": counted(1, n, n),
        "scatter_object_list": counted(1, n, 0),
        "broadcast_object_list": counted(2, both, both),  # the second of the chain
        "send_object_list": counted(1, sent, sent),
        "isend_object_list": counted(1, sent_later, sent_later),
    }
    assert of_1 == {
        **common,
        "gather_object": counted(1, 3 * n, 0),
        "scatter_object_list": counted(1, 3 * n, 2 * n),
        "broadcast_object_list": counted(2, both, both),
        "recv_object_list": counted(1, sent, 0),
        "irecv_object_list": counted(1, sent_later, 0),
    }
    assert of_2["broadcast_object_list"]["calls"] == 2


def exchange_in_a_ring():
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    x, short, block = np.zeros(10, np.uint8), np.zeros(4, np.uint8), np.zeros((3, 5), np.uint8)
    with mesh.account() as account, dist.profile() as profile:
        mesh.shift(x)
        mesh.shift(x, periodic=False)
        mesh.halo_exchange(block)
        mesh.sendrecv(x if rank == 0 else short, np.zeros(10 if rank == 1 else 4, np.uint8), (rank + 1) % size)
        mesh.isend(x, (rank + 1) % size)
        mesh.irecv(x, (rank - 1) % size).wait()
    return account.as_dict()["x"], [event.name for event in profile.events]


def test_exchanges_count_as_the_call_that_the_user_made_as_in_a_profile(worlds):
    (first, _), (middle, names), (last, _) = worlds.world("threads", 3).run(exchange_in_a_ring)
    messages = {"isend": counted(1, 10, 10), "irecv": counted(1, 10, 0)}
    # At the ends of an axis there is one neighbour: the first rank receives nothing, the last one sends nothing.
    both = counted(2, 20, 20)
    assert first == {"shift": both, "halo_exchange": counted(1, 5, 5), "sendrecv": counted(1, 10, 10), **messages}
    assert middle == {"shift": both, "halo_exchange": counted(1, 10, 10), "sendrecv": counted(1, 10, 4), **messages}
    assert last == {
        "shift": counted(2, 20, 10),
        "halo_exchange": counted(1, 5, 5),
        "sendrecv": counted(1, 4, 4),
        **messages,
    }
    assert sorted(names) == sorted(["shift", "shift", "halo_exchange", "sendrecv", "isend", "irecv"])


def test_objects_of_others_are_no_bytes_in_a_dry_run():
    with dist.dry_run(3, 0):
        (found, objects) = call_with_objects()
    assert objects == [None, None]
    assert found["broadcast_object_list"] == counted(2, 0, 0)
    assert found["send_object_list"]["calls"] == 1


def test_an_account_tells_its_sum_where_it_is_not_printed():
    with dist.dry_run(4) as dry:
        dist.all_reduce(np.zeros(10, np.uint8))
    assert repr(dry.account) == "<Account: 1 call of 10 B; print it for the table>"


def test_calls_that_raise_do_not_count():
    with dist.dry_run(4) as dry:
        for wrong in (None, "text", np.zeros(2)[:, None].T.astype("M8[s]"), np.broadcast_to(np.ones(1), 3)):
            with pytest.raises((TypeError, ValueError)):
                dist.all_reduce(wrong)
        with pytest.raises(ValueError, match="must be a rank in the group"):
            dist.broadcast(np.zeros(1), 9)
        assert dry.account.as_dict() in ({}, {"group 'world'": {}})
        assert dry.account.total().calls == 0


def test_coalesced_calls_count_once():
    with dist.dry_run(4) as dry, dist.coalescing_manager():
        dist.all_reduce(np.zeros(2))
        dist.all_reduce(np.zeros(3))
    assert dry.account.as_dict() == {"group 'world'": {"all_reduce_coalesced": counted(1, 40, 60)}}


def test_accounts_at_once_and_of_slices():
    with dist.dry_run(8):
        mesh = mesh_of_8()
        with mesh.account() as outer:
            with mesh["tp"].account() as inner:
                mesh["tp"].barrier()
                mesh["dp"].barrier()
            mesh["tp"].barrier()
    assert {axis: found["barrier"]["calls"] for axis, found in outer.as_dict().items()} == {"tp": 2, "dp": 1}
    assert list(inner.as_dict()) == ["tp", "group 'dp'"]


def test_axes_without_names_and_any_arrangement():
    with dist.dry_run(6, 3):
        mesh = DeviceMesh("cpu", [[5, 3, 1], [0, 4, 2]])
        with mesh.account() as account:
            mesh.get_group(0).barrier()
            mesh.get_group(1).barrier()
            mesh.barrier()
            dist.barrier()
    assert {axis: found["barrier"]["calls"] for axis, found in account.as_dict().items()} == {
        "axis 0": 1,
        "axis 1": 1,
        "axis 0,1": 2,
    }


def test_axes_of_one_rank():
    with dist.dry_run(4):
        mesh = dist.init_device_mesh("cpu", (1, 4), mesh_dim_names=("pp", "tp"))
        with mesh.account() as account:
            mesh["pp"].all_reduce(np.zeros(1))
            mesh["tp"].all_reduce(np.zeros(1))
            mesh.all_reduce(np.zeros(1))
    found = account.as_dict()
    assert found["pp"]["all_reduce"] == counted(1, 8, 0)
    assert found["tp"]["all_reduce"]["calls"] == 2


def test_a_rank_outside_the_mesh_counts_by_group():
    with dist.dry_run(8, 7):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with mesh["tp"].account() as account:
            dist.barrier()
    assert list(account.as_dict()) == ["group 'world'"]


def test_worlds_after_each_other_in_one_run():
    with dist.dry_run(4) as dry:
        for _ in range(3):
            dist.init_process_group()
            dist.barrier()
            dist.destroy_process_group()
    assert dry.account.total().calls == 3


def test_the_table():
    with dist.dry_run(8):
        mesh = mesh_of_8()
        with mesh.account() as account:
            mesh["tp"].all_reduce(np.zeros(3 << 20, np.uint8))
            mesh.barrier()
    assert str(account).splitlines() == [
        "axis      collective  calls     bytes  min sent inside hosts  min sent between hosts",
        "tp        all_reduce      1  3.00 MiB               3.00 MiB                     0 B",
        "dp,cp,tp  barrier         1       0 B                    0 B                     0 B",
        "all                       2  3.00 MiB               3.00 MiB                     0 B",
    ]


def test_the_chart():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="charts need matplotlib")
    pyplot.switch_backend("agg")
    with dist.dry_run(8, ranks_per_host=2):
        mesh = mesh_of_8()
        with mesh.account() as account:
            mesh["tp"].all_reduce(np.zeros(100, np.uint8))
            mesh["dp"].all_reduce(np.zeros(200, np.uint8))
    ax = account.plot()
    inside, between = ax.containers
    assert [bar.get_height() for bar in inside] == [100, 0]
    assert [bar.get_height() for bar in between] == [0, 200]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["tp", "dp"]
    assert ax.get_ylabel() == "min sent by this rank"
    assert ax.yaxis.get_major_formatter()(200, 0) == "200 B"  # as the label of the bar
    assert account.plot(ax) is ax
    pyplot.close(ax.figure)


def test_the_chart_can_be_read():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="charts need matplotlib")
    pyplot.switch_backend("agg")
    with dist.dry_run(8, ranks_per_host=2):
        mesh = mesh_of_8()
        with mesh.account() as account:
            mesh["tp"].all_reduce(np.zeros(7 << 20, np.uint8))
            mesh["dp"].all_reduce(np.zeros(775, np.uint8))
    ax = account.plot()
    ax.figure.canvas.draw()
    ticks = [label.get_text() for label in ax.get_yticklabels()]
    assert [tick for tick in ticks if not tick.startswith("-")][:4] == ["0", "2 MiB", "4 MiB", "6 MiB"]
    assert {"7.00 MiB", "775 B"} <= {text.get_text() for text in ax.texts}
    assert ax.get_ylim()[1] > 7.5 * (1 << 20)
    frame = ax.figure.bbox
    assert all(label.get_window_extent().x0 >= frame.x0 for label in [*ax.get_yticklabels(), ax.yaxis.label])
    pyplot.close(ax.figure)


def test_a_notebook_shows_a_table():
    with dist.dry_run(8):
        mesh = dist.init_device_mesh("cpu", (8,), mesh_dim_names=("<x>",))
        with mesh.account() as account:
            mesh.all_reduce(np.zeros(1000, np.uint8))
    html = account._repr_html_()
    assert html.count("<tr") == 3
    assert ">&lt;x&gt;<" in html
    assert ">1750 B<" in html
    assert mesh._repr_html_() == mesh.show("html")


def test_a_chart_without_matplotlib(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    with dist.dry_run(2) as dry:
        monkeypatch.setattr(builtins, "__import__", missing)
        with pytest.raises(ImportError, match="pip install matplotlib"):
            dry.account.plot()


def test_every_collective_has_a_cost():
    collectives = {name for name, value in vars(CollectiveMethods).items() if isinstance(value, Collective)}
    assert collectives < set(functions())
    for name in functions():
        assert sent_bytes(name, 8, 2) >= 0
