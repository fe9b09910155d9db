"""Messages of arrays that are not contiguous, as columns and faces of blocks: they go by way of contiguous ones."""

import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["threads", "gloo", "gloo-tcp"])
def pair(worlds, request):
    return worlds.world(request.param, 2)


def filled(rank, number, shape=(6, 8)):
    return np.arange(np.prod(shape), dtype=np.float64).reshape(shape) + 1000.0 * rank + 10_000 * number


# What is sent, and where that of the other rank is received.
PARTS = {
    "columns": (np.s_[:, -2], np.s_[:, 0]),
    "inner columns": (np.s_[1:-1, -2], np.s_[1:-1, 0]),
    "even and odd elements": (np.s_[::2], np.s_[1::2]),
    "backwards": (np.s_[::-1, -2], np.s_[:, 0]),
    "a row into a column": (np.s_[0, 2:], np.s_[:, 0]),
}


def pass_on(name, call):
    send, recv = PARTS[name]
    rank = dist.get_rank()
    other, group = 1 - rank, dist.new_group()
    mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("x",))
    for number in range(6):
        block = filled(rank, number)
        expected = filled(rank, number)
        expected[recv] = filled(other, number)[send]
        given, taken = block[send], block[recv]
        if call == "sendrecv":
            assert group.sendrecv(given, taken, other, other) == other
        elif call == "shift":
            assert mesh.shift(given, out=taken) is taken
        elif call == "messages" and rank == 0:
            group.send(given, other)
            group.recv(taken, other)
        elif call == "messages":
            room = np.zeros_like(taken)
            group.recv(room, other)
            group.send(given, other)
            taken[:] = room
        elif call == "async messages":
            works = [group.irecv(taken, other), group.isend(given, other)]
            for work in works:
                work.wait()
        np.testing.assert_array_equal(block, expected)


@pytest.mark.parametrize("call", ["sendrecv", "shift", "messages", "async messages"])
@pytest.mark.parametrize("name", PARTS)
def test_what_is_received_goes_where_it_belongs(pair, name, call):
    pair.run(pass_on, name, call)


def random_part(rng, shape):
    """What makes a view of a block: with steps, backwards, transposed, or with dimensions of length 1."""
    places = []
    for length in shape:
        first, last = (int(place) for place in np.sort(rng.integers(0, length, 2)))
        step = int(rng.integers(1, 4))
        backward = slice(last, first - 1 if first else None, -step)
        places.append(slice(first, last + 1, step) if rng.random() < 0.7 else backward)
    order = rng.permutation(len(shape))
    return lambda block: block[tuple(places)].transpose(order)


DTYPES = (np.uint8, np.int16, np.float32, np.float64, np.complex128, np.clongdouble)


def random_parts(seed):
    """Each is sent and received again and again, so that the core knows it in the end; return how many were refused."""
    rng, rank, group = np.random.default_rng(seed), dist.get_rank(), dist.new_group()
    num_refused = 0

    def contents(of, number, shape, dtype):
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        random_bytes = np.random.default_rng([seed, number, of]).integers(0, 256, num_bytes, np.uint8)
        return random_bytes.view(dtype).reshape(shape)

    for number in range(120):
        dtype, shape = np.dtype(DTYPES[number % len(DTYPES)]), tuple(rng.integers(1, 9, rng.integers(1, 5)).tolist())
        send, recv = random_part(rng, shape), random_part(rng, shape)
        for repeat in range(4):
            block, expected, others = (contents(of, 4 * number + repeat, shape, dtype) for of in (rank, rank, 1 - rank))
            given, taken = send(block), recv(block)
            if given.shape != taken.shape:
                taken = np.zeros((*given.shape, 2), dtype)[..., 1]
            elif np.shares_memory(given, taken):
                num_refused += 1
                with pytest.raises(ValueError, match="shares? memory"):
                    group.sendrecv(given, taken, 1 - rank, 1 - rank)
                continue
            else:
                recv(expected)[...] = send(others)
            group.sendrecv(given, taken, 1 - rank, 1 - rank)
            assert taken.tobytes() == send(others).tobytes()
            assert block.tobytes() == expected.tobytes()
    return num_refused


@pytest.mark.parametrize("seed", range(3))
def test_views_of_every_kind(pair, seed):
    assert min(pair.run(random_parts, seed)) > 0


def unaligned_arrays(shape):
    """Arrays that are not aligned, known to the core by others of their shape."""
    rank, group = dist.get_rank(), dist.new_group()
    other, mesh = 1 - rank, dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("x",))
    for number in range(6):
        given, taken = (
            np.zeros(shape) if number < 3 else np.ndarray(shape, float, bytearray(400), 1) for _ in range(2)
        )
        given[...] = rank + 1
        receiving = group.irecv(taken, other)
        group.isend(given, other).wait()
        receiving.wait()
        assert (taken == other + 1).all()
        for call in (group.sendrecv, mesh.sendrecv):
            taken[...] = 0
            call(given, taken, other, other)
            assert (taken == other + 1).all()
        taken[...] = 0
        group.send(given, other) if rank == 0 else group.recv(taken, other)
        assert rank == 0 or (taken == other + 1).all()


@pytest.mark.parametrize("shape", [(), (1,), (3, 4)])
def test_arrays_that_are_not_aligned(pair, shape):
    pair.run(unaligned_arrays, shape)


def new_columns():
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    for number in range(4):
        got = mesh.shift(filled(rank, number)[:, 3])
        np.testing.assert_array_equal(got, filled(1 - rank, number)[:, 3])
        got = mesh.shift(filled(rank, number)[:, 3], periodic=False, out=(room := np.zeros((6, 2)))[:, 1])
        np.testing.assert_array_equal(room[:, 1], filled(0, number)[:, 3] if rank else np.zeros(6))
        assert (got is None) == (rank == 0)


def test_a_shift_returns_a_new_array_for_a_column(pair):
    pair.run(new_columns)


def out_of_order():
    """The receives of two columns are waited for in the other order."""
    rank, group = dist.get_rank(), dist.new_group()
    for number in range(5):
        block, sent = np.zeros((6, 8)), filled(rank, number)
        works = [group.irecv(block[:, tag], 1 - rank, tag=tag) for tag in (1, 2)]
        for tag in (2, 1):
            group.isend(sent[:, tag], 1 - rank, tag=tag).wait()
        for work in reversed(works):
            assert work.source_rank() == 1 - rank
        np.testing.assert_array_equal(block[:, 1:3], filled(1 - rank, number)[:, 1:3])
        assert not block[:, 3:].any()


def test_columns_are_received_in_any_order(pair):
    pair.run(out_of_order)


def refused():
    rank, block = dist.get_rank(), filled(0, 0)
    other, mesh = 1 - rank, dist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    read_only = filled(0, 0)
    read_only.flags.writeable = False
    for given, taken, words in (
        (block[:, 1], block[:, 1], "shares? memory"),
        (block[:, 1], block[::-1, 1], "shares? memory"),
        (block[:, 1], read_only[:, 0], "read-only"),
        (block[:, 1], np.broadcast_to(np.zeros(1), 6), "read-only|shares? memory"),
    ):
        with pytest.raises(ValueError, match=words):
            dist.sendrecv(given, taken, other, other)
        with pytest.raises(ValueError, match=words):
            mesh.shift(given, out=taken)
    with pytest.raises(ValueError, match="read-only"):
        dist.irecv(read_only[:, 0], other)
    with pytest.raises(ValueError, match="read-only"):
        dist.recv(read_only[:, 0], other)


def test_what_shares_memory_or_cannot_be_written_is_refused(pair):
    pair.run(refused)


def does_not_fit():
    rank, block = dist.get_rank(), filled(0, 0)
    group = dist.new_group()
    if rank == 0:
        group.send(block[:, 1], 1)
        return
    with pytest.raises(dist.DistBackendError, match=r"sent float64\[6\], but the receiving array is float64\[5\]"):
        group.recv(block[:5, 2], 0)


def test_a_column_that_does_not_fit_is_told(pair):
    pair.run(does_not_fit)
