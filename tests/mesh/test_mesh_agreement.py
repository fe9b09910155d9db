"""Meshes that differ between ranks: an error on every rank, found with one request to the store of each."""

import threading

import numpy as np
import pytest
from worlds import needs_linux, report, worker_rank

import meshdist
from meshdist.device_mesh import DeviceMesh, init_device_mesh

SHORT_S = 20.0


class CountingStore(meshdist.TCPStore):
    """Counts the requests that go over the connection."""

    requests = 0

    def _request(self, *args, **kwargs):
        self.requests += 1
        return super()._request(*args, **kwargs)


def mesh_with_all_groups(port, size):
    store = CountingStore("127.0.0.1", port, is_master=False)
    meshdist.init_process_group("gloo", store=store, rank=worker_rank(), world_size=size)
    before = store.requests
    mesh = init_device_mesh("cpu", (2, 2, size // 4), mesh_dim_names=("pp", "dp", "tp"))
    mesh.get_all_groups()
    for first, second in (("pp", "dp"), ("pp", "tp"), ("dp", "tp")):
        mesh[first, second].flatten().get_group()
    made = store.requests - before
    total = mesh["pp", "tp"].flatten().all_reduce(np.array([mesh.get_rank()])).item()
    meshdist.destroy_process_group()
    return made, total


@needs_linux
def test_a_mesh_with_all_groups_is_one_request_of_each_rank(worlds):
    from worlds import WorkerSet

    with (
        meshdist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store,
        WorkerSet(worlds.nursery, 8) as workers,
    ):
        workers.start(mesh_with_all_groups, store.port, 8)
        made = workers.gather()
    assert [count for count, _ in made] == [1] * 8
    assert [total for _, total in made] == [10, 10, 18, 18, 10, 10, 18, 18]


DIFFERENT = [
    pytest.param(lambda: init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), r"(dp=4)", id="shape"),
    pytest.param(lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), "(dp=2, pp=2)", id="names"),
    pytest.param(lambda: init_device_mesh("cpu", (2, 2)), "(2, 2)", id="no names"),
    pytest.param(
        lambda: DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp")), "ranks 0, 2, 1, 3", id="order"
    ),
    pytest.param(
        lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"tp": "threads"}),
        "backends None, threads",
        id="backends",
    ),
]


def agreed():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def refused(make):
    with pytest.raises(ValueError, match="DeviceMesh: the ranks' meshes differ: ") as error:
        make()
    return str(error.value)


def failing_first_calls(mesh):
    """Call a mesh and all its groups; return what the first was told."""
    with pytest.raises(meshdist.DistBackendError) as error:
        mesh.get_group(1).all_reduce(np.ones(1))
    for call in (mesh.get_group(0).barrier, lambda: mesh.barrier(), lambda: mesh.flatten().barrier()):
        with pytest.raises(meshdist.DistBackendError, match="the ranks' meshes differ: "):
            call()
    return str(error.value)


@pytest.mark.parametrize(("make", "words"), DIFFERENT)
def test_every_rank_fails_where_the_last_made_another(make, words):
    made = [threading.Event() for _ in range(4)]

    def program():
        rank = meshdist.get_rank()
        if rank == 3:
            assert all(event.wait(30) for event in made[:3])
            reports = refused(make)
            made[3].set()
            return reports
        mesh = agreed()
        made[rank].set()
        assert made[3].wait(30)
        return failing_first_calls(mesh)

    check_sentences(meshdist.run(program, 4, timeout=SHORT_S), 3, words)


@pytest.mark.parametrize(("make", "words"), DIFFERENT)
def test_every_rank_fails_where_the_first_made_another(make, words):
    made = [threading.Event() for _ in range(4)]

    def program():
        rank = meshdist.get_rank()
        if rank == 0:
            mesh = make()
            made[0].set()
            assert all(event.wait(30) for event in made)
            return failing_first_calls(
                mesh.flatten().unflatten(0, (2, 2), *([("a", "b")] if mesh.mesh_dim_names else []))
            )
        assert made[0].wait(30)
        reports = refused(agreed)
        made[rank].set()
        return reports

    check_sentences(meshdist.run(program, 4, timeout=SHORT_S), 0, words)


def check_sentences(reports, odd, words):
    for sentence in reports:
        assert f"rank {odd} created DeviceMesh('cpu', " in sentence
        assert words in sentence
        assert "(dp=2, tp=2)" in sentence
        assert sentence.endswith("pass group= for a mesh that only some ranks create")


def test_ranks_that_wait_already_learn_it():
    asleep = threading.Event()

    def program():
        if meshdist.get_rank() == 1:
            assert asleep.wait(30)
            with pytest.raises(ValueError, match="the ranks' meshes differ"):
                init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
            return ""
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        group = mesh.get_group()
        asleep.set()
        with pytest.raises(meshdist.DistBackendError) as error:
            group.all_reduce(np.ones(1))
        return str(error.value)

    assert "(dp=1, tp=2)" in meshdist.run(program, 2, timeout=SHORT_S)[0]


def one_differs():
    """On a process: rank 3 makes another mesh while the others may wait for it; all say what they were told."""
    rank = meshdist.get_rank()
    report("begins")
    try:
        mesh = init_device_mesh("cpu", (2, 2) if rank < 3 else (4, 1), mesh_dim_names=("dp", "tp"))
        mesh["dp"].all_reduce(np.ones(1))
        mesh["tp"].all_reduce(np.ones(1))
        mesh.all_reduce(np.ones(1))
    except (ValueError, meshdist.DistError) as error:
        return str(error)
    return "nothing"


@needs_linux
@pytest.mark.parametrize("late", [False, True])
def test_every_process_fails_where_one_made_another(worlds, late):
    from worlds import WorkerSet

    with WorkerSet(worlds.nursery, 4) as workers:
        workers.join()
        workers.start(one_differs, ranks=[0, 1, 2])
        for rank in range(3):
            workers.reported(rank)
        if late:
            workers.until_asleep(1)  # in its first call with rank 3
        workers.start(one_differs, ranks=[3])
        workers.reported(3)
        reports = [workers.outcome(rank, SHORT_S) for rank in range(4)]
    for sentence in reports:
        assert "(dp=2, tp=2)" in sentence or "the group is broken" in sentence or ") failed" in sentence
    assert "(dp=4, tp=1)" in reports[3]
    assert "(dp=4, tp=1)" in reports[1]


def test_a_refusal_on_one_rank_reaches_the_others():
    refused = threading.Event()

    def program():
        if meshdist.get_rank() == 1:
            with pytest.raises(ValueError, match="a name can be used only once"):
                init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "tp"))
            refused.set()
            return
        assert refused.wait(30)
        with pytest.raises(
            ValueError,
            match="global rank 1 raised an error for its mesh .*a name can be used only once.*, global rank 0 created",
        ):
            init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    meshdist.run(program, 2, timeout=SHORT_S)


def test_a_refusal_on_all_ranks_is_none_of_the_next_meshs_business():
    def program():
        for _ in range(2):
            with pytest.raises(ValueError, match="a name can be used only once"):
                init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "tp"))
            assert init_device_mesh("cpu", (2,)).all_reduce(np.ones(1)).item() == 2

    meshdist.run(program, 2)


def test_many_meshes_that_agree():
    def program():
        for count in range(20):
            ranks = np.random.default_rng(count).permutation(4).reshape(2, 2)
            mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
            assert mesh["tp"].all_reduce(np.array([mesh.get_rank()])).item() == mesh["tp"].mesh.sum()

    meshdist.run(program, 4)


def test_a_difference_that_the_words_do_not_show():
    def program():
        ranks = [*range(0, 16, 2), *range(1, 16, 2)]
        if meshdist.get_rank() == 15:
            ranks[13], ranks[14] = ranks[14], ranks[13]
        try:
            DeviceMesh("cpu", ranks)
        except ValueError as error:
            return str(error)
        return None

    reports = [words for words in meshdist.run(program, 16) if words]
    assert reports
    for words in reports:
        assert words.count("and so on, 16 in all) [") == 2


@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("mine", [("b",), ("a", "b")])
def test_meshes_of_given_groups_that_differ(connected, mine):
    made, refused = ([threading.Event() for _ in range(2)] for _ in range(2))

    def program():
        row, place = divmod(meshdist.get_rank(), 2)
        pair = meshdist.new_group([2 * row, 2 * row + 1])
        if connected:
            pair.barrier()
        if place == 1:
            assert made[row].wait(30)
            with pytest.raises(ValueError, match="the ranks' meshes differ: |expected 1 name,"):
                DeviceMesh.from_group(pair, "cpu", mesh_dim_names=mine)
            refused[row].set()
            return
        mesh = DeviceMesh.from_group(pair, "cpu", mesh_dim_names=("a",))
        made[row].set()
        assert refused[row].wait(30)
        for call in (lambda: mesh.all_reduce(np.ones(1)), pair.barrier, mesh["a"].barrier):
            with pytest.raises(meshdist.DistBackendError, match=r"the ranks' meshes differ: .*\(a=2\)"):
                call()

    meshdist.run(program, 4, timeout=SHORT_S)


def test_rows_that_were_given_as_groups_and_differ():
    made, refused = threading.Event(), threading.Event()

    def program():
        rank = meshdist.get_rank()
        columns, _ = meshdist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        rows, _ = meshdist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        rows.barrier()
        ranks = [[0, 1], [2, 3]]
        if rank == 3:
            assert made.wait(30)
            with pytest.raises(ValueError, match="expected 2 names"):
                DeviceMesh.from_group([columns, rows], "cpu", ranks, ("dp",))
            refused.set()
            return
        mesh = DeviceMesh.from_group([columns, rows], "cpu", ranks, ("dp", "tp"))
        if rank == 2:
            made.set()
        assert refused.wait(30)
        for axis in ("tp", "dp"):
            with pytest.raises(meshdist.DistBackendError, match="rank 3 raised an error for its mesh "):
                mesh[axis].barrier()

    meshdist.run(program, 4, timeout=SHORT_S)


def uses_the_world():
    for _ in range(3):
        meshdist.all_reduce(np.ones(1))


def makes_a_mesh_of_the_world():
    return DeviceMesh("cpu", [0, 1, 2]).get_group() is meshdist.group.WORLD


def makes_another():
    return refused(lambda: DeviceMesh("cpu", [0, 2, 1]))


def calls_twice():
    reports = []
    report("begins")
    for _ in range(2):
        try:
            meshdist.all_reduce(np.ones(1))
        except meshdist.DistError as error:
            reports.append(str(error))
    return reports


@needs_linux
def test_a_group_that_was_connected_before_the_mesh(worlds):
    """The next call looks for the note, whichever way it is made, and tells the rank that waits in it already."""
    from worlds import WorkerSet

    with WorkerSet(worlds.nursery, 3) as workers:
        workers.join()
        workers.start(uses_the_world)
        workers.gather()
        workers.start(makes_a_mesh_of_the_world, ranks=[0, 1])
        assert [workers.outcome(rank, SHORT_S) for rank in (0, 1)] == [True, True]
        workers.start(calls_twice, ranks=[0])
        workers.reported(0)
        workers.until_asleep(0)
        workers.start(makes_another, ranks=[2])
        workers.outcome(2, SHORT_S)
        workers.start(calls_twice, ranks=[1])
        workers.reported(1)
        for rank in (1, 0):
            reports = workers.outcome(rank, SHORT_S)
            assert len(reports) == 2
            assert all("the ranks' meshes differ: " in words for words in reports)
