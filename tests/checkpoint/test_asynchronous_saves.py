"""Asynchronous saves: the program goes on, and hears of errors at its next call."""

import os
import threading
import weakref

import numpy as np
import pytest
from checkpoint_trees import mesh_of
from worlds import WorkerSet, needs_linux

import meshdist
from meshdist.checkpoint import latest, load, save
from meshdist.tensor import Partial, Replicate, Shard, distribute_tensor


def train(directory, steps):
    mesh = meshdist.init_device_mesh("cpu", (meshdist.get_world_size(),), mesh_dim_names=("dp",))
    w = distribute_tensor(np.zeros((60, 50)), mesh, [Shard(1)], src_data_rank=None)
    b = np.zeros(4)
    found = []
    for step in range(steps):
        w.to_local()[...] = step
        b[...] = step
        pending = save(directory, {"w": w, "b": b}, step=step, asynchronous=True)
        w.to_local()[...] = b[...] = -1  # what is saved was copied
        meshdist.all_reduce(np.ones(3))  # calls of the program go on meanwhile
        found.append(pending)
    assert found[-1].wait() == found[-1].path
    assert all(pending.done() for pending in found)
    return [(set(x["w"].reshape(-1).tolist()), x["b"].tolist()) for x in (load(one.path) for one in found)]


@pytest.mark.parametrize("backend", ["threads", pytest.param("gloo", marks=needs_linux)])
def test_what_is_saved_is_what_was_there_at_the_call(worlds, tmp_path, backend):
    expected = [({float(step)}, [step] * 4) for step in range(3)]
    assert worlds.world(backend, 2).run(train, str(tmp_path), 3) == [expected] * 2


class Gate:
    """Holds what is written until it is opened."""

    def __init__(self, monkeypatch):
        self.opened, real = threading.Event(), os.posix_fallocate

        def posix_fallocate(*args):
            assert self.opened.wait(20)
            real(*args)

        monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)


def test_only_one_save_is_under_way(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)

    def program():
        first = save(tmp_path, {"n": np.ones(1)}, step=1, asynchronous=True)
        under_way = not first.done(), repr(first).endswith("under way>")
        assert not (tmp_path / "step-1").exists()
        gate.opened.set()
        save(tmp_path, {"n": np.ones(1)}, step=2)
        return *under_way, first.done(), (tmp_path / "step-1").exists()

    assert meshdist.run(program, 1) == [(True, True, True, True)]


def test_a_load_waits_for_the_save_before_it(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)

    class PathThatOpens(type(tmp_path)):
        """Opens the gate as soon as `load` looks at it."""

        def __str__(self):
            gate.opened.set()
            return super().__str__()

    def program():
        save(tmp_path, {"n": np.ones(1)}, step=1, asynchronous=True)
        assert not latest(tmp_path)
        return load(PathThatOpens(tmp_path))["n"].tolist()

    assert meshdist.run(program, 1) == [[1.0]]


def test_an_error_is_raised_at_the_next_call_on_all_ranks(tmp_path):
    def program():
        save(tmp_path, {}, step=1)
        asks = (
            lambda pending: save(tmp_path, {}, step=7),
            lambda pending: load(tmp_path),
            lambda pending: pending.wait(),
        )
        for ask in asks:
            pending = save(tmp_path, {}, step=1, asynchronous=True)
            for again in (ask, lambda pending: pending.wait(), lambda pending: pending.wait()):
                with pytest.raises(FileExistsError, match=r"asynchronous save to .* \(rank 0 of 2\): .*step-1 exists"):
                    again(pending)
                assert repr(pending).endswith("step-1: failed>")
        save(tmp_path, {"n": 1}, step=2)  # told once
        return load(tmp_path)

    assert meshdist.run(program, 2) == [{"n": 1}] * 2


def test_the_end_of_the_world_waits_for_the_last_save(tmp_path):
    def program():
        save(tmp_path, {"w": np.arange(5)}, step=1, asynchronous=True)

    meshdist.run(program, 2)
    assert load(tmp_path)["w"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("raising", [[0], [1], [0, 1]])
def test_a_save_is_completed_though_the_program_raises(tmp_path, monkeypatch, raising):
    gate = Gate(monkeypatch)

    def program():
        save(tmp_path, {"w": np.arange(5)}, step=1, asynchronous=True)
        gate.opened.set()
        if meshdist.get_rank() in raising:
            raise KeyError("mine")
        meshdist.barrier()

    with pytest.raises(KeyError, match="mine"):
        meshdist.run(program, 2)
    assert load(tmp_path)["w"].tolist() == [0, 1, 2, 3, 4]


def fail_to_save(directory):
    save(directory, {}, step=1)
    return save(directory, {}, step=1, asynchronous=True)


@pytest.mark.parametrize("destroys", [False, True])
def test_an_error_that_nobody_asks_for_is_raised_at_the_end(tmp_path, destroys):
    def program():
        fail_to_save(tmp_path)
        if destroys:
            with pytest.raises(FileExistsError, match="asynchronous save to .*step-1 exists already"):
                meshdist.destroy_process_group()
            assert not meshdist.is_initialized()
            raise KeyError("the program goes on")

    with pytest.raises(KeyError if destroys else FileExistsError, match="the program goes on|step-1 exists already"):
        meshdist.run(program, 1)


def test_an_error_of_the_program_is_not_replaced_by_that_of_a_save(tmp_path, caplog):
    def program():
        fail_to_save(tmp_path)
        try:
            raise KeyError("mine")
        finally:
            meshdist.destroy_process_group()

    with pytest.raises(KeyError, match="mine"):
        meshdist.run(program, 1)
    assert "failed as this rank left: asynchronous save to" in caplog.text


def test_all_saves_are_waited_for_if_one_has_failed(tmp_path):
    def program():
        other = meshdist.new_group([0])
        fail_to_save(tmp_path / "a")
        save(tmp_path / "b", {"w": np.arange(5)}, step=1, asynchronous=True, group=other)

    with pytest.raises(FileExistsError):
        meshdist.run(program, 1)
    assert load(tmp_path / "b")["w"].tolist() == [0, 1, 2, 3, 4]


def fail_and_shrink(directory):
    pending = fail_to_save(directory)
    ends = (FileExistsError, ValueError, meshdist.DistError)  # whichever comes first
    if meshdist.get_rank() == 0:
        meshdist.shrink_group([1])
        with pytest.raises(ends, match=r"step-1 exists already|the world was shrunk|was destroyed|rank 1 "):
            meshdist.destroy_process_group()
    else:
        with pytest.raises(ends):
            pending.wait()


@needs_linux
def test_an_error_is_raised_at_the_end_though_the_world_was_shrunk(worlds, tmp_path):
    with WorkerSet(worlds.nursery, 2) as workers:
        workers.join()
        workers.start(fail_and_shrink, tmp_path)
        assert [workers.outcome(rank) for rank in range(2)] == [None, None]


def test_memory_is_used_again(tmp_path):
    def program():
        x = np.zeros((3, 1000))
        for step in range(3):
            x[...] = step
            save(tmp_path, {"x": x.T, "y": np.float32(step)}, step=step, asynchronous=True)
        save(tmp_path, {"z": np.ones(9)}, step=9, asynchronous=True).wait()
        return [(set(load(tmp_path / f"step-{n}")["x"].reshape(-1).tolist())) for n in range(3)]

    assert meshdist.run(program, 2) == [[{0.0}, {1.0}, {2.0}]] * 2


def arrays_of_many_runs(mesh, step):
    """Return arrays that are written as rows: columns, columns of columns, replicas of columns, and pending ones."""
    placements = [
        {"a": Shard(1)},
        {"b": Shard(1)},
        {"a": Shard(1), "b": Shard(1)},
        {"a": Shard(1, (1, 5)), "b": Shard(0)},
        {"a": Partial(), "b": Shard(1)},
    ]
    dtypes = ["float32", "float64", "complex128", "int8", "float64"]
    return {
        f"x{n}": distribute_tensor(
            (np.arange(601 * 6).reshape(601, 6) % 100 + step).astype(dtype), mesh, placed, src_data_rank=None
        )
        for n, (placed, dtype) in enumerate(zip(placements, dtypes, strict=True))
    }


@pytest.mark.parametrize("format", ["safetensors", "zarr"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_blocks_become_rows_on_every_mesh_and_for_every_save(tmp_path, format, asynchronous):
    if format == "zarr":
        pytest.importorskip("zarr", minversion="3", reason="zarr 3 is not installed")

    def program():
        mesh = mesh_of((2, 2))
        stage = mesh["a"].get_local_rank()
        for step in range(3):
            inner = distribute_tensor(np.full((400, 2), stage + step), mesh["b"], [Shard(1)], src_data_rank=None)
            tree = {"all": arrays_of_many_runs(mesh, step), f"stage{stage}": {"w": inner, "loss": stage + step}}
            # Of both stages, with one row more on the first rank of each: one stage writes them.
            numbers = np.arange(601 * 6).reshape(601, 6) + step
            tree["both"] = both = distribute_tensor(numbers, mesh["b"], [Shard(1)], src_data_rank=None)
            expected = {name: x.full().tolist() for name, x in tree["all"].items()}
            pending = save(tmp_path, tree, step=step, asynchronous=asynchronous, format=format)
            for x in (*tree["all"].values(), inner, both):
                x.to_local()[...] = 0
            if asynchronous:
                pending.wait()
            found = load(tmp_path / f"step-{step}")
            assert {name: x.tolist() for name, x in found["all"].items()} == expected
            assert np.array_equal(found["both"], numbers)
            for other in (0, 1):
                assert np.array_equal(found[f"stage{other}"]["w"], np.full((400, 2), other + step))
                assert found[f"stage{other}"]["loss"] == other + step

    meshdist.run(program, 4)


def calls_of(directory, placements):
    w = distribute_tensor(np.zeros((4000, 60)), mesh_of((2, 2)), placements, src_data_rank=None)
    tree = {"w": w, "b": np.zeros(1000)}
    save(directory, tree, step=0, asynchronous=True).wait()
    with meshdist.profile() as profile:
        pending = save(directory, tree, step=1, asynchronous=True)
        pending.wait()
    return [event.name for event in profile.events if event.group != "checkpoint"]


@pytest.mark.parametrize("placements", [[Replicate(), Shard(0)], [Replicate(), Shard(1)], [Shard(1), Shard(1)]])
def test_a_save_of_the_same_arrays_makes_one_exchange_before_it_returns(tmp_path, placements):
    """Replicas are compared in it. All others are behind the program, on a group of their own."""
    one_exchange = ["all_gather_object (sizes)", "all_gather_object"]
    assert meshdist.run(calls_of, 4, args=(tmp_path, placements)) == [one_exchange] * 4


@pytest.mark.parametrize("is_first", [True, False])
def test_what_cannot_be_saved_is_raised_at_once_on_all_ranks(tmp_path, is_first):
    def program():
        if not is_first:
            save(tmp_path, {"w": np.ones(3)}, step=0, asynchronous=True)
        wrong = {"w": object() if meshdist.get_rank() == 1 else np.ones(3)}
        with pytest.raises(TypeError, match=r"rank 1 of 2\): tree\['w'\]: expected arrays, .* got object"):
            save(tmp_path, wrong, step=1, asynchronous=True)
        save(tmp_path, {"w": np.full(3, 2.0)}, step=2, asynchronous=True).wait()
        return load(tmp_path)["w"].tolist()

    assert meshdist.run(program, 2) == [[2, 2, 2]] * 2


def test_arrays_are_not_kept_while_they_are_written(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)

    def program():
        rows, columns = np.ones((3, 4)), np.ones((4000, 6))
        tree = {
            "rows": distribute_tensor(rows, mesh_of((2,)), [Shard(0)], src_data_rank=None),
            "columns": distribute_tensor(columns, mesh_of((2,)), [Shard(1)], src_data_rank=None),
            "plain": np.ones(5),
        }
        kept = [weakref.ref(x.to_local() if x is not tree["plain"] else x) for x in tree.values()]
        pending = save(tmp_path, tree, asynchronous=True)
        tree.clear()
        del rows, columns
        found = [ref() is None for ref in kept]
        meshdist.barrier()
        gate.opened.set()
        pending.wait()
        return found

    assert meshdist.run(program, 2) == [[True] * 3] * 2
