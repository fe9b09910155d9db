"""What a rank reads where a message does not fit: its call, what came, and what the ranks must agree on."""

import inspect
import pickle
import re
from contextlib import suppress

import numpy as np
import pytest
from failing import fails

import meshdist as dist

pytestmark = pytest.mark.timeout(120)
ALIKE = (
    "; all ranks along axis 'x' must call it with the same `by` and `periodic`, and with arrays of the same shape and"
    " dtype, or with an `out` that matches the incoming array"
)


@pytest.fixture(params=["threads", "gloo", "gloo-tcp"])
def backend(request):
    return request.param


def own_error(call):
    """Return the error of a call that is the first to fail on its group; a rank may learn of it from another one."""
    with pytest.raises(dist.DistBackendError) as raised:
        call()
    assert "earlier failure" not in str(raised.value), raised.value
    return str(raised.value)


def without_call(words):
    """Return an error without its end, which must name the call and its line."""
    error, end = words.rsplit("; this is ", 1)
    assert re.fullmatch(r"message \d+, at test_messages_that_do_not_fit\.py:\d+", end), words
    return error


def shifted(is_known):
    """Each rank has an array of a different length, in the first call or in a later one."""
    mesh = dist.DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("x",))
    rank = mesh.get_local_rank()
    for _ in range(5 * is_known):
        mesh.shift(np.ones(1))
    words = own_error(lambda: mesh.shift(np.ones(rank + 1 + is_known)))
    assert words.startswith("shift on group "), words
    if "failed:" not in words:
        assert " sent " in words, words
        assert without_call(words).endswith(ALIKE), words
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
        "; all ranks along 'y' must call it with the same width, `periodic` and tag, and with blocks of the same dtype"
        " and shape, except for dim 0, which is divided"
    )
    assert agree in words or "failed:" in words, words
    if "failed:" not in words:
        block = f"the block of this rank is float64[4, {4 + rank}], ghost cells included"
        assert without_call(words).endswith(block), words
    # The edges of blocks of 4 x n are of 1 x n.
    assert re.search(r" sent (\d) elements of float64, but the receiving array has (?!\1)(\d): float64\[1, \2\]", words)
    return "failed:" not in words


def test_blocks_that_differ_in_another_dimension(worlds, backend):
    assert any(worlds.world(backend, 3).run(halos))


def exchanging_alone():
    mesh = dist.DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("x",))
    is_first = mesh.get_local_rank() == 0
    with pytest.raises(dist.DistBackendError) as raised:
        mesh.halo_exchange(np.ones((4, 2)), periodic=True) if is_first else mesh.barrier()
    return str(raised.value)


def test_a_deadlock_of_an_exchange_is_explained_once(worlds, backend):
    told = worlds.world(backend, 2).run(exchanging_alone)
    assert any("all ranks along the axis must call halo_exchange" in words for words in told)
    assert all(words.count("all ranks along") <= 1 for words in told), told


def exchanging_with_one_that_leaves():
    group = dist.new_group()
    mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("x",))
    if group.rank() == 1:
        dist.destroy_process_group(group)
        return ""
    return own_error(lambda: mesh.halo_exchange(np.ones((4, 2)), periodic=True))


def test_a_rank_that_leaves_has_not_made_the_call(worlds, backend):
    words, _ = worlds.world(backend, 2).run(exchanging_with_one_that_leaves)
    assert " without making this call; all ranks along 'x' must call it" in words


# What the first rank does, and what the others do; both have arrays of as many elements.
OTHERWISE = {
    "shift: shape": lambda m, first: m.shift(np.ones((2, 3) if first else (3, 2))),
    "shift: periodic": lambda m, first: m.shift(np.ones(2), periodic=not first),
    "shift: periodic, complex": lambda m, first: m.shift(np.ones(2, complex), periodic=first),
    "shift: a long array": lambda m, first: m.shift(np.ones((2, 150_000) if first else 300_000)),
    "halo_exchange: periodic": lambda m, first: m.halo_exchange(np.ones((4, 2)), periodic=first),
    "halo_exchange: width": lambda m, first: m.halo_exchange(np.ones((8, 4 - 2 * first)), width=1 + first),
}
PERIODIC = {f"periodic={not here} there, and periodic={here} here" for here in (False, True)}
# What is told, where it is more than that something differs.
DIFFERENCES = {name: PERIODIC for name in OTHERWISE if "periodic" in name}


def disagreeing(name, is_known):
    mesh = dist.DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("x",))
    call, is_first = OTHERWISE[name], mesh.get_local_rank() == 0
    for _ in range(3 * is_known):
        call(mesh, True)
    try:
        call(mesh, is_first)
        mesh.barrier()  # that rank may have had to receive nothing
    except dist.DistBackendError as error:
        return str(error)
    pytest.fail("it went on")


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("name", OTHERWISE)
def test_ranks_that_disagree_in_what_an_array_does_not_tell(worlds, backend, name, is_known):
    # Receives in progress, which earlier tests may have left, keep ranks from proving that they wait in vain.
    worlds.drop(backend, 3)
    told = worlds.world(backend, 3).run(disagreeing, name, is_known)
    begin = "sent an array in a call that differs from this one: "
    differences = [words.partition(begin)[2].partition("; all ranks along ")[0] for words in told if begin in words]
    assert differences, told
    other = "the array has a different shape, or an argument a different value"
    assert set(differences) <= DIFFERENCES.get(name, {other})


def with_a_message():
    group = dist.new_group()
    mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("x",))
    if group.rank() == 0:
        group.send(np.full(2, 5), 1)
        return mesh.shift(np.ones(2), periodic=False)
    return mesh.shift(np.ones(2), periodic=False, out=np.zeros((1, 2), int)).tolist()


def into_another_shape():
    mesh = dist.DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("x",))
    out = np.zeros((2, 3) if mesh.get_local_rank() else 6)
    for number in range(4):
        mesh.shift(np.full(6, float(number)), out=out)
        assert (out == number).all()


def test_an_out_of_another_shape(worlds, backend):
    worlds.world(backend, 3).run(into_another_shape)


def test_another_rank_may_send_what_a_shift_receives(worlds, backend):
    assert worlds.world(backend, 2).run(with_a_message) == [None, [[5, 5]]]


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
    # Nothing about probe.
    assert without_call(words).endswith("sent float64[2], but the receiving array is float64[3]")


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
        "the group cannot be used after an earlier failure: rank ",
    )


def test_an_earlier_failure_is_still_called_one(worlds, backend):
    worlds.world(backend, 2).run(after_an_earlier_failure)


def misfit_of_a_pending_receive():
    group = dist.new_group()
    if group.rank() == 0:
        group.send(np.ones(4, np.float32), 1, tag=3)
        return
    pending = group.irecv(np.ones(4), 0, tag=3)
    line = inspect.currentframe().f_lineno - 1
    fails(
        dist.DistBackendError,
        pending.wait,
        "irecv on group",
        " sent float32[4] with tag 3, but the receiving array is float64[4]; this is message 1",
        f", at test_messages_that_do_not_fit.py:{line}; for a message of unknown size or dtype, call probe",
    )
    fails(
        dist.DistBackendError,
        group.barrier,
        "barrier on group",
        "the group cannot be used after an earlier failure: irecv on group",
        f"; that was message 1, at test_messages_that_do_not_fit.py:{line}",
    )


def test_the_tag_and_the_line_of_a_receive(worlds, backend):
    worlds.world(backend, 2).run(misfit_of_a_pending_receive)


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


def isend_two_objects(group):
    group.isend_object_list([1, "two"], 1).wait()


def receive_any_objects(group):
    group.irecv_object_list(0).result()


def receive_bytes(group):
    # Of as many bytes.
    group.recv(np.empty(len(pickle.dumps([1, "two"], pickle.HIGHEST_PROTOCOL)), np.uint8), 0)


def receive_array(group):
    group.recv(np.ones(2, np.int64), 0)


@pytest.mark.parametrize(
    ("send", "receive", "words"),
    [
        (
            send_two_objects,
            receive_one_object,
            " sent 2 objects, but this call receives 1 object; recv_object_list with an empty list receives any number",
        ),
        (
            send_array,
            receive_one_object,
            " sent an array (float64, 16 bytes), not a list of objects; receive it with recv",
        ),
        (send_two_objects, receive_array, " sent a list of 2 objects, not an array; receive it with recv_object_list"),
        (isend_two_objects, receive_bytes, " sent a list of 2 objects, not an array; receive it with recv_object_list"),
        (
            send_array,
            receive_any_objects,
            " sent an array (float64, 16 bytes), not a list of objects; receive it with recv",
        ),
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
    assert info == (0, 4, 12, np.float32, None), info
    assert (info.count(), info.count(np.int16)) == (3, 6)
    fails(ValueError, lambda: info.count(np.float64), "12 bytes", "of float64 (8 bytes each); it was sent as float32")
    x = np.empty(info.count(), info.dtype)
    group.recv(x, info.source, tag=info.tag)
    assert x.tolist() == [0, 1, 2]
    info = group.probe(0)
    assert info == (0, 0, 256, None, 2), info  # padded
    assert repr(info) == f"MessageInfo(source=0, tag=0, nbytes={info.nbytes}, 2 objects)"
    fails(
        ValueError, lambda: info.count(np.int64), "a list of 2 objects has no elements of int64; call count() without"
    )
    objects = [0] * info.count()
    group.recv_object_list(objects, 0)
    assert objects == [None, [1]]


def test_room_for_what_a_probe_has_found(worlds, backend):
    worlds.world(backend, 2).run(probed)
