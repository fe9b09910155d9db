"""Groups that live at the same time: many, overlapping, made in any order, by threads, and again after their end."""

import contextvars
import itertools
import os
import sys
import threading

import numpy as np
import pytest
from until import until
from worlds import WorkerSet, worker_rank

import meshdist as dist

pytestmark = pytest.mark.timeout(100)
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only")
NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER
MANY = 500
FEW = 8


def sum_of(value, group=None):
    return int(dist.all_reduce(np.array(value), group=group))


# ---- Many


def resources():
    with open("/proc/self/status") as status:
        threads = next(int(line.split()[1]) for line in status if line.startswith("Threads:"))
    return len(os.listdir("/proc/self/fd")), threads


def rss_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def many_groups():
    rank, size = dist.get_rank(), dist.get_world_size()
    members = [list(ranks) for count in (2, 3, 4) for ranks in itertools.combinations(range(size), count)]
    sum_of(1)
    dist.all_reduce(np.array(1), async_op=True).wait()
    before, rss, count = resources(), rss_bytes(), dist.get_pg_count()
    groups = [dist.new_group(members[k % len(members)]) for k in range(MANY)]
    mine = [(k, group) for k, group in enumerate(groups) if group is not NON_MEMBER]
    assert dist.get_pg_count() == count + len(mine)
    assert len({group.name for _, group in mine}) == len(mine)
    for k, group in mine:
        assert sum_of(k, group) == k * group.size()
    works = [(k, x, group.all_reduce(x, async_op=True)) for k, group in mine for x in [np.array([k, rank])]]
    for k, x, work in works:
        work.wait()
        ranks = members[k % len(members)]
        assert x.tolist() == [k * len(ranks), sum(ranks)]
    # Some to watch the other processes, and a doorbell for each thread; however many groups there are.
    after = resources()
    assert after[0] <= before[0] + FEW
    assert after[1] <= before[1] + 1
    each = (rss_bytes() - rss) / len(mine)
    for group in groups:
        dist.destroy_process_group(group)
    until(lambda: resources() <= after, "the threads that tell the store have ended")
    assert dist.get_pg_count() == count
    return each


@needs_linux
@pytest.mark.slow
def test_hundreds_of_groups_cost_no_descriptor_and_no_thread(worlds):
    for each in worlds.world("gloo", 4).run(many_groups):
        assert each < 150_000, "bytes of memory for each group"


def many_on_threads():
    members = [[0, 1], [1, 2], [0, 2], [0, 1, 2]]
    groups = [dist.new_group(members[k % 4]) for k in range(MANY)]
    return [sum_of(k, group) for k, group in enumerate(groups) if group is not NON_MEMBER]


def test_hundreds_of_groups_of_threads():
    results = dist.run(many_on_threads, 3, timeout=20)
    assert results[0] == [k * (3 if k % 4 == 3 else 2) for k in range(MANY) if k % 4 != 1]


# ---- In any order


def in_different_orders():
    """Each rank makes the groups in an order of its own, those of the same members in one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    members = [ranks for ranks in itertools.combinations(range(size), 2) if rank in ranks]
    order = members[rank % len(members) :] + members[: rank % len(members)]
    groups = {}
    for ranks in order if rank % 2 else reversed(order):
        for number in (1, 2, 3):
            groups[ranks, number] = dist.new_group(ranks, use_local_synchronization=True)
    # All calls at once, in an order that differs from rank to rank as well.
    calls = []
    for (ranks, number), group in reversed(groups.items()) if rank % 3 else groups.items():
        x = np.array([number, rank])
        calls.append((ranks, number, x, group.all_reduce(x, async_op=True)))
    for ranks, number, x, work in calls:
        work.wait()
        assert x.tolist() == [2 * number, sum(ranks)]
    return sorted((ranks, number, group.name) for (ranks, number), group in groups.items())


def test_overlapping_groups_made_and_used_in_different_orders(world_of_several):
    made = world_of_several.run(in_different_orders)
    names = {}
    for ranks, number, name in itertools.chain(*made):
        assert names.setdefault((ranks, number), name) == name
    assert len(set(names.values())) == len(names)


def members_only():
    rank = dist.get_rank()
    if rank == 0:
        return sum_of(rank, dist.new_group([0, 1]))
    first = dist.new_group([1, 2])
    second = dist.new_group([0, 1]) if rank == 1 else None
    return sum_of(rank, first) + (sum_of(rank, second) if second else 0)


def test_only_members_need_to_make_a_group(world_of_3):
    assert world_of_3.run(members_only) == [1, 3 + 1, 3]


def not_mixed_up():
    """Two groups of the same ranks, and the world of the same ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first, second = dist.new_group(), dist.new_group()
    x, y, z = np.array(1), np.array(10), np.array(100)
    calls = [(first, x), (second, y), (None, z)]
    works = []
    for group, array in calls if rank % 2 else calls[::-1]:
        array *= rank + 1
        works.append(dist.all_reduce(array, group=group, async_op=True))
    for work in works:
        work.wait()
    total = size * (size + 1) // 2
    assert (int(x), int(y), int(z)) == (total, 10 * total, 100 * total)
    # Messages of one tag between the same two ranks.
    if rank == 0:
        for group, value in ((first, 1), (second, 2), (None, 3)):
            dist.send(np.array(value), 1, group=group, tag=5)
    elif rank == 1:
        for group, value in ((None, 3), (second, 2), (first, 1)):
            dist.recv(x, 0, group=group, tag=5)
            assert x == value


def test_groups_of_the_same_ranks_are_not_mixed_up(world_of_several):
    world_of_several.run(not_mixed_up)


# ---- By threads


def run_in_threads(programs):
    """Run the programs in threads of this rank; return what they returned."""
    results = [None] * len(programs)

    def keep(place, program):
        try:
            results[place] = program()
        except BaseException as error:
            results[place] = error

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(keep, place, program), daemon=True)
        for place, program in enumerate(programs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def made_by_threads():
    """Each thread makes groups of members of its own, all at once, and uses them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    members = [ranks for ranks in itertools.combinations(range(size), size - 1) if rank in ranks] + [tuple(range(size))]
    count = dist.get_pg_count()

    def work(ranks):
        sums = []
        for number in range(5):
            with dist.new_group(ranks) as group:
                sums.append(sum_of(number, group))
        return sums

    results = run_in_threads([lambda ranks=ranks: work(ranks) for ranks in members])
    assert results == [[number * len(ranks) for number in range(5)] for ranks in members]
    assert dist.get_pg_count() == count


def test_threads_make_groups(world_of_3):
    world_of_3.run(made_by_threads)


def numbered_by_threads():
    groups = run_in_threads([lambda: [dist.new_group() for _ in range(200)]] * 4)
    names = {group.name for made in groups for group in made}
    assert len(names) == 800


def test_threads_make_groups_of_the_same_ranks():
    """None gets the name of another."""
    dist.run(numbered_by_threads, 2, timeout=20)


def first_calls_of_threads():
    group = dist.new_group()
    rank = dist.get_rank()
    if rank < 2:

        def exchange(tag):
            x = np.array(-1)
            if rank == 0:
                group.send(np.array(tag), 1, tag=tag)
                return tag
            group.recv(x, 0, tag=tag)
            return int(x)

        assert run_in_threads([lambda tag=tag: exchange(tag) for tag in range(8)]) == list(range(8))
    return sum_of(1, group)


def test_threads_use_a_new_group_at_once():
    assert dist.run(first_calls_of_threads, 3, timeout=20) == [3, 3, 3]


def made_while_calls_run():
    x = np.zeros(1 << 16)
    works = [dist.all_reduce(x, async_op=True) for _ in range(20)]
    pair = dist.new_group([0, 1])
    everyone = dist.new_group()
    total = sum_of(1, everyone)
    assert pair is NON_MEMBER or sum_of(1, pair) == 2
    dist.destroy_process_group(everyone)
    for work in works:
        work.wait()
    return total


def test_groups_are_made_while_calls_run(world_of_3):
    assert world_of_3.run(made_while_calls_run) == [3, 3, 3]


# ---- Again


def again_and_again():
    names = set()
    for number in range(30):
        group = dist.new_group(group_desc="again")
        assert sum_of(number, group) == number * group.size()
        x = np.array(-1)
        if group.rank() == 0:
            group.send(np.array(number), 1)
        elif group.rank() == 1:
            group.recv(x, 0)
            assert x == number
        names.add(group.name)
        dist.destroy_process_group(group)
    assert len(names) == 30


def test_a_group_is_made_again_after_its_end(world_of_several):
    world_of_several.run(again_and_again)


def mesh_again():
    shape = (dist.get_world_size(), 1)
    for _ in range(5):
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        assert int(mesh["dp"].all_reduce(np.array(1))) == shape[0]
        assert int(mesh["tp"].all_reduce(np.array(1))) == 1
        dist.destroy_process_group(mesh["tp"].get_group())


def test_a_mesh_is_made_again_after_its_groups_were_destroyed(world_of_3):
    world_of_3.run(mesh_again)


def rows_again():
    for _ in range(5):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert int(mesh["tp"].all_reduce(np.array(1))) == 2
        row = mesh["tp"].get_group()
        dist.barrier()
        dist.destroy_process_group(row)


@pytest.mark.parametrize("backend", ["threads", pytest.param("gloo", marks=needs_linux)])
def test_rows_of_a_mesh_are_made_again(worlds, backend):
    """What the group before left in the store is not for the next one."""
    worlds.world(backend, 4).run(rows_again)


def init_again(port):
    for number in range(3):
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=worker_rank(), world_size=3, timeout=20)
        assert dist.get_pg_count() == 1
        old = [dist.new_group([0, 1]), dist.new_group(), dist.new_group()]
        for group in old:
            if group is not NON_MEMBER and number != 1:
                assert sum_of(number, group) == number * group.size()
        dist.destroy_process_group()
        assert dist.get_pg_count() == 0
        if old[1] is not NON_MEMBER:
            with pytest.raises(ValueError, match="has been destroyed"):
                old[1].barrier()


@needs_linux
def test_groups_after_init_destroy_init(worlds):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with store, WorkerSet(worlds.nursery, 3) as workers:
        workers.start(init_again, store.port)
        assert workers.gather() == [None] * 3
