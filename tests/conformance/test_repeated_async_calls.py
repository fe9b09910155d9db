"""Async calls and messages that were made before, which the compiled core carries out: in any order and number."""

import gc
import weakref

import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(60)
# As often a call is made before all that a backend learns of it is known.
TIMES = 4


@pytest.fixture(params=["threads", "gloo"])
def pair(request, worlds):
    return worlds.world(request.param, 2)


@pytest.fixture
def trio(worlds):
    return worlds.world("gloo", 3)


def begin(x, group=None):
    return dist.all_reduce(x, group=group, async_op=True)


def learn(group=None):
    for _ in range(TIMES):
        begin(np.ones(2), group).wait()


def in_every_order(order):
    learn()
    rank = dist.get_rank()
    for turn in range(3):
        arrays = [np.full(2, float(turn + number + rank)) for number in range(100)]
        works = [begin(array) for array in arrays]
        for place in order(len(works), rank):
            assert works[place].wait() is True
            assert works[place].is_success()
            assert works[place].result() is arrays[place]
        assert all(work.wait(5) for work in works)
        assert [array.tolist() for array in arrays] == [[2.0 * (turn + number) + 1] * 2 for number in range(100)]


def forwards(count, rank):
    return range(count)


def backwards(count, rank):
    return range(count)[::-1]


def each_rank_another_way(count, rank):
    return range(count)[:: 1 - 2 * rank]


def some(count, rank):
    return range(rank, count, 7)


@pytest.mark.parametrize("order", [forwards, backwards, each_rank_another_way, some])
def test_works_are_waited_for_in_any_order(pair, order):
    pair.run(in_every_order, order)


def mixed_with_others():
    learn()
    rank = dist.get_rank()
    x, y, gathered = np.zeros(2), np.zeros(3), np.zeros(4)
    for turn in range(30):
        x[:], y[:] = rank, turn
        works = [begin(x), dist.broadcast(x, turn % 2, async_op=True), begin(x)]
        if turn % 3 == 0:
            dist.all_reduce(y)
        works.append(dist.all_gather_into_tensor(gathered, x, async_op=True))
        if turn % 3 == 1:
            dist.all_reduce(y)
        dist.barrier() if turn % 5 == 0 else works[turn % 4].wait()
        for work in works:
            work.wait()
        assert x.tolist() == [2.0, 2.0]
        assert gathered.tolist() == [2.0] * 4
        assert y[0] == turn * (2 if turn % 3 < 2 else 1)


def test_mixed_with_sync_calls_and_other_kinds(pair):
    pair.run(mixed_with_others)


def nobody_keeps_anything():
    first = np.ones((2, 1))
    was_first = weakref.ref(first)
    for _ in range(TIMES):
        begin(first)
    del first
    total = np.zeros(2)
    for _ in range(50):
        array = np.ones(2)
        died = weakref.ref(array)
        begin(array)
        del array
        begin(total)
    dist.all_reduce(total)
    gc.collect()
    assert died() is None
    assert was_first() is None
    with dist.new_group() as group:
        learn(group)
        last = np.ones(2)
        for _ in range(10):
            begin(last, group)
    assert last.tolist() == [2.0**10] * 2


def test_dropped_works_and_arrays(pair):
    pair.run(nobody_keeps_anything)


def callbacks_are_called():
    learn()
    called = []
    works = [begin(np.full(2, float(number))) for number in range(20)]
    futures = [work.get_future() for work in works[::3]]
    after = [future.then(lambda done: called.append(done.value()[0][0])) for future in futures]
    works[-1].wait()
    for future in after:
        future.wait(10)
    assert called == [2.0 * number for number in range(0, 20, 3)]
    done = begin(np.ones(2))
    done.wait()
    assert done.get_future().wait(1)[0].tolist() == [2.0, 2.0]


def test_futures_of_known_calls(pair):
    pair.run(callbacks_are_called)


def late_peer(group):
    learn(group)
    x = np.ones(2)
    if dist.get_rank() == 0:
        works = [begin(x, group) for _ in range(3)]
        for work in (works[0], works[2], works[0]):
            with pytest.raises(dist.DistTimeoutError, match=r"not done after 0.01 s"):
                work.wait(0.01)
        assert not works[0].is_completed()
        dist.send(np.ones(1), 1)
    else:
        dist.recv(np.ones(1), 0)
        works = [begin(x, group) for _ in range(3)]
    for work in works:
        work.wait()
    assert x.tolist() == [8.0, 8.0]


def late_peers():
    late_peer(None)
    with dist.new_group() as group:
        late_peer(group)


def test_waits_that_time_out_are_repeated(pair):
    pair.run(late_peers)


def nobody_comes():
    group = dist.new_group(timeout=0.3)
    learn(group)
    if dist.get_rank() == 0:
        works = [begin(np.ones(2), group) for _ in range(3)]
        for work in works:
            with pytest.raises(dist.DistError, match=r"all_reduce.*rank 1|earlier failure.*rank 1"):
                work.wait()
        assert not works[0].is_success()
    dist.barrier()


def test_the_groups_timeout_holds_for_outstanding_calls(pair):
    pair.run(nobody_comes)


def broken(kind):
    group, rank = dist.new_group(), dist.get_rank()
    learn(group)
    if rank == 0:
        works = [begin(np.ones(2), group) for _ in range(3)]
        words = "failed: enough" if kind == "abort" else r"(?s)all_reduce.*broadcast|broadcast.*all_reduce"
        for number, work in enumerate(works):  # the errors of the later ones may name the first in a sentence
            with pytest.raises(dist.DistBackendError, match=f"{words}|earlier failure" if number else words):
                work.wait()
        with pytest.raises(dist.DistBackendError, match="earlier failure"):
            begin(np.ones(2), group)
    elif kind == "abort":
        group.abort("enough")
    else:
        with pytest.raises(dist.DistBackendError, match=r"(?s)all_reduce.*broadcast|broadcast.*all_reduce"):
            group.broadcast(np.ones(2), 0)
    dist.barrier()


@pytest.mark.parametrize("kind", ["abort", "another call"])
def test_outstanding_calls_of_a_group_that_breaks(pair, kind):
    pair.run(broken, kind)


def records_of_known_calls():
    with dist.new_group() as group:
        learn(group)
        if dist.get_rank() == 0:
            works = [begin(np.ones(2), group) for _ in range(2)]
            states = [record["state"] for record in dist.flight_recorder()["records"] if record["group"] == group.name]
            assert set(states[-2:]) <= {"queued", "started"}, states
            dist.barrier()
        else:
            dist.barrier()
            works = [begin(np.ones(2), group) for _ in range(2)]
        for work in works:
            work.wait()
        records = [record for record in dist.flight_recorder()["records"] if record["group"] == group.name]
        assert [record["sequence"] for record in records] == list(range(1, TIMES + 3))
        assert {record["state"] for record in records} == {"completed"}
        assert all(record["created_s"] <= record["started_s"] <= record["completed_s"] for record in records)


def test_outstanding_calls_are_recorded(pair):
    pair.run(records_of_known_calls)


def observed_meanwhile():
    learn()
    x = np.ones(2)
    works = [begin(x) for _ in range(3)]
    with dist.profile() as profile:
        works += [begin(x) for _ in range(2)]
        for work in works:
            work.wait()
    assert x.tolist() == [32.0, 32.0]
    return len(profile.events)


def test_a_profile_that_begins_while_calls_are_outstanding(pair):
    assert pair.run(observed_meanwhile) == [2, 2]


def swap(mine, theirs, tag=0):
    peer = 1 - dist.get_rank()
    return dist.irecv(theirs, peer, tag=tag), dist.isend(mine, peer, tag=tag)


def learn_messages(*tags):
    for _ in range(TIMES):
        for tag in tags:
            for work in swap(np.ones(2), np.zeros(2), tag):
                work.wait()


def messages_of_many_tags():
    learn_messages(0, 1, 2)
    rank = dist.get_rank()
    for turn in range(20):
        taken = {tag: np.zeros(2) for tag in (0, 1, 2)}
        works = [dist.irecv(taken[tag], 1 - rank, tag=tag) for tag in (0, 1, 2)]
        for tag in (2, 0, 1) if turn % 2 else (0, 1, 2):  # in the order of the receives, or in another
            dist.isend(np.full(2, 10.0 * turn + tag), 1 - rank, tag=tag)
        for place in (1, 0, 2) if turn % 4 < 2 else (0, 1, 2):
            assert works[place].wait() is True
            assert works[place].source_rank() == 1 - rank
        assert [taken[tag].tolist() for tag in (0, 1, 2)] == [[10.0 * turn + tag] * 2 for tag in (0, 1, 2)]


def test_messages_of_many_tags(pair):
    pair.run(messages_of_many_tags)


def messages_mixed_with_others():
    learn_messages(0)
    rank = dist.get_rank()
    for turn in range(20):
        first, second, third, total = np.zeros(2), np.zeros(2), np.zeros(2), np.ones(1)
        receiving = [dist.irecv(first, 1 - rank), dist.irecv(second, 1 - rank)]
        sending = [dist.isend(np.full(2, float(number + turn)), 1 - rank) for number in range(3)]
        if turn % 2:
            dist.all_reduce(total)
        if turn % 3 == 0:  # an earlier receive gets the earlier message
            dist.recv(third, 1 - rank)
        elif turn % 3 == 1:
            dist.recv(third)
        else:
            receiving.append(dist.irecv(third))
        while not receiving[0].is_completed() and turn % 2:
            dist.get_rank()
        for work in (*receiving[::-1], *sending):
            work.wait()
        assert [x[0] - turn for x in (first, second, third)] == [0.0, 1.0, 2.0]


def test_messages_mixed_with_other_receives(pair):
    pair.run(messages_mixed_with_others)


def more_receives_than_are_held_back():
    learn_messages(0)
    rank, count = dist.get_rank(), 200
    taken = [np.zeros(2) for _ in range(count)]
    works = [dist.irecv(x, 1 - rank) for x in taken]
    for number in range(count):
        dist.isend(np.full(2, float(number)), 1 - rank)
    for work in works[::-1]:
        work.wait()
    assert [x[0] for x in taken] == [*range(count)]


def test_more_receives_than_are_held_back(pair):
    pair.run(more_receives_than_are_held_back)


def more_sends_than_the_buffers_hold():
    learn_messages(0)
    rank = dist.get_rank()
    x, long = np.arange(2048.0), np.arange(100_000.0)
    for _ in range(TIMES):
        for work in swap(x, np.zeros_like(x)):
            work.wait()
    works = [dist.isend(x, 1 - rank) for _ in range(100)] + [dist.isend(long, 1 - rank)]
    taken = [np.zeros_like(x) for _ in range(100)] + [np.zeros_like(long)]
    works += [dist.irecv(y, 1 - rank) for y in taken]
    for work in works[::-1]:
        work.wait()
    assert all((y == np.arange(y.size)).all() for y in taken)


def test_more_sends_than_the_buffers_hold(pair):
    pair.run(more_sends_than_the_buffers_hold)


def a_message_that_comes_late():
    learn_messages(0)
    x, y = np.zeros(2), np.zeros(2)
    if dist.get_rank() == 0:
        works = [dist.irecv(x, 1), dist.irecv(y, 1)]
        for work in works:
            with pytest.raises(
                dist.DistTimeoutError, match=r"not done after 0.01 s.* waiting for a message from rank 1"
            ):
                work.wait(0.01)
        dist.barrier()
        for work in works:
            assert work.wait()
        assert [x[0], y[0]] == [1.0, 2.0]
    else:
        dist.barrier()
        dist.isend(np.full(2, 1.0), 0)
        dist.isend(np.full(2, 2.0), 0).wait()


def test_a_message_that_comes_late(pair):
    pair.run(a_message_that_comes_late)


def receives_of_a_group_that_breaks():
    group, rank = dist.new_group(), dist.get_rank()
    for _ in range(TIMES):
        work = group.irecv(np.zeros(2), 1 - rank)
        group.isend(np.ones(2), 1 - rank).wait()
        work.wait()
    if rank == 0:
        works = [group.irecv(np.zeros(2), 1) for _ in range(3)]
        dist.barrier()
        for work in works:
            with pytest.raises(dist.DistBackendError, match="failed: enough"):
                work.wait()
    else:
        dist.barrier()
        group.abort("enough")
    dist.barrier()


def test_receives_of_a_group_that_breaks(pair):
    pair.run(receives_of_a_group_that_breaks)


def from_anybody():
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [peer for peer in range(size) if peer != rank]
    for turn in range(12):
        known = [np.zeros(2) for _ in others]
        receiving = [dist.irecv(x, peer, tag=1) for x, peer in zip(known, others, strict=True)]
        anybodys = [np.zeros(2) for _ in others]
        receiving += [dist.irecv(x) for x in anybodys]
        sending = [dist.isend(np.full(2, 10.0 * rank + tag), peer, tag=tag) for peer in others for tag in (0, 1)]
        for work in receiving[:: 1 if turn % 2 else -1]:
            work.wait()
        for work in sending:
            work.wait()
        assert [x[0] for x in known] == [10.0 * peer + 1 for peer in others]
        assert sorted(x[0] for x in anybodys) == [10.0 * peer for peer in others]
        assert sorted(work.source_rank() for work in receiving) == sorted(2 * others)
        dist.barrier()  # a message of the next turn would do as well


def test_known_receives_beside_those_from_anybody(trio):
    trio.run(from_anybody)


LONG = 50_000  # elements: 400 kB, longer than what `send` buffers


def swaps_of_long_messages():
    rank = dist.get_rank()
    for turn in range(12):
        x, y = np.arange(LONG) + 100.0 * rank + turn, np.zeros(LONG)
        receiving, sending = swap(x, y)
        if turn % 2:
            x, y = y, x
        for work in (receiving, sending) if turn % 3 else (sending, receiving):
            work.wait()
        taken = x if turn % 2 else y
        assert (taken == np.arange(LONG) + 100.0 * (1 - rank) + turn).all()
        assert receiving.source_rank() == 1 - rank


def test_swaps_of_long_messages(pair):
    pair.run(swaps_of_long_messages)


def long_messages_there_and_back(lengths):
    rank = dist.get_rank()
    for _ in range(TIMES):
        for length in lengths:
            x, y = np.arange(float(length)), np.zeros(length)
            if rank == 0:
                dist.send(x, 1, tag=3)
                dist.recv(y, 1)
            else:
                dist.recv(y, 0, tag=3)
                dist.send(y, 0)
            assert (x == y).all()


def test_long_messages_there_and_back(pair):
    pair.run(long_messages_there_and_back, [9_000, LONG, 1 << 17, (1 << 17) + 1, 1, 40_000])


def one_way_while_the_receiver_does_other_things():
    """A receive that nobody waits for is posted: its sender, which waits, comes to the call that all make."""
    rank = dist.get_rank()
    x, total = np.full(LONG, 7.0), np.ones(1)
    for turn in range(8):
        taken = np.zeros(LONG)
        works = [dist.irecv(taken, 0)] if rank else []
        if rank == 0:
            dist.send(x, 1)
        if turn % 2:
            dist.all_reduce(total)
        else:
            dist.all_reduce(total, async_op=True).wait()
        for work in works:
            work.wait()
        assert rank == 0 or (taken == 7.0).all()


def test_a_sender_that_waits_needs_no_wait_of_the_receiver(pair):
    pair.run(one_way_while_the_receiver_does_other_things)


def more_long_messages_than_the_buffers_hold():
    rank, count = dist.get_rank(), 12
    swaps_of_long_messages()
    arrays = [np.full(LONG, float(number)) for number in range(count)]
    taken = [np.zeros(LONG) for _ in range(count)]
    works = [dist.isend(x, 1 - rank) for x in arrays]
    small = dist.isend(np.ones(2), 1 - rank, tag=1)
    works += [dist.irecv(y, 1 - rank) for y in taken]
    last = np.zeros(2)
    dist.recv(last, 1 - rank, tag=1)
    for work in works[::-1]:
        work.wait()
    small.wait()
    assert [set(y.tolist()) for y in taken] == [{float(number)} for number in range(count)]
    assert last[0] == 1.0


def test_more_long_messages_than_the_buffers_hold(pair):
    pair.run(more_long_messages_than_the_buffers_hold)


def a_long_message_that_comes_late():
    rank = dist.get_rank()
    long_messages_there_and_back([LONG])
    x, y = np.ones(LONG), np.zeros(LONG)
    group = dist.new_group(timeout=0.3)
    for _ in range(TIMES):
        group.send(x, 1) if rank == 0 else group.recv(y, 0)
    dist.barrier()
    if rank == 0:
        with pytest.raises(dist.DistTimeoutError, match="send on group .* waiting for rank 1.* to receive a message"):
            group.send(x, 1)
    dist.barrier()


def test_a_long_message_that_nobody_receives(pair):
    pair.run(a_long_message_that_comes_late)


def long_messages_of_other_sizes():
    rank = dist.get_rank()
    long_messages_there_and_back([LONG])
    group = dist.new_group()
    for _ in range(TIMES):
        group.send(np.ones(LONG), 1) if rank == 0 else group.recv(np.ones(LONG), 0)
    if rank == 0:
        group.isend(np.ones(LONG), 1)
        dist.barrier()
    else:
        with pytest.raises(dist.DistBackendError, match=rf"sent float64\[{LONG}\], .* float64\[{LONG + 1}\]; "):
            group.recv(np.ones(LONG + 1), 0)
        dist.barrier()


def test_a_long_message_that_does_not_fit(pair):
    pair.run(long_messages_of_other_sizes)
