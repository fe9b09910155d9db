"""Receives from any rank, probes, and lists of objects like earlier ones, which the core makes again."""

import time
from functools import partial

import numpy as np
import pytest
from python_calls import python_functions

import meshdist as dist
from meshdist import core
from meshdist.runtime.flight_recorder import facts_in

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(core.module is None, reason=f"there is no compiled core: {core.missing}"),
]
# On the way of a message that Python receives, or sends.
BY_PYTHON = {"recv", "irecv", "probe", "iprobe", "send", "isend"}


def send_ten(group):
    """Send ten messages of each kind to rank 0 of the group, one after another."""
    x = np.zeros(2)
    for _ in range(10):
        for tag in range(3):
            group.send(x, 0, tag=tag)
        group.send_object_list([1, "two"], 0, tag=3)
        group.send_object_list([{"three": 3}], 0, tag=4)
        group.send_object({"four": 4}, 0, tag=5)


def receive_ten(group):
    """Return the functions that Python ran in the last receives of each kind, whose messages have come before."""
    x, objects, seen = np.zeros(2), [None, None], {}
    calls = {
        "any": lambda: group.recv(x),
        "irecv of any": lambda: group.irecv(x, tag=1).wait(),
        "probe": lambda: group.recv(x, group.probe(tag=2).source, tag=2),
        "objects": lambda: group.recv_object_list(objects, tag=3),
        "any objects": lambda: group.irecv_object_list(1, tag=4).result(),
        "one object": lambda: group.recv_object(tag=5),
    }
    for _ in range(10):
        for name, call in calls.items():
            seen[name] = python_functions(call)
    return seen


def messages_that_have_come():
    group = dist.new_group([1, 0], sort_ranks=False)
    if group.rank():
        send_ten(group)
    group.barrier()
    return None if group.rank() else receive_ten(group)


def test_messages_that_have_come_are_received_without_python(worlds):
    _, seen = worlds.world("gloo", 2).run(messages_that_have_come)
    assert {name: BY_PYTHON & set(functions) for name, functions in seen.items()} == {name: set() for name in seen}


def senders_of_a_group():
    """Return the sender that each call told, and what it had sent, in a group of the ranks 2, 0 and 3."""
    group = dist.new_group([2, 0, 3], sort_ranks=False)
    if group.rank() < 0:
        return None
    x, of_functions, of_methods = np.zeros(1), [], []
    for turn in range(8):
        if group.rank() == 1:
            of_functions.append((dist.probe(group=group, tag=None).source, dist.recv(x, group=group), x.item()))
            of_methods.append((group.probe(tag=None).source, group.recv(x), x.item()))
            while (found := dist.iprobe(group=group)) is None:
                pass
            work = dist.irecv(x, group=group)
            work.wait()
            of_functions.append((found.source, work.source_rank(), x.item()))
            objects = [None]
            while (found := group.iprobe()) is None:
                pass
            of_methods.append((found.source, group.recv_object_list(objects), objects[0]))
        elif group.rank() == turn % 2 * 2:
            for _ in range(3):
                group.send(np.array([float(dist.get_rank())]), 1)
            group.send_object_list([float(dist.get_rank())], 1)
            group.send(x, 1, tag=1)
        if group.rank() == 1:
            group.recv(x, tag=1)
        group.barrier()
    return of_functions, of_methods


def test_senders_are_global_ranks_to_functions_and_ranks_of_the_group_to_methods(worlds):
    of_functions, of_methods = worlds.world("gloo", 4).run(senders_of_a_group)[0]
    assert of_functions == [(rank, rank, rank) for _ in range(4) for rank in (2, 2, 3, 3)]
    assert of_methods == [(0 if rank == 2 else 2,) * 2 + (rank,) for _ in range(4) for rank in (2, 2, 3, 3)]


def a_late_sender():
    rank, x = dist.get_rank(), np.zeros(1)
    group = dist.new_group()
    if rank == 0:
        came = []
        while 2 not in came[-1:]:
            came.append(group.recv(x))
            if len(came) == 100:
                group.send(x, 2)
            group.send(x, 1, tag=2 if 2 in came[-1:] else 1)
        return len(came) > 100
    if rank == 1:
        tag = 1
        while tag == 1:  # there is always a message of this rank
            group.send(x, 0)
            tag = group.probe(0, tag=None).tag
            group.recv(x, 0, tag=tag)
    else:
        group.recv(x, 0)
        group.send(x, 0)
    return True


def test_a_rank_that_sends_later_than_others_is_heard(worlds):
    assert worlds.world("gloo", 3).run(a_late_sender) == [True] * 3


def posted_first():
    """A receive that is posted comes before later ones, also if these are from any rank."""
    rank, group = dist.get_rank(), dist.new_group()
    x, first, wrong = np.zeros(1), np.zeros(1), []
    for turn in range(20):
        if rank == 0:
            posted = group.irecv(first, 1)
            posted.is_completed()  # posts it
            group.barrier()
            group.recv(x)
            posted.wait()
            wrong += [(turn, first.item(), x.item())] * ((first.item(), x.item()) != (2.0 * turn, 2.0 * turn + 1))
        else:
            group.barrier()
            for number in range(2):
                group.send(np.array([2.0 * turn + number]), 0)
    return wrong


def test_what_is_posted_is_received_first(worlds):
    assert worlds.world("gloo", 2).run(posted_first) == [[], []]


def probe_beside_a_receive():
    rank, group, x, y = dist.get_rank(), dist.new_group(), np.zeros(1), np.zeros(1)
    found = []
    for _ in range(8):
        if rank == 0:
            work = group.irecv(x, 1, tag=4)
            work.is_completed()
            group.barrier()
            found.append(group.probe(tag=None).tag)
            group.recv(y, 1, tag=5)
            work.wait()
        else:
            group.barrier()
            group.send(x, 0, tag=4)
            group.send(x, 0, tag=5)
    return found


def test_a_probe_does_not_find_a_message_that_is_for_a_posted_receive(worlds):
    assert worlds.world("gloo", 2).run(probe_beside_a_receive)[0] == [5] * 8


def what_probes_tell():
    group = dist.new_group()
    shapes = [(np.float32, 3), (np.int8, 0), (np.complex128, 70_000)]
    told = []
    for turn in range(4):
        for dtype, size in shapes:
            if group.rank():
                group.isend(np.ones(size, dtype), 0, tag=7).wait()
                group.send_object_list([None] * turn, 0, tag=8)
                continue
            while (found := group.iprobe(1, tag=7)) is None:
                pass
            told.append((found.source, found.tag, found.nbytes, found.dtype, found.num_objects))
            group.recv(np.zeros(size, dtype), 1, tag=7)
            told.append(group.probe(tag=8).num_objects)
            group.recv_object_list([0] * turn, tag=8)
    return told


def test_probes_tell_what_has_come(worlds):
    expected = []
    for turn in range(4):
        for dtype, size in ((np.float32, 3), (np.int8, 0), (np.complex128, 70_000)):
            expected += [(1, 7, size * np.dtype(dtype).itemsize, np.dtype(dtype), None), turn]
    assert worlds.world("gloo", 2).run(what_probes_tell)[0] == expected


def iprobes_of_a_rank_that_ends():
    group, x = dist.new_group(), np.zeros(1)
    if group.rank():
        group.send(x, 0)
        dist.destroy_process_group(group)
        return None
    group.probe(1)
    group.iprobe(1)
    group.recv(x, 1)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            group.iprobe(1)
        except dist.DistBackendError as error:
            return str(error)
    return "no error"


def test_iprobe_notices_that_the_sender_has_left(worlds):
    told = worlds.world("gloo", 2).run(iprobes_of_a_rank_that_ends)[0]
    assert told.startswith("iprobe")
    assert "rank 1" in told


SIZES = (0, 10, 300, 5_000, 65_000, 66_000, 400_000, 40)


def objects_of_all_sizes():
    group = dist.new_group()
    other, wrong = 1 - group.rank(), []
    for turn in range(3):
        for size in SIZES:
            given = [bytes(size), {"turn": turn, "size": size}]
            work = group.isend_object_list(given, other, tag=1)
            given.append("later")  # it has been pickled
            taken = group.irecv_object_list(other, tag=1)
            result = taken.result()
            work.wait()
            wrong += [size] * (result != given[:2] or taken.source_rank() != other)
            if group.rank():
                group.send_object_list(given, other)
                group.recv_object_list(given, other)
            else:
                into = [None] * 3
                assert group.recv_object_list(into) == other
                wrong += [size] * (into != given)
                group.send_object_list(into, other)
    return wrong


def test_objects_of_all_sizes_keep_their_order(worlds):
    assert worlds.world("gloo", 2).run(objects_of_all_sizes) == [[], []]


def objects_like_other_arguments():
    """Exchange single objects, some of which are other arguments of the call too; return which came wrong."""
    other, came = 1 - dist.get_rank(), []
    objects = [None, 0, 1, True, 0, 1, [1], (), "obj", bytes(70_000), {"n": np.int8(3)}, [None]]
    for obj in objects * 2:
        for send in (
            lambda obj: dist.send_object(obj, other, tag=1),
            lambda obj: dist.send_object(tag=1, dst=other, obj=obj),
            lambda obj: dist.send_object(obj, tag=1, group_dst=other),
        ):
            if dist.get_rank():
                came.append(dist.recv_object(other, tag=1))
                send(obj)
            else:
                send(obj)
                came.append(dist.recv_object(tag=1))
    due = [obj for obj in objects * 2 for _ in range(3)]
    return [turn for turn, (got, obj) in enumerate(zip(came, due, strict=True)) if got != obj]


def test_a_single_object_may_be_another_argument_as_well(worlds):
    assert worlds.world("gloo", 2).run(objects_like_other_arguments) == [[], []]


def single_objects_and_lists():
    """Send lists and single objects, which are received as the others; return what came, and the last error."""
    group, came = dist.new_group(), []
    for turn in range(4):
        if group.rank():
            group.send_object_list([turn], 0)
            group.send_object(turn, 0)
        else:
            taken = [None]
            came.append(group.recv_object(1))
            group.recv_object_list(taken, 1)
            came += taken
    group.barrier()
    if group.rank():
        group.send_object_list([1, 2], 0)
        return came, ""
    try:
        return came, str(group.recv_object(1))
    except dist.DistBackendError as error:
        return came, str(error)


def test_a_single_object_is_a_list_of_one(worlds):
    (came, told), _ = worlds.world("gloo", 2).run(single_objects_and_lists)
    worlds.drop("gloo", 2)  # a message did not fit, which has failed the group
    assert came == [0, 0, 1, 1, 2, 2, 3, 3]
    assert "recv_object" in told
    assert "2 objects" in told


class Unpicklable:
    def __reduce__(self):
        raise ValueError("not this one")


def explode():
    raise RuntimeError("not here")


class Explosive:
    def __reduce__(self):
        return explode, ()


def objects_with_errors():
    group = dist.new_group()
    errors = []
    for turn in range(6):
        given = [Unpicklable() if turn == 4 else Explosive() if turn == 5 else turn]
        if group.rank():
            for send in (partial(group.send_object_list, given, 0), partial(group.send_object, given[0], 0)):
                try:
                    send()
                except (TypeError, ValueError) as error:
                    errors.append(str(error))
                    group.send_object_list([turn], 0)
        else:
            for recv in (partial(group.recv_object_list, given, 1), partial(group.recv_object, 1)):
                try:
                    recv()
                except dist.DistError as error:
                    errors.append(str(error))
    group.barrier()
    if group.rank():
        group.send_object_list([1, 2], 0)
    else:
        try:
            group.recv_object_list([0], 1)
        except dist.DistBackendError as error:
            errors.append(str(error))
    return errors


def test_errors_of_objects_are_those_of_a_first_call(worlds):
    world = worlds.world("gloo", 2)
    received, sent = world.run(objects_with_errors)
    worlds.drop("gloo", 2)  # a message did not fit, which has failed the group
    *unpickled, misfit = received
    for name, unpicklable in zip(("send_object_list", "send_object"), sent, strict=True):
        assert name in unpicklable
        assert "an object of type Unpicklable cannot be pickled: not this one" in unpicklable
    for name, told in zip(("recv_object_list", "recv_object"), unpickled, strict=True):
        assert name in told
        assert "cannot be unpickled here: RuntimeError: not here" in told
    assert "2 objects" in misfit
    assert "1 object;" in misfit


class Sending:
    """An object whose pickling sends a message of its own."""

    def __init__(self, group):
        self.group = group

    def __reduce__(self):
        self.group.send_object_list(["from pickling"], 0)
        return str, ("itself",)


def pickling_that_sends():
    group = dist.new_group()
    taken = []
    for _ in range(5):
        if group.rank():
            group.send_object_list([Sending(group)], 0)
        else:
            for _ in range(2):
                taken += group.irecv_object_list(1).result()
    return taken


def test_pickling_may_send_messages(worlds):
    assert worlds.world("gloo", 2).run(pickling_that_sends)[0] == ["from pickling", "itself"] * 5


def recorded_objects():
    group = dist.new_group()
    for number in range(5):
        if group.rank():
            group.send_object_list([0] * number, 0, tag=3)
        elif number % 2:
            group.recv_object_list([None] * number, tag=3)
        else:
            group.irecv_object_list(1, tag=3).wait()
    texts = [facts_in(record).text for record in group.recorder.records()]
    return [text.partition("(")[2] for text in texts if "object_list" in text][-5:]


def test_the_flight_recorder_tells_the_objects_of_each_message(worlds):
    received, sent = worlds.world("gloo", 2).run(recorded_objects)
    counted = ["0 objects", "1 object", *(f"{number} objects" for number in range(2, 5))]
    assert sent == [f"{objects} to rank 0, tag=3)" for objects in counted]
    sources = ["rank 1", "any rank"] * 3
    assert received == [f"{objects} from {src}, tag=3)" for objects, src in zip(counted, sources, strict=False)]
