"""Messages that differ from earlier ones in tag or size: programs count with tags, and send as much as there is."""

import itertools

import numpy as np
import pytest
from failing import fails
from python_calls import fewest_functions
from worlds import needs_linux

import meshdist as dist
from meshdist import core
from meshdist.runtime.flight_recorder import facts_in

pytestmark = [
    pytest.mark.timeout(60),
    needs_linux,
    pytest.mark.skipif(core.module is None, reason=f"there is no compiled core: {core.missing}"),
]
KIB, MIB = 1 << 10, 1 << 20
LENGTHS = [3, 1, 0, 4 * KIB, 64 * KIB, 64 * KIB + 1, 700 * KIB, MIB, MIB + 1, 5 * MIB, 2]


def there_and_back(call, peer):
    """Let `call(sends)` send, and then receive, or the other way round."""
    for sends in (True, False) if peer else (False, True):
        call(sends)


def by_every_function(array, peer, tag):
    """Send an array of a known value there and back, blocking or not, with the tag in either place."""
    group = dist.group.WORLD
    ways = [
        (lambda: dist.send(array, peer, tag=tag), lambda: dist.recv(array, peer, tag=tag)),
        (lambda: dist.send(array, peer, None, tag), lambda: dist.recv(array, peer, None, tag)),
        (lambda: group.send(array, peer, tag), lambda: group.recv(array, peer, tag)),
        (lambda: dist.isend(array, peer, tag=tag).wait(), lambda: dist.irecv(array, peer, tag=tag).wait()),
        (lambda: group.isend(array, peer, tag).wait(), lambda: group.irecv(array, peer, tag).wait()),
    ]
    for number, (send, recv) in enumerate(ways):
        expected = (tag + number) % 251

        def call(sends, send=send, recv=recv, expected=expected):
            array[...] = expected if sends else 255
            (send if sends else recv)()
            assert (array == expected).all()

        there_and_back(call, peer)


def with_new_tags_and_lengths(layout):
    dtype = np.dtype(np.int32).newbyteorder() if layout == "swapped" else np.dtype(np.uint8)
    peer, room = 1 - dist.get_rank(), np.zeros(16 * MIB // dtype.itemsize, dtype)
    for tag, length in enumerate(number // dtype.itemsize for number in LENGTHS * 2):
        array = room[: 2 * length : 2] if layout == "strided" else room[:length]
        if layout == "square" and length >= 4:
            array = room[: length // 4 * 4].reshape(4, -1)
        by_every_function(array, peer, 7 * tag)


@pytest.mark.parametrize("layout", ["contiguous", "strided", "square", "swapped"])
def test_they_arrive_whatever_their_tags_and_sizes(worlds, layout):
    worlds.world("gloo", 2).run(with_new_tags_and_lengths, layout)


def functions_of_new_kinds():
    peer, array, numbers = 1 - dist.get_rank(), np.zeros(1 << 12), itertools.count(1)

    def of_a_new_tag():
        tag = next(numbers)
        there_and_back(lambda sends: (dist.send if sends else dist.recv)(array, peer, tag=tag), peer)

    def of_a_new_size():
        part = array[: next(numbers)]
        there_and_back(lambda sends: (dist.send if sends else dist.recv)(part, peer), peer)

    def both_ways():
        tag = next(numbers)
        receiving = dist.irecv(array[:tag], peer, tag=tag)
        dist.isend(array[:tag], peer, tag=tag).wait()
        receiving.wait()

    found = {}
    for call in (of_a_new_tag, of_a_new_size, both_ways):
        for _ in range(5):
            call()
        found[call.__name__] = fewest_functions(call)
    return found


def test_they_are_made_without_python(worlds):
    """In whose functions a signal handler might raise an error that the core takes for its own."""
    for found in worlds.world("gloo", 2).run(functions_of_new_kinds):
        assert found == {"of_a_new_tag": [], "of_a_new_size": [], "both_ways": []}


def records_of_new_kinds():
    group, array = dist.new_group(), np.zeros((4, 6), np.float32)
    for tag in range(3, 9):
        (group.send if group.rank() == 0 else group.recv)(array[:, :tag].copy(), 1 - group.rank(), tag=tag)
    facts = [facts_in(record) for record in group.recorder.records()]
    messages = [one for one in facts if one.tag is not None and one.group == group.name]
    return [(one.name, one.tag, (one.sent or one.received)[0]) for one in messages]


def test_the_flight_recorder_has_the_tag_and_the_shape_of_each(worlds):
    sent, received = worlds.world("gloo", 2).run(records_of_new_kinds)
    expected = [(tag, ("float32", (4, tag if tag < 6 else 6))) for tag in range(3, 9)]
    assert [(name, *rest) for name, *rest in sent] == [("send", *one) for one in expected]
    assert [(name, *rest) for name, *rest in received] == [("recv", *one) for one in expected]


def wrong_ones():
    group = dist.new_group()
    peer, array = 1 - group.rank(), np.zeros(8)
    for tag in range(4):
        there_and_back(lambda sends, tag=tag: (group.send if sends else group.recv)(array, peer, tag=tag), peer)
    for call in (group.send, group.recv, group.isend, group.irecv):
        fails(ValueError, lambda call=call: call(array, peer, tag=-1), "tag must not be negative")
        fails(ValueError, lambda call=call: call(array, peer, tag=1 << 63), "tag must be less than 2 ** 63")
        fails(TypeError, lambda call=call: call(array, peer, tag=1.0), "tag must be an integer")
    read_only = array[:3]
    read_only.flags.writeable = False
    fails(ValueError, lambda: group.recv(read_only, peer, tag=1), "read-only")
    for shape in ((8,), (3, 3)):  # that of a known kind, and another one
        repeated = np.broadcast_to(np.zeros(1), shape)
        repeated.flags.writeable = True
        for call in (group.recv, group.irecv):
            fails(ValueError, lambda call=call, repeated=repeated: call(repeated, peer, tag=1), "repeats elements")
    group.barrier()
    if peer:
        group.send(array[:5], peer, tag=9)
    else:
        fails(
            dist.DistBackendError,
            lambda: group.recv(array[:4], peer, tag=9),
            "sent float64[5] with tag 9",
            "float64[4]",
        )


def test_wrong_ones_are_refused_as_if_they_were_the_first(worlds):
    worlds.world("gloo", 2).run(wrong_ones)


def functions_of_exchanges():
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    for length in (1, 300, 20 * KIB, 300 * KIB):
        given, taken, whole = np.zeros(length), np.zeros(length), np.zeros((length + 2, 6))
        for call in (
            lambda given=given, taken=taken: dist.sendrecv(given, taken, (rank + 1) % size, (rank - 1) % size),
            lambda whole=whole: mesh.halo_exchange(whole),
        ):
            for _ in range(6):
                call()
            found.append(len(fewest_functions(call)))
    return found


def test_exchanges_of_each_size_are_made_by_the_core(worlds):
    """Python looks at the arrays of a halo exchange, as many of its functions for each size."""
    for found in worlds.world("gloo", 2).run(functions_of_exchanges):
        assert found[::2] == [0] * 4
        assert len(set(found[1::2])) == 1
