"""isend, irecv, any source, batches: order, tags, sizes, and messages that go on by themselves."""

import itertools
import os
import signal

import cases
import numpy as np
import pytest
from worlds import Crew

import meshdist as dist
from meshdist.deadline import Deadline

pytestmark = pytest.mark.timeout(120)
KIB = cases.KIB
SIZES = (0, 8, 64 * KIB, 64 * KIB + 8, 300 * KIB)


@pytest.fixture(params=[2, 3, 4])
def world(request, worlds, backend):
    return worlds.world(backend, request.param)


@pytest.fixture(params=["threads", "gloo", "gloo-slots"])
def backend(request):
    return request.param


@pytest.fixture
def world_of_2(worlds, backend):
    return worlds.world(backend, 2)


def fails(error, call, *words):
    """Check that `call` raises, and what it says."""
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


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
        for _ in range(6):
            group.send(x, 1)
    elif rank == 0:
        cases.same(dist.recv(x, group=group), size - 1, "flat, any")
        cases.same(group.recv(x), 0, "method, any")
        cases.same(group.recv(x, 0), 0, "method")
        cases.same(dist.recv(x, group=group, group_src=-1), 0, "group_src=-1")
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


def wrong_arguments():
    rank, size, x = dist.get_rank(), dist.get_world_size(), np.zeros(1)
    for function, name in ((dist.isend, "dst"), (dist.irecv, "src")):
        where = f"{'isend' if name == 'dst' else 'irecv'} on group 'world'"
        fails(ValueError, lambda f=function: f(x, rank), where, "another rank")
        fails(ValueError, lambda f=function: f(x, size), where, "must be a member")
        fails(ValueError, lambda f=function: f(x, (rank + 1) % size, tag=-1), where, "tag")
        fails(TypeError, lambda f=function: f(x, (rank + 1) % size, tag="one"), where, "tag")
        fails(TypeError, lambda f=function: f("text", (rank + 1) % size), where, "array")
        fails(ValueError, lambda f=function, n=name: f(x, 0, **{f"group_{n}": 0}), where, "both")
    fails(ValueError, lambda: dist.isend(x), "neither")
    fails(ValueError, lambda: dist.irecv(np.broadcast_to(x, (3,)), (rank + 1) % size), "irecv", "read-only")


def test_wrong_arguments_are_raised_by_the_call(world_of_2):
    world_of_2.run(wrong_arguments)


def misfit(num_bytes, asynchronous):
    # The receiver's array is of another size: an error on both sides, at the next call where the message was buffered.
    group, rank = dist.new_group(), dist.get_rank()
    if rank == 0:
        x = np.zeros(num_bytes, np.uint8)

        def until_told():
            dist.recv(np.zeros(1), 1)
            group.isend(x, 1).wait(30)

        if num_bytes > 64 * KIB:
            fails(dist.DistBackendError, group.isend(x, 1).wait, f"{num_bytes + 1}", "isend")
            dist.recv(np.zeros(1), 1)
        else:
            group.isend(x, 1).wait(30)
            fails(dist.DistBackendError, until_told, f"{num_bytes + 1}", "isend")
    else:
        y = np.full(num_bytes + 1, 7, np.uint8)
        if asynchronous:
            work = group.irecv(y, 0)
            for _ in range(2):
                fails(dist.DistBackendError, work.wait, f"{num_bytes} bytes", f"{num_bytes + 1}", "irecv")
            assert isinstance(work.exception(), dist.DistBackendError)
        else:
            fails(dist.DistBackendError, lambda: group.recv(y, 0), f"{num_bytes} bytes", f"{num_bytes + 1}", "recv")
        cases.same(set(y.tolist()), {7}, "an array that nothing fits")
        dist.send(np.zeros(1), 0)


@pytest.mark.parametrize("num_bytes", [8, 100 * KIB])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["recv", "irecv"])
def test_a_message_that_does_not_fit(worlds, backend, num_bytes, asynchronous):
    worlds.world(backend, 2).run(misfit, num_bytes, asynchronous)


def broken_while_waiting():
    # Another call breaks the group: a receipt that waits in it ends as well.
    group, rank = dist.new_group(), dist.get_rank()
    work = group.irecv(np.zeros(1), 1 - rank, tag=9)
    fails(dist.DistBackendError, lambda: group.all_reduce(np.zeros(3 + rank)), "float64")
    fails(dist.DistBackendError, lambda: work.wait(30))


def test_a_receipt_ends_with_its_group(world_of_2):
    world_of_2.run(broken_while_waiting)


def destroyed_with_receipts():
    group, rank = dist.new_group(), dist.get_rank()
    x = np.zeros(200_000)
    if rank == 0:
        work = group.isend(np.ones(200_000), 1)
    else:
        work = group.irecv(x, 0)
    dist.destroy_process_group(group)
    cases.same((work.exception(), x[0]), (None, float(rank)), "drained")


def test_destroy_drains_messages(world_of_2):
    world_of_2.run(destroyed_with_receipts)


def every_send_waits():
    x, group = np.zeros(1), dist.new_group()
    if dist.get_rank() == 0:
        work = group.isend(x, 1)
        fails(dist.DistTimeoutError, lambda: work.wait(0.05), "isend")
        go_on = dist.isend(x, 1)
        work.wait(30)
        go_on.wait(30)
    else:
        dist.recv(x, 0)
        group.recv(x, 0)


def zero_bytes():
    rank, x = dist.get_rank(), np.zeros(0)
    works = [dist.irecv(x, 1 - rank), dist.isend(x, 1 - rank)]
    for work in works:
        work.wait(30)


@pytest.mark.parametrize("single_copy", ["1", "0"])
def test_with_a_limit_of_0_every_send_waits(worlds, single_copy):
    variables = {"MESHDIST_EAGER_LIMIT": "0", "MESHDIST_SINGLE_COPY": single_copy}
    with Crew(worlds.nursery, 2, variables) as crew:
        crew.join()
        for program in (every_send_waits, zero_bytes):
            crew.start(program)
            crew.gather()


def test_with_a_limit_of_0_every_send_waits_on_threads(monkeypatch):
    monkeypatch.setenv("MESHDIST_EAGER_LIMIT", "0")
    dist.run(every_send_waits, 2, timeout=30)
    dist.run(zero_bytes, 2, timeout=30)


def test_a_limit_that_is_no_number(monkeypatch):
    monkeypatch.setenv("MESHDIST_EAGER_LIMIT", "64k")
    with pytest.raises(ValueError, match=r"MESHDIST_EAGER_LIMIT.*'64k'"):
        dist.run(lambda: dist.barrier(), 2, timeout=30)


def largest_buffered(num_bytes):
    if dist.get_rank() == 0:
        dist.isend(np.ones(num_bytes, np.uint8), 1).wait(30)
        dist.isend(np.ones(num_bytes + 10_000_000, np.uint8), 1).wait(30)
    else:
        for size in (num_bytes, num_bytes + 10_000_000):
            x = np.zeros(size, np.uint8)
            dist.recv(x, 0)
            assert x.all()


def test_a_limit_beyond_the_buffers(worlds):
    with Crew(worlds.nursery, 2, {"MESHDIST_EAGER_LIMIT": "1000000000"}) as crew:
        crew.join()
        for num_bytes, _ in itertools.product((100_000, 128 * KIB, 300 * KIB), range(2)):
            crew.start(largest_buffered, num_bytes)
            crew.gather()


def silent_peer_dies():
    # Rank 2 has sent before and is killed: a receipt of any source must not wait for ever.
    rank = dist.get_rank()
    if rank == 2:
        dist.send(np.zeros(1), 0)
    elif rank == 0:
        x = np.zeros(1)
        dist.recv(x)
    dist.barrier()


def killed():
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    elif dist.get_rank() == 0:
        fails(dist.DistBackendError, lambda: dist.recv(np.zeros(1)), "rank 2", "died")


def test_a_sender_that_dies_ends_a_receipt_of_any_source(worlds):
    with Crew(worlds.nursery, 3) as crew:
        crew.join()
        crew.start(silent_peer_dies)
        crew.gather()
        crew.start(killed)
        assert crew.outcome(0, 20) is None


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


@pytest.mark.parametrize("way", ["gloo", "gloo-slots"])
def test_messages_over_2_gib(worlds, way):
    num_bytes = (1 << 31) + 12_345
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 2 * num_bytes:
        pytest.skip(f"needs {2 * num_bytes >> 20} MiB of free memory, there are {free >> 20}")
    worlds.world(way, 2).run(over_2_gib, num_bytes)
