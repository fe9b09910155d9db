"""Lists of objects between two ranks: tags, any length, several outstanding, both ways, and errors."""

import sys
import threading
import types

import cases
import numpy as np
import pytest
from failing import fails

import meshdist as dist

pytestmark = pytest.mark.timeout(120)
KIB = cases.KIB
# Whose pickle is buffered; is sent by rendezvous; is copied between the arrays.
NUM_BYTES = (10, 300 * KIB, 8 * 1024 * KIB)
WAIT_S = 30


def text(num_bytes, number=0):
    return str(number) + "x" * num_bytes


def tags():
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for tag in (7, 2**62, 3):
            dist.isend_object_list([f"of tag {tag}"], size - 1, tag=tag)
        dist.send_object_list(["of tag 0"], size - 1)
        dist.send_object_list(["of tag 5", 5], size - 1, tag=np.int64(5))
    elif rank == size - 1:
        objects = [None, None]
        cases.same((dist.recv_object_list(objects, 0, tag=5), objects), (0, ["of tag 5", 5]), "blocking, tag 5")
        objects = [None]
        dist.recv_object_list(objects, 0)
        cases.same(objects, ["of tag 0"], "no tag")
        for tag in (3, 2**62, 7):
            cases.same(dist.irecv_object_list(0, tag=tag).result(), [f"of tag {tag}"], f"async, tag {tag}")


def test_tags(world_of_several):
    world_of_several.run(tags)


DONE, READY, START, EXIT = range(4)  # as in the master and worker of mpi4py's examples


def hand_out_by_tags():
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        while True:
            dist.send_object_list([], 0, tag=READY)
            info = dist.probe(0, tag=None)
            task = dist.irecv_object_list(0, tag=info.tag).result()
            if info.tag == EXIT:
                return None
            dist.send_object_list([*task, task[0] ** 2], 0, tag=DONE)
    tasks, found, num_working = list(range(10)), {}, size - 1
    while num_working:
        info = dist.probe(tag=None)
        data = dist.irecv_object_list(info.source, tag=info.tag).result()
        cases.same(len(data), info.count(), "count")
        if info.tag == DONE:
            found[data[0]] = data[1]
        elif tasks:
            dist.send_object_list([tasks.pop()], info.source, tag=START)
        else:
            dist.send_object_list([], info.source, tag=EXIT)
            num_working -= 1
    return found


def test_a_master_and_workers_as_with_mpi4py(world_of_several):
    assert world_of_several.run(hand_out_by_tags)[0] == {number: number**2 for number in range(10)}


def lists_of_any_length():
    rank, size = dist.get_rank(), dist.get_world_size()
    lists = [[], [None], [1, "two", 3.0], [{"x": np.arange(3)}] * 2, list(range(1000))]
    if rank == 0:
        for objects in lists:
            dist.send_object_list(objects, size - 1)
    elif rank == size - 1:
        for objects in lists:
            work = dist.irecv_object_list(0)
            assert work.wait(WAIT_S) is True
            found = work.result()
            cases.same((len(found), repr(found)), (len(objects), repr(objects)), "the list")
            assert work.result() is found
            cases.same((work.source_rank(), work.is_success()), (0, True), "the Work")


def test_the_receiver_need_not_know_the_length(world_of_several):
    world_of_several.run(lists_of_any_length)


def what_objects_share():
    shared = [1]
    if dist.get_rank() == 0:
        dist.send_object_list([shared, {"same": shared}], 1)
    elif dist.get_rank() == 1:
        one, other = dist.irecv_object_list(0).result()
        assert other["same"] is one


def test_what_the_objects_share_they_share_on_arrival(worlds):
    worlds.world("threads", 2).run(what_objects_share)


def both_ways(num_bytes):
    # All begin to send before any receives; without isend, this would be a deadlock.
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [peer for peer in range(size) if peer != rank]
    sent = [dist.isend_object_list([rank, text(num_bytes, n)], peer, tag=4) for peer in others for n in range(2)]
    for peer in others:
        first = dist.irecv_object_list(peer, tag=4)
        objects = [None, None]
        dist.recv_object_list(objects, peer, tag=4)
        cases.same(first.result() == [peer, text(num_bytes)], True, "the first")
        cases.same(objects == [peer, text(num_bytes, 1)], True, "the second")
    for work in sent:
        assert work.wait(WAIT_S)


@pytest.mark.parametrize("num_bytes", NUM_BYTES)
def test_all_send_before_they_receive(world_of_several, num_bytes):
    world_of_several.run(both_ways, num_bytes)


def several_outstanding(num_bytes):
    # Of one source and tag, waited for in a different order, with arrays between.
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        works = [dist.isend_object_list([n, text(num_bytes, n)], size - 1, tag=9) for n in range(4)]
        works.append(dist.isend(np.arange(4.0), size - 1, tag=9))
        works += [dist.isend_object_list([n, text(num_bytes, n)], size - 1, tag=9) for n in range(4, 6)]
        for work in works:
            work.wait(WAIT_S)
    elif rank == size - 1:
        x = np.empty(4)
        before = [dist.irecv_object_list(0 if n % 2 else None, tag=9) for n in range(4)]
        array = dist.irecv(x, 0, tag=9)
        after = [dist.irecv_object_list(0, tag=9) for _ in range(2)]
        for number in (5, 3, 0, 4, 2, 1):
            number_of, content = [*before, *after][number].result()
            cases.same((number_of, content == text(num_bytes, number)), (number, True), "the order")
        array.wait(WAIT_S)
        cases.same(x.tolist(), [0, 1, 2, 3], "the array between")


@pytest.mark.parametrize("num_bytes", NUM_BYTES[:2])
def test_several_outstanding_keep_their_order(world_of_several, num_bytes):
    world_of_several.run(several_outstanding, num_bytes)


def among_arrays(num_bytes):
    # The arrays are known after the first round, and take other ways than lists; the order is that of the calls.
    rank, size, rounds = dist.get_rank(), dist.get_world_size(), 12
    group = dist.new_group([0, size - 1])
    if rank == 0:
        works = []
        for number in range(rounds):
            array = np.full(num_bytes, number, np.uint8)
            works += [group.isend(array, 1), group.isend_object_list([number] * (number % 3), 1)]
            group.send(array[:8], 1)
            group.send_object_list([number, text(num_bytes)], 1)
        for work in works:
            work.wait(WAIT_S)
    elif rank == size - 1:
        x, y = np.empty(num_bytes, np.uint8), np.empty(8, np.uint8)
        for number in range(rounds):
            array, objects = group.irecv(x, 0), group.irecv_object_list(0)
            cases.same(group.recv(y, 0), 0, "the source")
            more = [None, None]
            group.recv_object_list(more, 0)
            array.wait(WAIT_S)
            cases.same((set(x.tolist()), set(y.tolist())), ({number}, {number}), "arrays")
            cases.same((objects.result(), more[0], len(more[1])), ([number] * (number % 3), number, num_bytes + 1), "")


@pytest.mark.parametrize("num_bytes", [8, 300 * KIB])
def test_the_order_among_arrays_of_the_same_tag(world_of_several, num_bytes):
    world_of_several.run(among_arrays, num_bytes)


def in_a_batch():
    rank, size = dist.get_rank(), dist.get_world_size()
    with dist.coalescing_manager() as calls:
        taken = dist.irecv_object_list((rank - 1) % size, tag=4)
        dist.isend_object_list([rank, text(300 * KIB)], (rank + 1) % size, tag=4)
    assert taken.is_completed()
    cases.same(taken.result()[0], (rank - 1) % size, "the list")
    assert calls.wait()


def test_a_batch_waits_for_objects(world):
    world.run(in_a_batch)


def from_anyone():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    if rank:
        for number in range(3):
            group.send_object_list([rank, number], size - 1, tag=1)
        return
    works = [group.irecv_object_list(tag=1) for _ in range(3 * (size - 1))]
    came = {other: [] for other in range(1, size)}
    for work in works:
        sender, number = work.result()
        cases.same(work.source_rank(), sender, "the sender's global rank")
        came[sender].append(number)
    cases.same(came, {other: [0, 1, 2] for other in came}, "what came")


def test_any_source(world_of_several):
    world_of_several.run(from_anyone)


def to_oneself():
    rank = dist.get_rank()
    where = f"(rank {rank} of {dist.get_world_size()})"
    fails(
        ValueError,
        lambda: dist.send_object_list([1], rank, tag=2),
        f"send_object_list on group 'world' {where}",
        "post one with irecv_object_list first, or call isend_object_list, which buffers the message",
    )
    fails(
        ValueError,
        lambda: dist.recv_object_list([1], rank, tag=2),
        "call isend_object_list before it, or irecv_object_list",
    )
    work = dist.irecv_object_list(rank, tag=2)
    assert not work.is_completed()
    dist.send_object_list(["me", rank], rank, tag=2)
    cases.same((work.result(), work.source_rank()), (["me", rank], rank), "posted first")
    dist.isend_object_list([text(300 * KIB)], rank, tag=2).wait(WAIT_S)
    cases.same(dist.probe(rank, tag=2).count(), 1, "probe")
    objects = [None]
    dist.recv_object_list(objects, rank, tag=2)
    cases.same(len(objects[0]), 300 * KIB + 1, "buffered")


def test_a_rank_sends_objects_to_itself(world):
    world.run(to_oneself)


def probed():
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        dist.send_object_list(["a", "b", "c"], size - 1, tag=6)
        dist.send(np.zeros(2), size - 1, tag=6)
    elif rank == size - 1:
        info = dist.probe(tag=None)
        cases.same((info.source, info.tag, info.dtype), (0, 6, None), "probe")
        cases.same((info.num_objects, info.count()), (3, 3), "the number of objects")
        assert repr(info).endswith(", 3 objects)")
        cases.same(dist.iprobe(0, tag=6), info, "iprobe")
        objects = [None] * info.count()
        dist.recv_object_list(objects, info.source, tag=info.tag)
        cases.same(objects, ["a", "b", "c"], "what was found")
        info = dist.probe(tag=None)
        cases.same((info.num_objects, info.count(), info.dtype), (None, 2, np.float64), "the array")
        dist.recv(np.empty(2), 0, tag=6)
        cases.same(dist.iprobe(tag=None), None, "no message is left, nor a part of one")


def test_probes_count_objects(world_of_several):
    world_of_several.run(probed)


class Picky:
    """Its unpickling fails."""

    def __reduce__(self):
        return int, ("no number",)


def unpickling_fails():
    rank = dist.get_rank()
    if rank == 0:
        for objects in ([Picky()], [Picky()], ["next"]):
            dist.send_object_list(objects, 1)
    elif rank == 1:
        work = dist.irecv_object_list(0)
        assert work.wait(WAIT_S) is True
        words = "an object that was sent to this rank cannot be unpickled here: ValueError: invalid literal for int()"
        fails(dist.DistError, work.result, words)
        fails(dist.DistError, work.get_future().wait, words)
        fails(dist.DistError, lambda: dist.recv_object_list([None], 0), words)
        cases.same(dist.irecv_object_list(0).result(), ["next"], "the group goes on")


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_an_object_that_cannot_be_unpickled_leaves_the_group_as_it_is(worlds, backend):
    worlds.world(backend, 2).run(unpickling_fails)


def of_a_module_that_is_elsewhere():
    rank = dist.get_rank()
    if rank == 0:
        module = sys.modules["only_here"] = types.ModuleType("only_here")
        module.Weights = type("Weights", (), {"__module__": "only_here"})
        given = module.Weights()
        calls = [
            lambda: dist.send_object_list([given], 1),
            lambda: dist.broadcast_object_list([given], 0),
            lambda: dist.scatter_object_list([None], [None, given], 0),
        ]
    else:
        calls = [
            lambda: dist.recv_object_list([None], 0),
            lambda: dist.broadcast_object_list([None], 0),
            lambda: dist.scatter_object_list([None], None, 0),
        ]
    for call in calls:
        if rank == 0:
            call()
            continue
        with pytest.raises(dist.DistError, match="No module named 'only_here'; the module that defines its") as raised:
            call()
        assert raised.value.__cause__ is None
        assert raised.value.__suppress_context__
    dist.barrier()


def test_an_object_whose_module_is_missing_here_says_so(worlds):
    worlds.world("gloo", 2).run(of_a_module_that_is_elsewhere)


class Reporting:
    """Tells in which thread it was unpickled."""

    def __reduce__(self):
        return threading.get_ident, ()


def in_which_thread():
    rank = dist.get_rank()
    if rank == 1:
        work = dist.irecv_object_list(0)
        dist.barrier()
        cases.same(work.result(), [threading.get_ident()], "the thread that unpickles")
        values = dist.irecv_object_list(0).get_future().then(lambda future: len(future.value()))
        cases.same(values.wait(WAIT_S), 2, "a callback")
    else:
        dist.barrier()
        dist.send_object_list([Reporting()], 1)
        dist.send_object_list([1, 2], 1)


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_the_thread_that_asks_unpickles(worlds, backend):
    worlds.world(backend, 2).run(in_which_thread)


def refused():
    rank, size = dist.get_rank(), dist.get_world_size()
    other = (rank + 1) % size
    group = dist.new_group(timeout=30)
    wrong = lambda: None  # noqa: E731 - what pickle refuses
    prefix = f"(rank {rank} of {size})"
    for kind, words, call in (
        (TypeError, "an object of type function cannot be pickled", lambda: group.isend_object_list([1, wrong], other)),
        (TypeError, "object_list must be a list, got str", lambda: group.isend_object_list("ab", other)),
        (TypeError, "tag must be an integer", lambda: group.irecv_object_list(other, tag="a")),
        (TypeError, "probe(tag=None) first, then irecv_object_list(", lambda: group.irecv_object_list(tag=None)),
        (ValueError, "tag must not be negative, got -1", lambda: group.send_object_list([1], other, tag=-1)),
        (ValueError, "tag must not be negative, got -1", lambda: group.isend_object_list([1], other, tag=-1)),
        (ValueError, "tag must not be negative, got -2", lambda: group.recv_object_list([1], other, tag=-2)),
        (ValueError, "tag must not be negative, got -2", lambda: group.irecv_object_list(other, tag=-2)),
        (ValueError, "must be a rank in the group", lambda: group.irecv_object_list(size)),
        (ValueError, "dst", lambda: group.isend_object_list([1])),
        (TypeError, "write objects = irecv_object_list(src).result()", lambda: group.irecv_object_list([None])),
    ):
        fails(kind, call, "object_list on group ", prefix, words)
    group.isend_object_list(["nothing was sent before"], (rank + 1) % size)
    cases.same(group.irecv_object_list((rank - 1) % size).result(), ["nothing was sent before"], "the next message")


def test_what_is_refused_before_anything_is_sent(world_of_several):
    world_of_several.run(refused)


def nothing_comes(receive):
    group = dist.new_group(timeout=1.0, group_desc="pair")
    if group.rank() == 0:
        group.isend_object_list(["with another tag"], 1, tag=3)
        dist.recv_object_list([], 1, tag=9)
        return
    fails(
        dist.DistTimeoutError,
        lambda: receive(group),
        "recv_object_list on group 'pair' (rank 1 of 2): timed out after 1 s waiting for a message from rank 0",
        "with tag 2; a message with tag 3 is waiting to be received",
    )
    dist.send_object_list([], 0, tag=9)


def receive_a_list(group):
    group.recv_object_list([None], 0, tag=2)


def receive_any_list(group):
    group.irecv_object_list(0, tag=2).result()


@pytest.mark.parametrize("receive", [receive_a_list, receive_any_list])
@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-tcp"])
def test_deadlines_name_what_is_there(worlds, backend, receive):
    worlds.world(backend, 2).run(nothing_comes, receive)


def recorded():
    rank = dist.get_rank()
    dist.barrier()
    with dist.profile() as profile:
        if rank == 0:
            dist.isend_object_list(["a", text(1000)], 1, tag=8).wait(WAIT_S)
            dist.send_object_list(["b"], 1, tag=8)
        else:
            work = dist.irecv_object_list(tag=8)
            work.wait(WAIT_S)
            dist.recv_object_list([None], 0, tag=8)
    events = [(event.name, event.peer, event.tag, event.nbytes, event.is_async) for event in profile.events]
    records = dist.flight_recorder()["records"][-2:]
    return events, [(record["text"], record["sent"] + record["received"]) for record in records]


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_profiles_and_records_show_lists_as_one_message(worlds, backend):
    (sends, sent), (receives, received) = worlds.world(backend, 2).run(recorded)
    assert [(name, peer, tag, is_async) for name, peer, tag, _, is_async in sends] == [
        ("isend_object_list", 1, 8, True),
        ("send_object_list", 1, 8, False),
    ]
    assert [(name, peer, tag, is_async) for name, peer, tag, _, is_async in receives] == [
        ("irecv_object_list", 0, 8, True),
        ("recv_object_list", 0, 8, False),
    ]
    assert [event[3] for event in receives] == [event[3] for event in sends]
    assert sends[0][3] > 1000
    assert [words for words, _ in sent] == [
        "isend_object_list(2 objects to rank 1, tag=8)",
        "send_object_list(1 object to rank 1, tag=8)",
    ]
    assert [words for words, _ in received] == [
        "irecv_object_list(2 objects from any rank, tag=8)",
        "recv_object_list(1 object from rank 0, tag=8)",
    ]
    assert [arrays for _, arrays in received] == [[["uint8", [event[3]]]] for event in sends]
    assert [arrays for _, arrays in sent] == [arrays for _, arrays in received]


def all_send():
    group, other = dist.new_group(timeout=60), 1 - dist.get_rank()
    fails(
        dist.DistBackendError,
        lambda: group.send_object_list([text(8 * 1024 * KIB)], other),
        "deadlock: the ranks wait for each other",
        f"rank {other} waits for rank {1 - other} in send_object_list(1 object to rank {1 - other}, tag=0)",
        "\n  send with isend_object_list, and wait for it after the receive, or call sendrecv_object",
    )


@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-tcp"])
def test_ranks_that_all_send_first_learn_what_to_call(worlds, backend):
    worlds.drop(backend, 2)  # a rank with receives in progress, which an earlier test may have left, is in no proof
    worlds.world(backend, 2).run(all_send)


def into_an_empty_list():
    rank = dist.get_rank()
    for number in range(6):
        sent = [{"number": number}] * (number % 4)
        if rank == 0:
            dist.send_object_list(sent, 1, tag=3)
        elif rank == 1:
            objects = []
            assert dist.recv_object_list(objects, 0 if number % 2 else None, tag=3) == 0
            assert objects == sent


def test_an_empty_list_receives_any_number_of_objects(world_of_several):
    world_of_several.run(into_an_empty_list)


# ---- Single objects


def single_objects(num_bytes):
    """Rank 0 and the last rank send objects as such and in lists of one, and receive them as either, with tags."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for number in range(12):
        sent, tag = {"number": number, "text": text(num_bytes)}, number % 3
        if rank == 0 and number % 4 < 2:
            dist.send_object(sent, size - 1, tag=tag)
        elif rank == 0:
            dist.send_object_list([sent], size - 1, tag=tag)
        elif rank == size - 1 and number % 2:
            objects = [None]
            dist.recv_object_list(objects, 0, tag=tag)
            assert objects == [sent]
        elif rank == size - 1:
            assert dist.recv_object(0 if number % 4 else None, tag=tag) == sent
    work = dist.isend_object_list(["to itself"], rank, tag=9)
    assert dist.recv_object(rank, tag=9) == "to itself"
    work.wait(WAIT_S)


@pytest.mark.parametrize("num_bytes", [10, 300 * KIB])
def test_single_objects_are_lists_of_one(world_of_several, num_bytes):
    world_of_several.run(single_objects, num_bytes)


def around_a_ring(num_bytes):
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(reversed(range(size))), sort_ranks=False)
    right, left = (rank + 1) % size, (rank - 1) % size
    for number in range(4):
        given = [rank, number, text(num_bytes)]
        assert dist.sendrecv_object(given, right, left) == [left, number, text(num_bytes)]
        assert dist.sendrecv_object(given, left, right, tag=rank, recv_tag=right) == [right, number, text(num_bytes)]
        # In the group the ranks count down.
        place = group.rank()
        found = group.sendrecv_object(given, (place + 1) % size, (place - 1) % size, tag=4)
        assert found == [right, number, text(num_bytes)]
    assert dist.sendrecv_object("to itself", rank, rank) == "to itself"


@pytest.mark.parametrize("num_bytes", [10, 300 * KIB])
def test_objects_both_ways(world, num_bytes):
    world.run(around_a_ring, num_bytes)


def no_single_objects():
    group, rank = dist.new_group(timeout=WAIT_S), dist.get_rank()
    fails(TypeError, lambda: group.send_object(sys._getframe(), 1), "send_object on group", "frame cannot be pickled")
    fails(TypeError, lambda: group.sendrecv_object(sys._getframe(), 1, 0), "sendrecv_object on group", "frame")
    fails(ValueError, lambda: group.send_object(1), "send_object on group", "pass dst")
    fails(TypeError, lambda: group.recv_object(tag=None), "probe(tag=None) first, then recv_object(src=info.source")
    fails(ValueError, lambda: group.recv_object(tag=-1), "got -1; to receive a message of any tag, call info = probe")
    if rank == 0:
        group.send_object_list([1, 2], 1)
    elif rank == 1:
        words = "sent 2 objects, but this call receives 1 object; recv_object_list with an empty list receives any"
        fails(dist.DistBackendError, lambda: group.recv_object(0), "recv_object on group", words)


def test_what_is_no_single_object(world_of_several):
    world_of_several.run(no_single_objects)
