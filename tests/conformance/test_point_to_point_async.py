"""isend, irecv, any source, batches: order, tags, sizes, and messages that go on by themselves."""

import itertools
import os

import cases
import numpy as np
import pytest
from failing import fails
from mpi_worlds import RUNS_ALL
from mpi_worlds import WORLDS as MPI_WORLDS

import meshdist as dist
from meshdist.system.deadline import Deadline

pytestmark = pytest.mark.timeout(120)
KIB = cases.KIB
SIZES = (0, 8, 64 * KIB, 64 * KIB + 8, 300 * KIB)


OURS = ["threads", "gloo", "gloo-slots"]


PAIRS = [pair for pair in MPI_WORLDS if pair[1] == 2]


def name(pair):
    return f"{pair[0]}-{pair[1]}"


@pytest.fixture(
    params=[*itertools.product(OURS, (2, 3, 4)), *(pair for pair in MPI_WORLDS if pair[1] > 1)],
    ids=name,
)
def world(request, worlds):
    return worlds.world(*request.param)


@pytest.fixture(params=[*itertools.product(OURS, (2,)), *PAIRS], ids=name)
def world_of_2(request, worlds):
    return worlds.world(*request.param)


def all_to_all_at_once(num_bytes):
    # Everybody begins everything before it waits for anything.
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [peer for peer in range(size) if peer != rank]
    taken = {peer: np.zeros(num_bytes, np.uint8) for peer in others}
    receipts = {peer: dist.irecv(taken[peer], peer, tag=rank) for peer in others[::2]}
    sent = [dist.isend(np.full(num_bytes, 1 + rank, np.uint8), peer, tag=peer) for peer in others]
    receipts.update({peer: dist.irecv(taken[peer], peer, tag=rank) for peer in others[1::2]})
    for peer, work in receipts.items():
        assert work.wait(30) is True
        assert (work.source_rank(), work.is_success()) == (peer, True)
        assert work.result() is taken[peer]
        cases.same(set(taken[peer].tolist()), {1 + peer} if num_bytes else set(), f"message from {peer}")
    for work in sent:
        assert work.wait(30) is True
        fails(ValueError, work.source_rank, "irecv")


@pytest.mark.parametrize("num_bytes", SIZES)
def test_everybody_with_everybody(world, num_bytes):
    world.run(all_to_all_at_once, num_bytes)


def posting_order(num_elements):
    # Many receipts on one channel: those of one source and tag in posting order, tags in any order.
    rank, tags = dist.get_rank(), [(3 * number) % 4 for number in range(40)]
    if rank == 0:
        works = [dist.isend(np.full(num_elements, number), 1, tag=tag) for number, tag in enumerate(tags)]
    elif rank == 1:
        buffers = {tag: [np.zeros(num_elements, int) for _ in range(10)] for tag in range(4)}
        works = [dist.irecv(buffer, 0, tag=tag) for tag in (2, 0, 3, 1) for buffer in buffers[tag]]
        for work in reversed(works):
            work.wait(30)
        for tag, arrays in buffers.items():
            expected = [number for number, other in enumerate(tags) if other == tag]
            cases.same([set(array.tolist()) for array in arrays], [{number} for number in expected], f"tag {tag}")
        return
    else:
        return
    for work in works:
        work.wait(30)


@pytest.mark.parametrize("num_elements", [1, 20_000])
def test_receipts_are_matched_in_posting_order(world, num_elements):
    world.run(posting_order, num_elements)


def sync_between_async():
    # A sync receive after async ones of the same tag gets the message after theirs.
    if dist.get_rank() == 0:
        for number in range(5):
            dist.send(np.array([number]), 1)
    elif dist.get_rank() == 1:
        arrays = [np.zeros(1, int) for _ in range(5)]
        works = [dist.irecv(array, 0) for array in arrays[:2]]
        dist.recv(arrays[2], 0)
        works += [dist.irecv(array, 0) for array in arrays[3:]]
        for work in works:
            work.wait(30)
        cases.same([array.item() for array in arrays], list(range(5)), "sync between async receives")


def test_sync_receives_keep_their_place(world):
    world.run(sync_between_async)


def any_source(num_bytes, asynchronous):
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        for number in range(5):
            dist.send(np.full(num_bytes, 10 * rank + number, np.uint8), 0, tag=4)
        return
    found = {peer: [] for peer in range(1, size)}
    for _ in range(5 * (size - 1)):
        x = np.zeros(num_bytes, np.uint8)
        if asynchronous:
            work = dist.irecv(x, tag=4)
            work.wait(30)
            source = work.source_rank()
        else:
            source = dist.recv(x, tag=4)
        found[source].append(x[0].item())
        assert (x == x[0]).all()
    cases.same(found, {peer: [10 * peer + number for number in range(5)] for peer in found}, "from any source")


@pytest.mark.parametrize("num_bytes", [1, 100 * KIB])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["recv", "irecv"])
def test_any_source(world, num_bytes, asynchronous):
    world.run(any_source, num_bytes, asynchronous)


def any_source_beside_given():
    # Posted in turn for rank 1 and for any; rank 1 sends all: posting order decides.
    if dist.get_rank() == 0:
        arrays = [np.zeros(1, int) for _ in range(8)]
        works = [dist.irecv(array, 1 if number % 2 else None, tag=1) for number, array in enumerate(arrays)]
        dist.send(np.zeros(1), 1)
        for work in works:
            work.wait(30)
        cases.same([array.item() for array in arrays], list(range(8)), "any and given sources in turn")
        cases.same({work.source_rank() for work in works}, {1}, "source")
    elif dist.get_rank() == 1:
        dist.recv(np.zeros(1), 0)
        for number in range(8):
            dist.send(np.array([number]), 0, tag=1)


def test_any_source_and_given_ones_in_posting_order(world):
    world.run(any_source_beside_given)


def sources_in_a_group():
    # Flat calls speak of global ranks, methods of ranks in the group.
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([size - 1, 0], sort_ranks=False)
    x = np.zeros(1)
    if rank == size - 1:
        for _ in range(5):
            group.send(x, 1)
        for _ in range(2):
            group.send_object_list(["a"], 1)
        for _ in range(2):
            group.send(x, 1)
    elif rank == 0:
        cases.same(dist.recv(x, group=group), size - 1, "flat, any")
        cases.same(group.recv(x), 0, "method, any")
        cases.same(group.recv(x, 0), 0, "method")
        cases.same(dist.recv(x, group=group, group_src=-1), size - 1, "flat, group_src=-1")
        cases.same(dist.recv(x, None, group, 0, 0), size - 1, "flat, group_src")
        things = [None]
        cases.same(dist.recv_object_list(things, group=group, group_src=0), size - 1, "objects, flat, group_src")
        cases.same(group.recv_object_list(things, 0), 0, "objects, method")
        cases.same(group.irecv(x).source_rank(), size - 1, "irecv, method, any")
        cases.same(dist.irecv(x, size - 1, group=group).source_rank(), size - 1, "irecv, flat")


def test_sources_in_a_group(world):
    world.run(sources_in_a_group)


def receiver_comes_late(num_bytes, count):
    # isend comes back though nobody receives; sender and receiver make a collective before they wait.
    rank = dist.get_rank()
    group = dist.new_group()
    arrays = [np.full(num_bytes, number % 251, np.uint8) for number in range(count)]
    if rank == 0:
        works = [group.isend(array, 1) for array in arrays]
        dist.barrier()
        for work in works:
            work.wait(30)
    elif rank == 1:
        dist.barrier()
        for array in arrays:
            x = np.zeros_like(array)
            group.recv(x, 0)
            assert (x == array).all()
    else:
        dist.barrier()


@pytest.mark.parametrize(("num_bytes", "count"), [(2048 * KIB, 3), (60 * KIB, 40), (8, 3000)])
def test_isend_never_blocks(world_of_2, num_bytes, count):
    world_of_2.run(receiver_comes_late, num_bytes, count)


def by_themselves(num_bytes):
    # Both sides begin and never call into a message again: the sync exchange afterwards says that all is there.
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    x, y = np.full(num_bytes, rank, np.uint8), np.zeros(num_bytes, np.uint8)
    take, give = dist.irecv(y, before), dist.isend(x, after)
    done = []
    for work in (take, give):
        work.get_future().add_done_callback(lambda _: done.append(1))
    end = Deadline(30.0)
    while len(done) < 2 and not end.expired():
        pass
    cases.same((take.is_success(), give.is_success(), set(y.tolist())), (True, True, {before}), "by themselves")


@pytest.mark.parametrize("num_bytes", [8, 64 * KIB + 1, 1000 * KIB])
def test_messages_go_on_by_themselves(world, num_bytes):
    world.run(by_themselves, num_bytes)


def many_in_flight(count):
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    taken = [np.zeros(1, int) for _ in range(count)]
    works = [dist.irecv(x, before, tag=number % 7) for number, x in enumerate(taken)]
    works += [dist.isend(np.array([number]), after, tag=number % 7) for number in range(count)]
    for work in works:
        work.wait(60)
    cases.same([x.item() for x in taken], list(range(count)), "many in flight")


def test_many_in_flight(world):
    world.run(many_in_flight, 2000)


def pairs_meet(rounds):
    """Make messages of one number known to both sides, so that receives of them are not posted at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for number in range(rounds):
        taken = [np.full(1, -1.0) for _ in range(size)]
        works = [dist.irecv(taken[peer], peer, tag=5) for peer in range(size) if peer != rank]
        works += [dist.isend(np.full(1, 10.0 * number + rank), peer, tag=5) for peer in range(size) if peer != rank]
        for work in works[:: 1 if number % 2 else -1]:
            work.wait()
        assert [x.item() for x in taken] == [-1 if peer == rank else 10 * number + peer for peer in range(size)]
    return rank, size


def in_posting_order_of_all_kinds():
    rank, size = pairs_meet(6)
    after, before = (rank + 1) % size, (rank - 1) % size
    for number in range(4):
        for value in range(7):
            dist.send(np.full(1, float(value)), after, tag=5)
        dist.send(np.full(1, -1.0), after, tag=6)
        x = [np.zeros(1) for _ in range(7)]
        works = [dist.irecv(x[0], before, tag=5), dist.irecv(x[1], before, tag=5)]
        if number == 1:
            dist.recv(np.zeros(1), before, tag=6)
        dist.recv(x[2], before, tag=5)
        works.append(dist.irecv(x[3], before, tag=5))
        works.append(dist.irecv(x[4], None if size == 2 else before, tag=5))
        works += [dist.irecv(x[k], before, tag=5) for k in (5, 6)]
        if number != 1:
            other = dist.irecv(np.zeros(1), before, tag=6)
            assert other.source_rank() == before
        works[2].wait()
        for work in works[::-1]:
            work.wait()
            assert work.source_rank() == before
        assert [y.item() for y in x] == [*range(7)]
        dist.barrier()


def test_receives_of_known_messages_are_matched_in_posting_order(world):
    world.run(in_posting_order_of_all_kinds)


def without_a_wait():
    rank, size = pairs_meet(6)
    after, before = (rank + 1) % size, (rank - 1) % size
    for _ in range(3):
        x, y, seen = np.zeros(1), np.zeros(1), []
        polled, told = dist.irecv(x, before, tag=5), dist.irecv(y, before, tag=5)
        told.get_future().add_done_callback(lambda _, y=y, seen=seen: seen.append(y.item()))
        dist.send(np.full(1, 1.0), after, tag=5)
        dist.send(np.full(1, 2.0), after, tag=5)
        deadline = Deadline(20)
        while not (polled.is_completed() and seen):
            assert not deadline.expired()
        assert (x.item(), seen) == (1.0, [2.0])
        assert polled.is_success()
        dist.barrier()


def test_receives_of_known_messages_end_without_a_wait(world):
    world.run(without_a_wait)


def asked_for_success_alone():
    rank, size = pairs_meet(6)
    x = np.zeros(1)
    for number in range(3):
        work = dist.irecv(x, (rank - 1) % size, tag=5)
        dist.send(np.full(1, float(number)), (rank + 1) % size, tag=5)
        deadline = Deadline(20)
        while not work.is_success():
            assert not deadline.expired()
        assert x.item() == number


def test_receives_of_known_messages_end_if_one_asks_for_their_success(world):
    world.run(asked_for_success_alone)


def more_than_buffers_hold(count):
    rank, size = pairs_meet(6)
    after, before = (rank + 1) % size, (rank - 1) % size
    taken = [np.zeros(1) for _ in range(count)]
    works = [dist.irecv(x, before, tag=5) for x in taken]
    for number in range(count):
        dist.send(np.full(1, float(number)), after, tag=5)
    dist.barrier()
    for work in works:
        work.wait()
    assert [x.item() for x in taken] == [*range(count)]


def test_receives_that_are_posted_make_room(world_of_2):
    """All send more than any buffer holds, before anyone waits for what was posted to receive it."""
    world_of_2.run(more_than_buffers_hold, 5000)


def receives_that_fail():
    rank, size = pairs_meet(6)
    before = (rank - 1) % size
    group = dist.new_group()
    for _ in range(4):
        work = group.irecv(np.zeros(1), before)
        group.send(np.zeros(1), (rank + 1) % size)
        work.wait()
    works = [group.irecv(np.zeros(1), before) for _ in range(3)]
    with pytest.raises(dist.DistTimeoutError):
        works[1].wait(timeout=0.05)
    works.append(group.irecv(np.zeros(1), before))
    dist.barrier()
    group.abort("enough")
    for work in works:
        with pytest.raises(dist.DistBackendError, match="enough"):
            work.wait()
    # Deadlocks are proven only if no call of the rank is still on record as going on.
    open_calls = [call["text"] for call in dist.flight_recorder()["records"] if call["completed_s"] is None]
    assert not [text for text in open_calls if text.startswith("irecv")]


def test_receives_of_known_messages_fail_with_their_group(world):
    world.run(receives_that_fail)


def one_tag_each(count):
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    taken = [np.zeros(1, int) for _ in range(count)]
    works = [dist.irecv(x, before, tag=number) for number, x in enumerate(taken)]
    works += [dist.isend(np.array([number]), after, tag=number) for number in reversed(range(count))]
    for work in works:
        work.wait(60)
    cases.same([x.item() for x in taken], list(range(count)), "a tag for each")


def test_a_tag_for_each_message(world_of_2):
    world_of_2.run(one_tag_each, 500)


def strided():
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape, layout in cases.SMALL:
        before, after = (rank - 1) % size, (rank + 1) % size
        give = cases.Placed(cases.values("float32", shape, rank), layout)
        take = cases.Placed(np.zeros(shape, np.float32), layout)
        works = [dist.irecv(take.view, before), dist.isend(give.view, after)]
        for work in works:
            work.wait(30)
        take.check(cases.values("float32", shape, before), f"irecv of {shape}")
        give.check_unchanged(f"isend of {shape}")


def test_any_layout(world):
    world.run(strided)


def batches():
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    take, token = np.zeros(50_000), np.zeros(1)
    ops = [
        dist.P2POp(dist.isend, np.full(50_000, float(rank)), after, tag=1),
        dist.P2POp(dist.irecv, token, group_peer=before, tag=2),
        dist.P2POp(dist.irecv, take, before, dist.group.WORLD, 1),
        dist.P2POp(dist.isend, np.array([float(rank)]), after, tag=2),
    ]
    works = dist.batch_isend_irecv(ops)
    for work in works:
        work.wait(30)
    cases.same((len(works), token.item(), set(take.tolist())), (4, float(before), {float(before)}), "batch")
    fails(ValueError, lambda: dist.P2POp(dist.send, token, after), "isend", "irecv")
    fails(TypeError, lambda: dist.batch_isend_irecv([works[0]]), "P2POp", "Work")
    cases.same(dist.batch_isend_irecv([]), [], "an empty batch")


def test_batches(world):
    world.run(batches)


def over_2_gib(num_bytes):
    # Memory that nobody wrote takes no room at the sender.
    places = [0, 1 << 30, (1 << 31) - 1, 1 << 31, num_bytes - 1]
    x = np.zeros(num_bytes if dist.get_rank() < 2 else 0, np.uint8)
    if dist.get_rank() == 0:
        x[places] = range(1, 6)
        dist.isend(x, 1).wait(60)
    elif dist.get_rank() == 1:
        dist.recv(x, 0)
        assert x[places].tolist() == list(range(1, 6))
        assert np.count_nonzero(x[-1000:]) == 1


@pytest.mark.parametrize("way", ["gloo", "gloo-slots", *(["mpi-openmpi", "mpi-mpich"] if RUNS_ALL else [])])
def test_messages_over_2_gib(worlds, way):
    num_bytes = (1 << 31) + 12_345
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 2 * num_bytes:
        pytest.skip(f"needs {2 * num_bytes >> 20} MiB of free memory, there are {free >> 20}")
    worlds.world(way, 2).run(over_2_gib, num_bytes)
