"""Calls that may be carried out in several ways: once one is chosen, the core makes them without Python."""

import numpy as np
import pytest
from python_calls import fewest_functions
from worlds import WorkerSet, needs_linux

import meshdist as dist
from meshdist import core
from meshdist.backends.gloo.shm import move_selection
from meshdist.backends.gloo.shm.tuning import Mode, Tuning

pytestmark = [
    pytest.mark.timeout(60),
    needs_linux,
    pytest.mark.skipif(core.module is None, reason=f"there is no compiled core: {core.missing}"),
]
KIB, MIB = 1 << 10, 1 << 20
UNTIL_CHOSEN = 100  # calls, of which 15 to 60 are trials


def calls_of(num_bytes):
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, other = np.zeros(num_bytes // 4, np.float32), np.zeros(num_bytes // 4, np.float32)
    part, parts, others = whole[: whole.size // size].copy(), np.split(whole, size), np.split(other, size)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part),
        "gather": lambda: dist.gather(part, parts if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(part, parts if rank == 0 else None, 0),
        "all_to_all_single": lambda: dist.all_to_all_single(other, whole),
        "all_to_all": lambda: dist.all_to_all(others, parts),
    }


def functions_of_chosen_calls(num_bytes):
    fewest = {}
    for name, call in calls_of(num_bytes).items():
        for _ in range(UNTIL_CHOSEN):
            call()
        fewest[name] = fewest_functions(call)
    choices = dist.group.WORLD.usable_backend("test").choices()
    chosen = {choice.kind: choice.ways[choice.chosen] for choice in choices if choice.chosen is not None}
    if chosen.get("all_to_all float32") == move_selection.WRITTEN:
        del fewest["all_to_all"]  # the core does not write blocks whose sizes no rank knows
    return fewest


@pytest.mark.parametrize("num_bytes", [64 * KIB, 1 * MIB, 6 * MIB])
def test_they_are_made_without_python(worlds, num_bytes):
    # Ranks that have shared arrays, as another test may leave them, ask in Python whether those of the call are.
    with WorkerSet(worlds.nursery, 2) as workers:
        workers.join()
        workers.start(functions_of_chosen_calls, num_bytes)
        for fewest in workers.gather():
            # Ways that write also call `check_now`.
            assert {name: functions for name, functions in fewest.items() if "run" in functions} == {}


def moved(turn, mine, all_of_them, others):
    """Check a call of each kind, with these arrays: of one block, and of one for each rank."""
    rank, size, count = dist.get_rank(), dist.get_world_size(), mine.size
    peers = np.arange(size)
    mine[:], total = rank + turn, np.repeat(peers + turn, count)
    dist.all_gather_into_tensor(all_of_them, mine)
    assert np.array_equal(all_of_them, total)
    dist.all_to_all_single(others, all_of_them)
    assert np.array_equal(others, np.full(size * count, rank + turn))
    others[:] = -1
    dist.all_to_all(np.split(others, size), np.split(all_of_them, size))
    assert np.array_equal(others, np.full(size * count, rank + turn))
    dist.all_reduce(mine)
    assert np.array_equal(mine, np.full(count, size * turn + sum(peers)))
    if rank == 0:
        mine[:] = turn
    dist.broadcast(mine, 0)
    assert np.array_equal(mine, np.full(count, turn))


def shared_by_some(count):
    rank, size = dist.get_rank(), dist.get_world_size()
    arrays = {make: [make(number * count, np.float32) for number in (1, size, size)] for make in (np.zeros, dist.empty)}
    for turn in range(UNTIL_CHOSEN):
        moved(turn, *arrays[np.zeros])
    for turn in range(12):
        sharing = {0: {0}, 1: set(range(size)), 2: set(), 3: {size - 1}}[turn % 4]
        moved(turn, *arrays[dist.empty if rank in sharing else np.zeros])


@pytest.mark.parametrize("size", [2, 3])
def test_arrays_of_some_ranks_may_be_shared_then(worlds, size):
    worlds.world("gloo", size).run(shared_by_some, 30_000)


def lists_of_other_sizes(long, short):
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = [long] * UNTIL_CHOSEN + [long, short, short, long, long + 7, long, 0, long] * 3
    for turn, count in enumerate(counts):
        # What rank 0 gives to the last one has another size: no other rank knows it.
        given = [np.full(count if (rank, peer) == (0, size - 1) else long, rank + turn) for peer in range(size)]
        taken = [np.zeros(count if (peer, rank) == (0, size - 1) else long, int) for peer in range(size)]
        dist.all_to_all(taken, given)
        for peer, array in enumerate(taken):
            assert np.array_equal(array, np.full(array.size, peer + turn)), (turn, peer)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("long", [30_000, 400_000])
def test_lists_may_have_other_sizes_then(worlds, size, long):
    worlds.world("gloo", size).run(lists_of_other_sizes, long, 5)


def test_what_is_told_holds_no_longer_than_the_choice():
    choices = Tuning(Mode.ON, None)
    trials = choices.trials("call", 1 * MIB, ["default", "other"])
    trials.settle(1)
    told, left = trials.calls, trials.calls.left
    assert left > 1
    choices.moved(is_far=True)
    assert (told.left, trials.calls.left) == (0, left), "whoever was told asks again"
    told = trials.calls
    for _ in range(left):
        assert not trials.goes_on
        trials.passed()
    assert trials.goes_on
    assert told.left <= 0
    trials.settle(0)
    assert (told.left, trials.calls is told) == (0, False)


def test_what_is_not_measured_is_told_for_ever():
    trials = Tuning(Mode.OFF, None).trials("call", 1 * MIB, ["default", "other"])
    assert trials.is_final
    assert trials.calls.left > 1 << 60
