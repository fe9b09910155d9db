"""new_subgroups, new_subgroups_by_enumeration and split_group."""

import os
import sys

import numpy as np
import pytest
from worlds import WorkerSet, worker_rank

import meshdist as dist

pytestmark = pytest.mark.timeout(60)
NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER


def on_4_ranks(program, *args):
    return dist.run(program, 4, args, timeout=20)


def total(group):
    return int(group.all_reduce(np.array(dist.get_rank()))) if group is not NON_MEMBER else None


# ---- new_subgroups


def equal_parts():
    mine, subgroups = dist.new_subgroups(2)
    assert len(subgroups) == 2
    assert subgroups[dist.get_rank() // 2] is mine
    assert subgroups[1 - dist.get_rank() // 2] is NON_MEMBER
    for subgroup in subgroups:
        dist.destroy_process_group(subgroup)
    return mine.ranks


def test_subgroups_of_equal_size():
    assert on_4_ranks(equal_parts) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def every_size():
    size = dist.get_world_size()
    for part in range(1, size + 1):
        if size % part:
            with pytest.raises(
                ValueError, match=rf"new_subgroups on group 'world'.*must divide the {size}.*got {part}"
            ):
                dist.new_subgroups(part)
        else:
            mine, subgroups = dist.new_subgroups(np.int64(part), timeout=20, group_desc="parts")
            first = dist.get_rank() // part * part
            assert (mine.ranks, len(subgroups)) == (tuple(range(first, first + part)), size // part)
            assert (mine.timeout_s, mine.group_desc) == (20.0, "parts")
            assert total(mine) == sum(mine.ranks)


def test_every_size_of_subgroups(world_of_several):
    world_of_several.run(every_size)


def parts_of_a_part():
    odd = dist.new_group([5, 1, 3, 0], sort_ranks=False)
    mine, subgroups = dist.new_subgroups(2, group=odd)
    return mine.ranks, len(subgroups), total(mine)


def test_subgroups_of_a_group():
    """Its ranks are divided in its order; who is not in it has none."""
    first, second, none = ((1, 5), 2, 6), ((0, 3), 2, 3), ((), 0, None)
    assert dist.run(parts_of_a_part, 6, timeout=20) == [second, first, none, second, none, first]


def those_of_a_host():
    mine, subgroups = dist.new_subgroups()
    return mine.ranks, len(subgroups), total(mine)


def test_subgroups_of_a_host(world_of_3):
    together = [((0, 1, 2), 1, 3)] * 3
    # Without shared memory, each is a host of its own.
    alone = [((rank,), 3, rank) for rank in range(3)]
    assert world_of_3.run(those_of_a_host) == (alone if world_of_3.backend == "gloo-tcp" else together)


def join_from_a_host(port, hosts):
    os.environ["MESHDIST_HOST_ID"] = hosts[worker_rank()]
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=worker_rank(), world_size=len(hosts), timeout=20)
    mine, subgroups = dist.new_subgroups()
    result = mine.ranks, len(subgroups), total(mine)
    dist.destroy_process_group()
    return result


@pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only")
def test_subgroups_of_several_hosts(worlds):
    """The ranks of a host make a group, however many they are and in whatever order they are numbered."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with store, WorkerSet(worlds.nursery, 4) as workers:
        workers.start(join_from_a_host, store.port, ["a", "b", "a", "a"])
        assert workers.gather() == [((0, 2, 3), 2, 5), ((1,), 2, 1), ((0, 2, 3), 2, 5), ((0, 2, 3), 2, 5)]


WRONG_SIZES = {
    "none": (0, ValueError, "group_size must be 1 to 4, the ranks of the group, got 0"),
    "negative": (-2, ValueError, "group_size must be 1 to 4.*got -2"),
    "too large": (5, ValueError, "group_size must be 1 to 4.*got 5"),
    "does not divide": (3, ValueError, "group_size must divide the 4 ranks.*got 3, and 1 is left"),
    "fraction": (2.0, TypeError, "group_size must be an integer, got 2.0"),
    "text": ("2", TypeError, "group_size must be an integer, got '2'"),
}


def refuse_size(name):
    size, kind, words = WRONG_SIZES[name]
    with pytest.raises(kind, match=rf"new_subgroups on group 'world' \(rank {dist.get_rank()} of 4\): {words}"):
        dist.new_subgroups(size)
    assert dist.get_pg_count() == 1


@pytest.mark.parametrize("name", WRONG_SIZES)
def test_wrong_sizes(name):
    on_4_ranks(refuse_size, name)


# ---- new_subgroups_by_enumeration


def enumerated():
    mine, subgroups = dist.new_subgroups_by_enumeration([[2, 0], (1,)], group_desc="listed")
    return mine.ranks, [group is mine for group in subgroups], total(mine)


def test_enumerated_subgroups():
    even, one = ((0, 2), [True, False], 2), ((1,), [False, True], 1)
    nowhere = (), [True, True], None
    assert on_4_ranks(enumerated) == [even, one, even, nowhere]


WRONG_LISTS = {
    "nothing": (None, TypeError, "must be a list of lists of integers, got None"),
    "no lists": ([], ValueError, "must have at least one list"),
    "an empty one": ([[0, 1], []], ValueError, r"\[1\] must be a non-empty list without duplicates, got \[\]"),
    "in two": ([[0, 1], [2], [3, 1]], ValueError, "rank 1 is in lists 0 and 2; it can be in one"),
    "twice": ([[0], [1, 2, 1]], ValueError, r"\[1\] must be a non-empty list without duplicates.*\[1, 2, 1\]"),
    "outside": ([[0, 1], [2, 4]], ValueError, r"\[1\] must be 0 to 3, got 4"),
    "negative": ([[0, -1]], ValueError, r"\[0\] must be 0 to 3, got -1"),
    "flat": ([0, 1], TypeError, r"\[0\] must be a list of integers, got 0"),
    "text": ([["a"]], TypeError, r"\[0\] must be a list of integers"),
    "a number": (2, TypeError, "must be a list of lists of integers, got 2"),
}


def refuse_lists(name):
    lists, kind, words = WRONG_LISTS[name]
    with pytest.raises(kind, match=f"new_subgroups_by_enumeration: ranks_per_subgroup_list:? ?{words}"):
        dist.new_subgroups_by_enumeration(lists)
    assert dist.get_pg_count() == 1
    # None of the groups was made, so that all ranks agree on the number of the next one.
    assert total(dist.new_group([0, 1])) == (1 if dist.get_rank() < 2 else None)


@pytest.mark.parametrize("name", WRONG_LISTS)
def test_wrong_lists_make_no_group(name):
    on_4_ranks(refuse_lists, name)


def refuse_on_one_rank():
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="rank 0 is in lists 0 and 1"):
            dist.new_subgroups_by_enumeration([[0, 1], [0, 2]])
        with pytest.raises(ValueError, match="unknown backend 'fast'"):
            dist.new_subgroups_by_enumeration([[0, 1], [2]], backend="fast")
    mine, _ = dist.new_subgroups_by_enumeration([[0, 1], [2]])
    return total(mine)


def test_a_rank_that_was_refused_may_try_again(world_of_3):
    assert world_of_3.run(refuse_on_one_rank) == [1, 1, 2]


# ---- split_group


def split():
    parent = dist.new_group([3, 1, 0], sort_ranks=False, timeout=21)
    mine = dist.split_group(parent, [[2, 0], [1]])
    if mine is NON_MEMBER:
        return "not in the parent"
    assert mine.timeout_s == parent.timeout_s
    assert parent.all_reduce(np.array(1)) == 3  # can be used as before
    return mine.ranks, total(mine)


def test_split_takes_ranks_in_the_parent_and_keeps_its_order():
    first = (3, 0), 3
    assert on_4_ranks(split) == [first, ((1,), 1), "not in the parent", first]


def split_the_world():
    size = dist.get_world_size()
    even = dist.split_group(None, [list(range(0, size, 2))], timeout=25, group_desc="even")
    if dist.get_rank() % 2:
        return even is NON_MEMBER
    return even.group_desc == "even" and even.timeout_s == 25.0 and total(even) == sum(range(0, size, 2))


def test_split_of_the_world_leaves_some_out(world_of_several):
    assert all(world_of_several.run(split_the_world))


WRONG_SPLITS = {
    "nothing": (None, ValueError, "pass split_ranks, a list of lists of ranks in the group"),
    "no lists": ([], ValueError, "split_ranks must have at least one list"),
    "an empty one": ([[0], []], ValueError, r"split_ranks\[1\] must be a non-empty list without duplicates"),
    "in two": ([[0, 1], [1, 2]], ValueError, "split_ranks: rank 1 is in lists 0 and 1"),
    "a global rank": ([[0], [3]], ValueError, r"split_ranks\[1\] must be 0 to 2, got 3"),
    "flat": ([0, 1], TypeError, r"split_ranks\[0\] must be a list of integers, got 0"),
    "fraction": ([[0.5]], TypeError, r"split_ranks\[0\] must be a list of integers"),
}


def refuse_split(name):
    lists, kind, words = WRONG_SPLITS[name]
    parent = dist.new_group([1, 2, 3], group_desc="parent")
    if parent is NON_MEMBER:
        return
    with pytest.raises(kind, match=rf"split_group on group 'parent' \(rank . of 3, global rank .\): {words}"):
        dist.split_group(parent, lists)
    assert dist.get_pg_count() == 2


@pytest.mark.parametrize("name", WRONG_SPLITS)
def test_wrong_splits(name):
    on_4_ranks(refuse_split, name)


def parts_of_a_destroyed_group():
    parent = dist.new_group(group_desc="gone")
    parent.barrier()
    dist.barrier()
    dist.destroy_process_group(parent)
    for divide in (lambda: dist.split_group(parent, [[0]]), lambda: dist.new_subgroups(1, parent)):
        with pytest.raises(ValueError, match=r"'gone'.*has already been destroyed"):
            divide()
    with pytest.raises(TypeError, match="group must be a ProcessGroup"):
        dist.new_subgroups(1, group=[0])


def test_a_destroyed_group_has_no_parts():
    on_4_ranks(parts_of_a_destroyed_group)


def test_without_a_world():
    for make in (
        lambda: dist.new_subgroups(1),
        lambda: dist.new_subgroups_by_enumeration([[0]]),
        lambda: dist.split_group(None, [[0]]),
        lambda: dist.shrink_group([0]),
    ):
        with pytest.raises(ValueError, match="init_process_group"):
            make()
    assert dist.get_pg_count() == 0
