"""Calls that were made before: the core makes them without Python, and as Python makes them."""

import gc
import sys
import threading
import traceback
import weakref
from functools import partial

import numpy as np
import pytest
from python_calls import fewest_functions, python_functions

import meshdist as dist
from meshdist import core
from meshdist.runtime.context import current_slot

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(core.module is None, reason=f"there is no compiled core: {core.missing}"),
]


@pytest.fixture
def pair(worlds):
    return worlds.world("gloo", 2)


def are_made_without_python(name, times):
    rank, size = dist.get_rank(), dist.get_world_size()
    x, many = np.ones(3), np.ones(3 * size)
    lists = [np.zeros(3) for _ in range(size)], [np.ones(3) for _ in range(size)]
    group, mesh = dist.new_group(), dist.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    axis = mesh["dp"]
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "keywords": lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group),
        "method": lambda: group.all_reduce(x),
        "mesh as group": lambda: dist.all_reduce(x, group=axis),
        "mesh": lambda: axis.all_reduce(x, "sum"),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced(lists[1]),
        "broadcast": lambda: dist.broadcast(x, src=1),
        "rooted method": lambda: group.reduce(x, dst=1),
        "all_gather": lambda: dist.all_gather(lists[0], x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(many, x),
        "reduce_scatter": lambda: dist.reduce_scatter(x, lists[1]),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, many),
        "scatter": lambda: dist.scatter(x, lists[1] if rank == 0 else None, src=0),
        "gather": lambda: dist.gather(x, lists[0] if rank == 0 else None, dst=0),
        "all_to_all_single": lambda: dist.all_to_all_single(many, np.ones(3 * size)),
        "split sizes": lambda: dist.all_to_all_single(many, np.ones(3 * size), [3] * size, [3] * size),
        "all_to_all": lambda: dist.all_to_all(*lists),
        "scan": lambda: dist.scan(x),
        "exscan": lambda: dist.exscan(x),
        "barrier": lambda: dist.barrier(),
        "send and recv": lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0),
    }
    for _ in range(times):
        calls[name]()
    return python_functions(calls[name])


KINDS = ["all_reduce", "keywords", "method", "mesh", "mesh as group", "broadcast", "rooted method", "all_gather"]
KINDS += ["all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "scatter", "gather", "all_to_all_single"]
KINDS += ["split sizes", "all_to_all", "scan", "exscan", "barrier", "all_reduce_coalesced"]
# On the way of a call that Python makes. A wait for a peer that is late, and the bell for one that sleeps, are Python.
BY_PYTHON = {"submit", "_submit_prepared", "run", "steps", "put", "take"}


@pytest.mark.parametrize("name", KINDS)
def test_a_call_that_was_made_before_runs_no_python(pair, name):
    for functions in pair.run(are_made_without_python, name, 4):
        assert BY_PYTHON.isdisjoint(functions)


def sizes_of_others_change(has_lists):
    """Ranks 1 and 2 exchange other sizes now and then; what rank 0 sends and receives stays."""
    rank = dist.get_rank()
    wrong, handed_over = [], 0

    def exchange(take, give, into, sizes):
        if has_lists:
            dist.all_to_all(take, give)
        else:
            dist.all_to_all_single(into, np.concatenate(give), *sizes)

    for turn, count in enumerate([*4 * [2, 2, 3, 3, 200_000, 200_000, 2, 2, 2, 200_000, 3], *[3] * 4]):

        def size(one, other, between=count):
            return 1 if 0 in (one, other) or one == other else between

        give = [np.full(size(rank, peer), 10.0 * rank + peer + turn) for peer in range(3)]
        take = [np.zeros(size(peer, rank)) for peer in range(3)]
        into, sizes = np.concatenate(take), [[x.size for x in side] for side in (take, give)]
        functions = python_functions(partial(exchange, take, give, into, sizes))
        if not has_lists:
            take = np.split(into, np.cumsum(sizes[0])[:-1])
        wrong += [turn for peer in range(3) if (take[peer] != 10.0 * peer + rank + turn).any()]
        handed_over += "go_on" in functions and "submit" not in functions
    return wrong, handed_over, BY_PYTHON & set(functions)


@pytest.mark.parametrize("has_lists", [True, False])
def test_sizes_that_change_between_other_ranks(worlds, has_lists):
    results = worlds.world("gloo", 3).run(sizes_of_others_change, has_lists)
    assert [wrong for wrong, *_ in results] == [[]] * 3
    assert results[0][1] >= 4  # the core began the call, and Python went on
    assert [by_python for *_, by_python in results] == [set()] * 3


def swap_at_once(times):
    group = dist.new_group()
    mine, theirs = np.ones(3), np.zeros(3)

    def swap():
        works = [group.irecv(theirs, 1 - group.rank()), group.isend(mine, 1 - group.rank())]
        for work in works:
            work.wait()

    for _ in range(times):
        swap()
    return ["_begin" in python_functions(swap) for _ in range(30)]


def test_messages_both_ways_need_no_requests_though_the_first_receive_came_before_any_message(pair):
    # A receive gets a request if its peer is late.
    assert all(False in with_requests for with_requests in pair.run(swap_at_once, 4))


def test_messages_run_no_python(pair):
    # A receive goes through Python if its message has not come yet.
    assert "send" not in pair.run(are_made_without_python, "send and recv", 6)[0]


def are_learned_once():
    """Receive with another receive outstanding, which Python has to do, more often than a function keeps calls."""
    rank = dist.get_rank()
    rare, often, other = np.ones(5), np.ones(3), np.ones(2)

    def receive(x):
        dist.recv(x, 0)

    for _ in range(4):
        dist.send(rare, 1) if rank == 0 else receive(rare)
        dist.send(other, 1) if rank == 0 else dist.irecv(other, 0).wait()
    for _ in range(40):
        if rank == 0:
            dist.send(other, 1)
            dist.send(often, 1)
        else:
            work = dist.irecv(other, 0)
            receive(often)
            work.wait()
    dist.barrier()
    if rank == 0:
        dist.send(rare, 1)
    dist.barrier()
    return python_functions(lambda: None if rank == 0 else receive(rare))


def test_known_calls_that_python_makes_do_not_drive_out_others(pair):
    # A sender that sleeps meanwhile is woken by Python.
    assert all("recv" not in functions for functions in pair.run(are_learned_once))


def are_right_whatever_changes():
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2
    for _ in range(3):
        for shape in ((), (1,), (3,), (2, 2), (0,), (40_000,)):
            for dtype in ("float32", "float64", "int16", "float16", "bool", "complex64"):
                for op, wanted in (("sum", total), (dist.ReduceOp.MAX, size)):
                    if dtype == "complex64" and op != "sum":
                        continue
                    x = np.full(shape, rank + 1, dtype)
                    assert dist.all_reduce(x, op) is x
                    assert (x == np.full(shape, wanted).astype(dtype)).all(), (shape, dtype, op, x)
    return True


def test_results_are_right_whatever_changes_between_calls(pair):
    assert all(pair.run(are_right_whatever_changes))


def async_calls(times):
    rank = dist.get_rank()
    x, y = np.ones(3), np.zeros(3)
    begin = {
        "all_reduce": lambda: dist.all_reduce(x, async_op=True),
        "broadcast": lambda: dist.broadcast(x, src=0, async_op=True),
        "barrier": lambda: dist.barrier(async_op=True),
        "isend": lambda: dist.isend(x, 1 - rank),
        "irecv": lambda: dist.irecv(y, 1 - rank),
    }
    for _ in range(times):
        for work in [call() for call in begin.values()]:
            work.wait()
    works = []
    seen = {name: python_functions(lambda call=call: works.append(call())) for name, call in begin.items()}
    for work in works:
        work.wait()
    return seen


def test_async_calls_that_were_made_before_begin_without_python(pair):
    # But for the lambdas; and the progress thread learns of a queue that was empty.
    for seen in pair.run(async_calls, 4):
        for name, functions in seen.items():
            assert {"submit", "_enqueue", "irecv", "isend", "_defer", "_begin"}.isdisjoint(functions), (name, functions)


def with_arrays_of_all_kinds():
    rank, size = dist.get_rank(), dist.get_world_size()
    out, x = np.zeros(2 * size), np.full(2, rank + 1.0)
    gathered = [value for peer in range(size) for value in (peer + 1.0, peer + 1.0)]
    lists = [np.zeros(2) for _ in range(size)]
    for _ in range(4):
        dist.all_gather_into_tensor(out, x)
        dist.all_gather(lists, x)
        assert out.tolist() == gathered
    columns = np.zeros((2 * size, 2))[:, 0]
    dist.all_gather_into_tensor(columns, x)  # not contiguous
    assert columns.tolist() == gathered
    own = out[2 * rank : 2 * rank + 2]
    own[:] = rank + 1
    dist.all_gather_into_tensor(out, own)  # the input within the output
    assert out.tolist() == gathered
    swapped = np.zeros(2 * size, ">f8")
    dist.all_gather_into_tensor(swapped, x.astype(">f8"))
    assert swapped.tolist() == gathered
    frozen = np.zeros(2 * size)
    frozen.flags.writeable = False
    for wrong, kind in ((frozen, ValueError), (np.zeros(2 * size + 1), ValueError), (out.tolist(), TypeError)):
        with pytest.raises(kind):
            dist.all_gather_into_tensor(wrong, x)
    with pytest.raises(ValueError, match="share memory"):
        dist.all_gather([lists[0]] * size, x)
    dist.all_gather(lists, x)
    assert np.concatenate(lists).tolist() == gathered


def test_arrays_of_all_kinds_are_treated_as_before(pair):
    pair.run(with_arrays_of_all_kinds)


def are_recorded():
    x = np.zeros(1)
    with dist.new_group() as group:
        for _ in range(5):
            group.all_reduce(x)
        dist.flight_recorder()
        group.all_reduce(x)
        line = sys._getframe().f_lineno - 1
        records = [record for record in dist.flight_recorder()["records"] if record["group"] == group.name]
        assert [record["sequence"] for record in records] == [1, 2, 3, 4, 5, 6]
        assert group.num_calls == 6
        assert records[-1]["site"] == f"{__file__}:{line}"
        assert records[-1]["text"] == "all_reduce(float64[1], op=sum)"
        assert {record["state"] for record in records} == {"completed"}
        assert all(record["created_s"] <= record["started_s"] <= record["completed_s"] for record in records)


def test_known_calls_are_recorded(pair):
    pair.run(are_recorded)


def are_seen_by_hooks():
    x = np.zeros(1)
    for _ in range(4):
        dist.all_reduce(x)
    with dist.profile() as profile:
        dist.all_reduce(x)
        dist.all_reduce(x)
    return len(profile.events)


def test_hooks_see_known_calls(pair):
    assert pair.run(are_seen_by_hooks) == [2, 2]


def keep_their_order():
    rank = dist.get_rank()
    x = np.zeros(1)
    for _ in range(4):
        dist.all_reduce(x)
    outstanding = [np.full(1, float(number + rank)) for number in range(50)]
    works = [dist.all_reduce(y, async_op=True) for y in outstanding]
    x[:] = 1
    dist.all_reduce(x)
    assert x[0] == 2
    for work in works:
        work.wait()
    return [y[0] for y in outstanding] == [2.0 * number + 1 for number in range(50)]


def test_known_calls_come_after_outstanding_ones(pair):
    assert all(pair.run(keep_their_order))


def keep_nothing_of_a_group():
    x = np.ones(1)
    group = dist.new_group()
    for _ in range(4):
        group.all_reduce(x)
        dist.all_reduce(x, group=group)
    backend = weakref.ref(group.usable_backend("", x))
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="has been destroyed"):
        dist.all_reduce(x, group=group)
    with pytest.raises(ValueError, match="has been destroyed"):
        group.all_reduce(x)
    del group
    gc.collect()
    return backend() is None


def test_nothing_is_kept_of_a_group_that_ended(pair):
    assert all(pair.run(keep_nothing_of_a_group))


def fail(kind):
    rank = dist.get_rank()
    group, x = dist.new_group(), np.ones(1)
    for _ in range(4):
        group.all_reduce(x)
    if kind == "another call":
        with pytest.raises(dist.DistBackendError, match=r"(?s)all_reduce.*broadcast|broadcast.*all_reduce"):
            group.all_reduce(x) if rank == 0 else group.broadcast(x, 0)
    elif rank == 0:
        with pytest.raises(dist.DistBackendError, match="rank 1 .* failed: enough"):
            group.all_reduce(x)
    else:
        group.abort("enough")
    with pytest.raises(dist.DistBackendError):
        group.all_reduce(x)


def fail_while_handling():
    """Return for each failing call whether the exception that was handled is shown with its error."""
    rank, group, x = dist.get_rank(), dist.new_group(), np.ones(1)
    for _ in range(4):
        group.all_reduce(x)
    calls = {
        "wrong argument": lambda: group.all_reduce([1.0]),
        "wrong rank": lambda: group.send(x, 5),
        "disagreement": lambda: group.all_reduce(x) if rank else group.barrier(),
        "earlier failure": lambda: group.all_reduce(x),
        "async call": lambda: group.all_reduce(x, async_op=True).wait(),
    }
    shown = {}
    for name, call in calls.items():
        try:
            try:
                raise KeyError(name)
            finally:
                call()
        except (dist.DistError, ValueError, TypeError) as error:
            shown[name] = f"KeyError: '{name}'" in "".join(traceback.format_exception(error))
    return shown


def test_an_error_of_a_call_shows_what_was_handled_when_it_was_made(pair):
    for shown in pair.run(fail_while_handling):
        assert len(shown) == 5
        assert all(shown.values()), shown


@pytest.mark.parametrize("kind", ["another call", "abort"])
def test_known_calls_fail_as_others_do(pair, kind):
    pair.run(fail, kind)


def threads_have_worlds_of_their_own():
    def main():
        x = np.ones(1)
        for _ in range(5):
            x[:] = 1
            dist.all_reduce(x)
        return x[0]

    before = np.ones(1)
    for _ in range(4):
        before[:] = 1
        dist.all_reduce(before)
    inside = dist.run(main, 3)
    dist.all_reduce(before)
    after = before[0]
    for _ in range(4):
        dist.all_reduce(before)
    return inside, after, fewest_functions(lambda: dist.all_reduce(before))


def test_threads_have_worlds_of_their_own(worlds):
    assert worlds.world("gloo", 2).run(threads_have_worlds_of_their_own) == [([3.0] * 3, 4.0, [])] * 2


def sendrecv_whose_first_message_is_late():
    group, rank = dist.new_group(), dist.get_rank()
    group.barrier()
    x, into, store = np.ones(3), np.zeros(3), current_slot().world.store
    if rank == 0:
        threading.Timer(0.2, store.set, ("posted", "")).start()  # the receive is posted long before that
    else:
        store.wait(["posted"])
    for _ in range(5):
        group.sendrecv(x, into, 1 - rank, 1 - rank)
    return fewest_functions(lambda: group.sendrecv(x, into, 1 - rank, 1 - rank))


def test_a_sendrecv_is_made_without_python_also_if_the_first_message_was_late(pair):
    assert pair.run(sendrecv_whose_first_message_is_late) == [[], []]
