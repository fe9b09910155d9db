"""async_op=True: the Work, the order of calls, several groups at once."""

import threading

import cases
import numpy as np
import pytest
from cases import values

import meshdist as dist

pytestmark = pytest.mark.timeout(120)


def every_collective_async(count):
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = values("float64", (size * count,), rank)
    blocks = [np.zeros_like(mine) for _ in range(size)]
    calls = {
        "all_reduce": (mine.copy(), lambda x, **how: dist.all_reduce(x, "max", **how)),
        "broadcast": (mine.copy(), lambda x, **how: dist.broadcast(x, size - 1, **how)),
        "reduce": (mine.copy(), lambda x, **how: dist.reduce(x, size - 1, **how)),
        "all_gather": (blocks, lambda out, **how: dist.all_gather(out, mine, **how)),
        "all_gather_into_tensor": (
            np.zeros((size, *mine.shape)),
            lambda out, **how: dist.all_gather_into_tensor(out, mine, **how),
        ),
        "reduce_scatter": (
            np.zeros(count),
            lambda out, **how: dist.reduce_scatter(out, list(mine.reshape(size, count)), **how),
        ),
        "reduce_scatter_tensor": (np.zeros(count), lambda out, **how: dist.reduce_scatter_tensor(out, mine, **how)),
        "all_to_all_single": (np.zeros_like(mine), lambda out, **how: dist.all_to_all_single(out, mine, **how)),
        "all_to_all_single with splits": (
            np.zeros_like(mine),
            lambda out, **how: dist.all_to_all_single(out, mine, [count] * size, [count] * size, **how),
        ),
    }
    for name, (out, call) in calls.items():
        sync_out = [array.copy() for array in out] if isinstance(out, list) else out.copy()
        call(sync_out)
        work = call(out, async_op=True)
        cases.same(isinstance(work, dist.Work), True, f"{name} gives a Work")
        cases.same(work.wait(), True, f"{name}: wait()")
        cases.same(work.wait(timeout=5.0), True, f"{name}: wait() again")
        state = work.is_completed(), work.is_success(), work.exception()
        cases.same(state, (True, True, None), f"{name}: completed, success, exception")
        cases.same(work.result() is out, True, f"{name}: the result is the output")
        cases.same(np.stack(out).tobytes(), np.stack(sync_out).tobytes(), f"{name} of {count}: async as sync")
    work = dist.barrier(async_op=True)
    cases.same((work.wait(), work.result()), (True, None), "barrier")


@pytest.mark.parametrize("count", [4, 3_000])
def test_every_collective_async(world, count):
    world.run(every_collective_async, count)


def strided_async():
    size, rank = dist.get_world_size(), dist.get_rank()
    for count in (4, 3_000):
        x = np.zeros((count, 2))
        x[:, 0] = rank
        dist.all_reduce(x[:, 0], async_op=True).wait()
        cases.same((set(x[:, 0].tolist()), set(x[:, 1].tolist())), ({sum(range(size))}, {0.0}), "strided async")


def test_strided_arrays_async(world):
    world.run(strided_async)


def strided_outstanding():
    """Many long ones at once, between sync calls: they are packed into memory that is used again, not too early."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = np.zeros((20_000, 6))
    for turn in range(3):
        whole[...] = rank + turn
        works = [dist.all_reduce(whole[:, column], async_op=True) for column in range(4)]
        gathered = [np.zeros((20_000, 2))[:, 1] for _ in range(size)]
        dist.all_gather(gathered, whole[:, 4])
        dist.broadcast(whole[:, 5], src=0)
        for work in works:
            work.wait()
        due = [sum(range(size)) + size * turn] * 4 + [rank + turn, turn]
        assert (whole == due).all(), whole[0]
        cases.same([array[0] for array in gathered], [peer + turn for peer in range(size)], f"gathered in turn {turn}")
        assert all((array == array[0]).all() for array in gathered)


def test_many_strided_arrays_outstanding(world):
    world.run(strided_outstanding)


def many_in_flight():
    size, rank = dist.get_world_size(), dist.get_rank()
    arrays = [np.full(1 + number % 50, rank + number) for number in range(300)]
    works = [dist.all_reduce(array, async_op=True) for array in arrays]
    for number in reversed(range(len(works))):
        works[number].wait()
        cases.same(set(arrays[number].tolist()), {sum(range(size)) + number * size}, f"call {number} of many")


def test_many_in_flight(world):
    world.run(many_in_flight)


def sync_between_async(count):
    # A chain in which every call needs the one before: only this order gives this value.
    size = dist.get_world_size()
    x, expected = np.ones(count), 1
    for step in range(12):
        if step % 3 == 2:
            dist.all_reduce(x)
        else:
            dist.all_reduce(x, async_op=True)
        expected *= size
    dist.barrier()
    cases.same(set(x.tolist()), {float(expected)}, "sync calls between async ones")


@pytest.mark.parametrize("count", [2, 20_000])
def test_sync_calls_keep_their_place_between_async_ones(world, count):
    world.run(sync_between_async, count)


def errors_before_anything_is_sent():
    # A wrong argument is raised by the call itself, not by the Work.
    for wrong in ("no array", np.array(["text"]), np.broadcast_to(np.zeros(1), (3,))):
        try:
            dist.all_reduce(wrong, async_op=True)
        except (TypeError, ValueError) as error:
            cases.same("all_reduce" in str(error), True, str(error))
        else:
            raise AssertionError(f"all_reduce took {wrong!r}")
    cases.same(int(dist.all_reduce(np.array(1))), dist.get_world_size(), "all_reduce afterwards")


def test_a_wrong_argument_is_raised_by_the_call(world_of_3):
    world_of_3.run(errors_before_anything_is_sent)


def groups_in_any_order(used_before):
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group(group_desc=f"number {number}") for number in range(4)]
    if used_before:
        for group in groups:
            group.barrier()
    arrays = [np.full(3 + 5000 * number, rank + number) for number in range(len(groups))]
    # Every rank begins with another group: within a group the order is the same, between groups there is none.
    order = [(rank + number) % len(groups) for number in range(len(groups))]
    works = [groups[number].all_reduce(arrays[number], async_op=True) for number in order]
    for work in works:
        work.wait(timeout=20.0)
    for number, array in enumerate(arrays):
        cases.same(set(array.tolist()), {sum(range(size)) + number * size}, f"group {number}")


@pytest.mark.parametrize("used_before", [True, False], ids=["used before", "first call"])
def test_groups_do_not_wait_for_each_other(world, used_before):
    world.run(groups_in_any_order, used_before)


def async_first_call_returns_at_once():
    # The first rank goes on and sends what the others wait for before they join the collective.
    rank, size = dist.get_rank(), dist.get_world_size()
    group, x, token = dist.new_group(), np.array([rank]), np.zeros(1)
    if rank == 0:
        work = group.all_reduce(x, async_op=True)
        cases.same(work.is_completed(), False, "done without the others")
        for peer in range(1, size):
            dist.send(token, peer)
    else:
        dist.recv(token, 0)
        work = group.all_reduce(x, async_op=True)
    work.wait(timeout=20.0)
    cases.same(x.item(), sum(range(size)), "all_reduce")


def test_the_first_async_call_of_a_group_returns_at_once(world_of_several):
    world_of_several.run(async_first_call_returns_at_once)


def timeouts_of_wait():
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    x = np.array([1])
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        try:
            work.wait(timeout=0.05)
        except dist.DistTimeoutError as error:
            cases.same("all_reduce" in str(error) and "0.05" in str(error), True, str(error))
        else:
            raise AssertionError("wait came back without the other ranks")
        cases.same((work.is_completed(), work.is_success(), work.exception()), (False, False, None), "not done")
        for peer in range(1, size):
            dist.send(x, peer)
        cases.same((work.wait(), x.item()), (True, size), "waited again")
    else:
        dist.recv(np.zeros(1, int), 0)
        dist.all_reduce(x)


def test_a_wait_that_times_out_can_be_waited_again(world_of_several):
    world_of_several.run(timeouts_of_wait)


def from_several_threads():
    # Works may be waited for from any thread.
    size, found = dist.get_world_size(), []
    works = [dist.all_reduce(np.array([number]), async_op=True) for number in range(8)]
    threads = [threading.Thread(target=lambda work=work: found.append(work.result().item())) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cases.same(sorted(found), [number * size for number in range(8)], "results in threads")


def test_works_are_waited_for_in_other_threads(world):
    world.run(from_several_threads)


def failed_work():
    rank = dist.get_rank()
    group = dist.new_group()
    work = group.all_reduce(np.zeros(3 + (rank == 1)), async_op=True)
    for _ in range(2):
        try:
            work.wait(timeout=20.0)
        except dist.DistBackendError as error:
            cases.same("float64[3]" in str(error) and "float64[4]" in str(error), True, str(error))
        else:
            raise AssertionError("calls that disagree came to an end")
    state = work.is_completed(), work.is_success(), type(work.exception())
    cases.same(state, (True, False, dist.DistBackendError), "state of a failed Work")


def test_a_failed_work_raises_at_every_wait(world_of_several):
    world_of_several.run(failed_work)
