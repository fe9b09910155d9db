"""What a rank reads where a message does not fit: its call, what came, and what the ranks must agree on."""

from contextlib import suppress

import numpy as np
import pytest
from failing import fails

import meshdist as dist

pytestmark = pytest.mark.timeout(120)
SAME_ARRAYS = "; all ranks along the axis must pass arrays of one shape and dtype, or an out that fits what comes"


@pytest.fixture(params=["threads", "gloo", "gloo-tcp"])
def backend(request):
    return request.param


def own_error(call):
    """Return the error of a call that is the first to fail on its group; a rank may learn of it from another one."""
    with pytest.raises(dist.DistBackendError) as raised:
        call()
    assert "earlier failure" not in str(raised.value), raised.value
    return str(raised.value)


def shifted(is_known):
    """Each rank has an array of another length, in the first call or in a later one."""
    mesh = dist.DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("x",))
    rank = mesh.get_local_rank()
    for _ in range(5 * is_known):
        mesh.shift(np.ones(1))
    words = own_error(lambda: mesh.shift(np.ones(rank + 1 + is_known)))
    assert words.startswith("shift on group "), words
    if "failed:" not in words:
        assert " sent " in words, words
        assert words.endswith(SAME_ARRAYS), words
    return "failed:" not in words


@pytest.mark.parametrize("is_known", [False, True])
def test_arrays_of_several_shapes_in_a_shift(worlds, backend, is_known):
    told = worlds.world(backend, 3).run(shifted, is_known)
    assert any(told)


def halos():
    group = dist.new_group()
    mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("y",))
    rank = group.rank()
    words = own_error(lambda: mesh.halo_exchange(np.ones((4, 4 + rank))))
    assert words.startswith("halo_exchange on group "), words
    agree = (
        "; all ranks along 'y' must call it with equal width and tag, and with blocks of one dtype that differ in dim 0"
    )
    assert agree in words or "failed:" in words, words
    return "failed:" not in words


def test_blocks_that_differ_in_another_dimension(worlds, backend):
    assert any(worlds.world(backend, 3).run(halos))


def sendrecvs(is_known):
    group = dist.new_group()
    rank, other = group.rank(), 1 - group.rank()
    for _ in range(5 * is_known):
        group.sendrecv(np.ones(2), np.ones(2), other, other)
    taken = np.ones(2 + rank)
    if rank == 0:
        with suppress(dist.DistBackendError):  # the other rank may fail before
            group.sendrecv(np.ones(2), taken, other, other)
        return
    words = own_error(lambda: group.sendrecv(np.ones(2), taken, other, other))
    assert words.startswith("sendrecv on group "), words
    assert "sent 16 bytes of float64, but the receiving array is float64[3] (24 bytes)" in words


@pytest.mark.parametrize("is_known", [False, True])
def test_a_wrong_array_in_a_sendrecv(worlds, backend, is_known):
    worlds.world(backend, 2).run(sendrecvs, is_known)


def after_an_earlier_failure():
    group = dist.new_group()
    other = 1 - group.rank()
    own_error(lambda: group.sendrecv(np.ones(2), np.ones(3), other, other))
    fails(
        dist.DistBackendError,
        lambda: group.sendrecv(np.ones(2), np.ones(2), other, other),
        "sendrecv on group",
        "the group cannot be used after an earlier failure: sendrecv on group",
    )


def test_an_earlier_failure_is_still_called_one(worlds, backend):
    worlds.world(backend, 2).run(after_an_earlier_failure)


def lists(send, receive, words):
    group = dist.new_group()
    if group.rank() == 0:
        send(group)
    else:
        fails(dist.DistBackendError, lambda: receive(group), words)


def send_two_objects(group):
    group.send_object_list([1, "two"], 1)


def send_array(group):
    group.send(np.ones(2), 1)


def receive_one_object(group):
    group.recv_object_list([None], 0)


def receive_array(group):
    group.recv(np.ones(2, np.int64), 0)


@pytest.mark.parametrize(
    ("send", "receive", "words"),
    [
        (send_two_objects, receive_one_object, " sent 2 objects, but the list has room for 1"),
        (
            send_array,
            receive_one_object,
            " sent an array (float64, 16 bytes), not a list of objects; receive it with recv",
        ),
        # As many bytes as the sizes of two objects have.
        (send_two_objects, receive_array, " sent a list of 2 objects, not an array; receive it with recv_object_list"),
    ],
)
def test_lists_of_objects(worlds, backend, send, receive, words):
    worlds.world(backend, 2).run(lists, send, receive, words)


def probed():
    group = dist.new_group()
    if group.rank() == 0:
        group.send(np.arange(3, dtype=np.float32), 1, tag=4)
        group.send_object_list([None, [1]], 1)
        return
    info = group.probe(0, tag=None)
    assert info == (0, 4, 12, np.float32), info
    assert (info.count(), info.count(np.int16)) == (3, 6)
    fails(ValueError, lambda: info.count(np.float64), "12 bytes", "of float64 (8 bytes each); it was sent as float32")
    x = np.empty(info.count(), info.dtype)
    group.recv(x, info.source, tag=info.tag)
    assert x.tolist() == [0, 1, 2]
    info = group.probe(0)
    assert info == (0, 0, 16, None), info
    fails(ValueError, info.count, "the dtype of the message is not known")
    objects = [0] * (info.nbytes // 8)
    group.recv_object_list(objects, 0)
    assert objects == [None, [1]]


def test_room_for_what_a_probe_has_found(worlds, backend):
    worlds.world(backend, 2).run(probed)
