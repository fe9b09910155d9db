"""Sub-groups and their orders, roots by global rank and by rank in the group; function, group and mesh do the same."""

import itertools

import cases
import numpy as np
import pytest
import reference
from cases import values

import meshdist as dist
from meshdist import ReduceOp
from meshdist.device_mesh import DeviceMesh

pytestmark = pytest.mark.timeout(120)


def some_groups():
    """Return (ranks as given, sort_ranks) of several groups: singles, pairs, all, in and out of order."""
    everyone = list(range(dist.get_world_size()))
    lists = [
        everyone[::2],
        everyone[1:] or everyone,
        everyone[::-1],
        [everyone[-1], everyone[0]],
        everyone[2:] + everyone[:1],
    ]
    lists = [ranks for ranks in lists if len(set(ranks)) == len(ranks)]
    return itertools.product(lists, (True, False))


def every_collective(group, members, rank):
    """Run all collectives on `group`; `members`: its global ranks in order, `rank`: this rank's place."""
    size = len(members)
    for count in (6, 12_000):
        arrays = [values("float64", (size * count,), member) for member in members]
        mine, what = arrays[rank], f"group {members}, {count} elements"
        x = mine.copy()
        dist.all_reduce(x, "max", group=group)
        equal(x, reference.all_reduce(arrays, ReduceOp.MAX)[rank], f"all_reduce, {what}")
        for root, root_member in enumerate(members):
            for spelling in ({"{}": root_member}, {"group_{}": root}):
                x = mine.copy()
                dist.broadcast(x, group=group, **named(spelling, "src"))
                equal(x, arrays[root], f"broadcast, {what}, root {root} as {spelling}")
                x = mine.copy()
                dist.reduce(x, group=group, **named(spelling, "dst"))
                equal(
                    x, reference.reduce(arrays, ReduceOp.SUM, root)[rank], f"reduce, {what}, root {root} as {spelling}"
                )
        blocks = [np.empty_like(mine) for _ in members]
        dist.all_gather(blocks, mine, group=group)
        equal(np.stack(blocks), np.stack(arrays), f"all_gather, {what}")
        out = np.empty((size, size * count))
        dist.all_gather_into_tensor(out, mine, group=group)
        equal(out, np.stack(arrays), f"all_gather_into_tensor, {what}")
        out = np.empty(count)
        dist.reduce_scatter_tensor(out, mine, group=group)
        equal(out, reference.reduced(arrays, ReduceOp.SUM).reshape(size, count)[rank], f"reduce_scatter_tensor, {what}")
        dist.reduce_scatter(out, list(mine.reshape(size, count)), group=group)
        equal(out, reference.reduced(arrays, ReduceOp.SUM).reshape(size, count)[rank], f"reduce_scatter, {what}")
        out = np.empty_like(mine)
        dist.all_to_all_single(out, mine, group=group)
        equal(out, np.concatenate([array.reshape(size, count)[rank] for array in arrays]), f"all_to_all_single, {what}")
        dist.barrier(group)


def named(spelling, root):
    return {key.format(root): value for key, value in spelling.items()}


def equal(actual, expected, what):
    if actual.tobytes() != np.ascontiguousarray(expected).tobytes():
        raise AssertionError(f"{cases.where()}, {what}: got {actual}, expected {expected}")


def on_many_groups():
    for ranks, sort_ranks in some_groups():
        group = dist.new_group(ranks, sort_ranks=sort_ranks)
        members = sorted(ranks) if sort_ranks else ranks
        if dist.get_rank() not in ranks:
            cases.same(group is dist.GroupMember.NON_GROUP_MEMBER, True, f"new_group({ranks})")
            continue
        rank = members.index(dist.get_rank())
        cases.same((group.rank(), group.size(), group.ranks), (rank, len(ranks), tuple(members)), f"new_group({ranks})")
        cases.same(dist.get_process_group_ranks(group), members, "get_process_group_ranks")
        for place, member in enumerate(members):
            cases.same(dist.get_group_rank(group, member), place, "get_group_rank")
            cases.same(dist.get_global_rank(group, place), member, "get_global_rank")
        every_collective(group, members, rank)


def test_every_collective_on_sub_groups(world):
    world.run(on_many_groups)


def messages_in_groups():
    for ranks, sort_ranks in some_groups():
        group = dist.new_group(ranks, sort_ranks=sort_ranks)
        if dist.get_rank() not in ranks or len(ranks) == 1:
            continue
        last, rank, size = group.ranks[-1], group.rank(), group.size()
        x = np.zeros(1, int)
        if rank == 0:
            dist.send(np.array([1]), last, group=group)
            dist.send(np.array([2]), group=group, group_dst=size - 1)
            group.send(np.array([3]), size - 1)
        elif rank == size - 1:
            cases.same((dist.recv(x, group.ranks[0], group=group), x.item()), (group.ranks[0], 1), "recv(src)")
            dist.recv(x, group=group, group_src=0)
            cases.same(x.item(), 2, "recv(group_src)")
            cases.same((group.recv(x, 0), x.item()), (0, 3), "group.recv")


def test_messages_in_sub_groups(world):
    world.run(messages_in_groups)


def function_group_and_mesh():
    size, rank = dist.get_world_size(), dist.get_rank()
    order = list(range(size))[::-1]
    mesh = DeviceMesh("cpu", order, mesh_dim_names=("all",))
    group = mesh.get_group()
    assert group.ranks == tuple(order)
    place, root = order.index(rank), size // 2
    mine = values("int64", (2 * size,), rank)
    forms = {
        "function with group": (
            lambda name: lambda *args, **roots: getattr(dist, name)(*args, **roots, group=group),
            True,
        ),
        "function with mesh": (
            lambda name: lambda *args, **roots: getattr(dist, name)(*args, **roots, group=mesh),
            True,
        ),
        "method of group": (lambda name: getattr(group, name), False),
        "method of mesh": (lambda name: getattr(mesh, name), False),
        "method of slice": (lambda name: getattr(mesh["all"], name), False),
    }
    results = {}
    for form, (of, is_global) in forms.items():
        number = order[root] if is_global else root
        blocks = [np.zeros_like(mine) for _ in order]
        results[form] = [
            of("all_reduce")(mine.copy(), "sum"),
            of("broadcast")(mine.copy(), src=number),
            of("broadcast")(mine.copy(), number),
            of("broadcast")(mine.copy(), group_src=root),
            of("reduce")(mine.copy(), dst=number, op="max"),
            of("reduce")(mine.copy(), number, ReduceOp.MAX),
            np.stack(of("all_gather")(blocks, mine)),
            of("all_gather_into_tensor")(np.zeros((size, 2 * size), int), mine),
            of("reduce_scatter")(np.zeros(2, int), list(mine.reshape(size, 2)), "min"),
            of("reduce_scatter_tensor")(np.zeros(2, int), mine, op="min"),
            of("all_to_all_single")(np.zeros_like(mine), mine),
        ]
        cases.same(of("barrier")(), None, form)
    arrays = [values("int64", (2 * size,), member) for member in order]
    equal(results["function with group"][0], reference.all_reduce(arrays, ReduceOp.SUM)[place], "all_reduce")
    for form, arrays in results.items():
        for number, (array, expected) in enumerate(zip(arrays, results["function with group"], strict=True)):
            equal(array, expected, f"{form}, call {number}")


def test_function_group_and_mesh_do_the_same(world):
    world.run(function_group_and_mesh)


def many_groups_of_the_same_ranks():
    # Groups of the same ranks are told apart, also where some are never used and all are used in turn.
    groups = [dist.new_group(group_desc=f"number {number}") for number in range(6)]
    for _ in range(3):
        for number, group in enumerate(groups[::-1]):
            if number % 3:
                cases.same(int(group.all_reduce(np.array(number))), number * group.size(), f"group {number}")


def test_many_groups_of_the_same_ranks(world):
    world.run(many_groups_of_the_same_ranks)


def only_members_make_the_group():
    # Nobody else needs to call new_group, or to know.
    size, rank = dist.get_world_size(), dist.get_rank()
    if rank in (0, size - 1):
        group = dist.new_group(sorted({0, size - 1}))
        cases.same(int(group.all_reduce(np.array(rank))), size - 1, "all_reduce of the two ends")


def test_non_members_need_not_call_new_group(world):
    world.run(only_members_make_the_group)


def ring_of_pairs():
    # Overlapping groups, each used by its two members alone, in an order without deadlock.
    size, rank = dist.get_world_size(), dist.get_rank()
    pairs = [tuple(sorted({k, (k + 1) % size})) for k in range(size)]
    groups = {pair: dist.new_group(pair) for pair in pairs if rank in pair}
    for pair in sorted(groups):
        cases.same(int(groups[pair].all_reduce(np.array(rank))), sum(pair), f"pair {pair}")


def test_overlapping_groups(world):
    world.run(ring_of_pairs)
