"""What ranks run whose arrays are on a GPU, with CuPy or the stand-in for it: every call, as data (see calls.py)."""

import contextlib
import itertools

import calls
import numpy as np
import pytest

import meshdist as dist

# Those of several arrays of a rank, which may be on several GPUs.
OF_SEVERAL_GPUS = [name for name in calls.OF_ARRAYS if name.endswith("multigpu")]
SHAPES = ((3,), (), (0,), (2, 3), (257,))


class Kept:
    """A CuPy array, the whole that it is a part of, and what must be in both."""

    def __init__(self, cupy, content, strided):
        if strided == "F":
            self.value = self.whole = cupy.asarray(np.ascontiguousarray(content.T)).T
        elif strided and content.ndim:
            whole = np.zeros((*content.shape[:-1], 2 * content.shape[-1]), content.dtype)
            self.whole = cupy.asarray(whole)
            self.value = self.whole[..., 1::2]
            self.value[...] = cupy.asarray(content)
        else:
            self.value = self.whole = cupy.asarray(content)

    def check(self, content, what, rtol=0.0):
        assert self.value.dtype == content.dtype, what
        if rtol:
            np.testing.assert_allclose(self.value.get(), content, rtol, err_msg=what)
        else:
            np.testing.assert_array_equal(self.value.get(), content, err_msg=what)
        if self.whole is not self.value:
            assert not self.whole[..., ::2].get().any(), f"{what}: beside it"


def is_carried(name, dtype):
    """Return whether backend nccl has the call: the arrays of a rank are reduced by CuPy."""
    reduces_here = name in OF_SEVERAL_GPUS and name in calls.REDUCING
    return not reduces_here or calls.dtype_of(dtype).kind in "biufc"


def every_collective(cupy, group, dtype, shapes=SHAPES, *, strided=False, skipped=(), times=2):
    """Make every call on arrays, of every shape; each signature twice, the second time as an async call.

    The elements of the arrays lie side by side; with `strided` apart, or where that is "F" in Fortran's order.
    """
    rank, size = group.rank(), group.size()
    for shape, (number, name) in itertools.product(shapes, enumerate(calls.OF_ARRAYS)):
        if name in skipped or (name == "message" and size == 1) or not is_carried(name, dtype):
            continue
        cut = shape if len(shape) and name != "all_to_all_single" else (*shape, 2)[:2]
        rows = tuple(tuple((k + 2 * j) % 3 for j in range(size)) for k in range(size)) if cut == (2, 3) else None
        for salt in range(times):
            case = calls.Case(
                name,
                dtype,
                cut,
                root=number % size,
                rows=rows if name == "all_to_all_single" else None,
                stacked=len(shape) == 0,
                async_op=bool(salt),
                salt=salt,
            )
            check(cupy, group, case, strided, f"rank {rank} of {size}, {case}")


def kept_on(cupy, gpu, content, strided):
    with cupy.cuda.Device(gpu):
        return Kept(cupy, content, strided)


def over_several_gpus(cupy, group, dtype, strided):
    """Make every call on arrays of two GPUs of this rank; that of the group is the current one."""
    own = cupy.cuda.runtime.getDevice()
    gpus = (own, own + group.size())
    for name, shape in itertools.product(OF_SEVERAL_GPUS, ((3,), (), (0,), (2, 3))):
        if not is_carried(name, dtype):
            continue
        for salt in range(2):
            case = calls.Case(name, dtype, shape, root=group.size() - 1, async_op=bool(salt), salt=salt)
            check(cupy, group, case, strided, f"rank {group.rank()}, {case}", gpus)
    if not is_carried("all_reduce_multigpu", dtype):
        return
    xs = [kept_on(cupy, gpu, np.ones(3, dtype), strided).value for gpu in gpus]
    group.all_reduce_multigpu(xs, op=dist.premul_sum(group.rank() + 1))
    assert [x.tolist() for x in xs] == [[2 * sum(range(1, group.size() + 1))] * 3] * 2


def check(cupy, group, case, strided, what, gpus=()):
    """Make one call, on arrays of these GPUs in turn, and look at what it made of its arrays."""
    made = calls.make(case, group.rank(), group.size())
    gpus = gpus or (cupy.cuda.runtime.getDevice(),)
    give, take = (
        [kept_on(cupy, gpus[place % len(gpus)], array, strided) for place, array in enumerate(arrays)]
        for arrays in (made.give, made.take)
    )
    returned = made.call([kept.value for kept in give], [kept.value for kept in take], group=group, **made.how)
    if isinstance(returned, dist.Work):
        assert returned.wait() is True
        assert isinstance(returned.result(), (type(None), list, cupy.ndarray))
    for kept, content in zip(give, made.give, strict=True):
        kept.check(content, f"{what}, an input")
    # NCCL multiplies by 1/n, which is rounded.
    rtol = 2e-3 if case.op == "avg" and case.dtype == "float16" else 0.0
    for kept, want in zip(take, made.want, strict=True):
        kept.check(want, f"{what}, an output", rtol)


def every_op(cupy, group, dtype):
    """Reduce by every op that the dtype has, in all ways to reduce."""
    ops = [op for op in calls.UFUNCS if calls.is_defined(op, calls.dtype_of(dtype))]
    for op, name in itertools.product(ops, calls.REDUCING):
        if not is_carried(name, dtype):
            continue
        case = calls.Case(name, dtype, (5,), op=op, root=group.size() - 1)
        is_lacking = (op.startswith("b") and dtype != "bool") or (op == "product" and dtype.startswith("complex"))
        if name.endswith("coalesced") and is_lacking:
            with contextlib.suppress(TypeError):  # an engine may not have it, and says so before anything is sent
                check(cupy, group, case, False, f"{case}")
            continue
        check(cupy, group, case, False, f"{case}")


def every_other_call(cupy, group):
    """Barriers, objects, and lists of arrays of several sizes."""
    rank, size = group.rank(), group.size()
    for number, name in enumerate(calls.COLLECTIVES):
        if name in calls.OF_ARRAYS:
            continue
        made = calls.make(calls.Case(name, root=number % size), rank, size)
        assert made.call([], [], group=group, **made.how) == made.result, name
    varying(cupy, group)


def varying(cupy, group):
    rank, size = group.rank(), group.size()
    taken = [cupy.zeros(peer) for peer in range(size)]
    group.all_gather(taken, cupy.asarray(np.full(rank, 1.0 + rank)))
    assert [array.tolist() for array in taken] == [[1.0 + peer] * peer for peer in range(size)]
    given = [cupy.asarray(np.full(place, 1.0 + rank)) for place in range(size)]
    out = cupy.zeros(rank)
    group.reduce_scatter(out, given)
    assert out.tolist() == [float(sum(range(1, size + 1)))] * rank
    taken = [cupy.zeros(rank + peer) for peer in range(size)]
    group.all_to_all(taken, [cupy.asarray(np.full(rank + peer, float(10 * rank + peer))) for peer in range(size)])
    assert [array.tolist() for array in taken] == [[10.0 * peer + rank] * (rank + peer) for peer in range(size)]


def factors(cupy, group):
    """PREMUL_SUM with the ranks' own factors, numbers and arrays, for dtypes that NCCL scales and others."""
    rank, size = group.rank(), group.size()
    total = sum(range(1, size + 1))
    for dtype in ("float32", "float64", "int32", "int16", "complex64"):
        x = cupy.ones(3, dtype)
        assert group.all_reduce(x, op=dist.premul_sum(rank + 1)) is x
        assert x.tolist() == [total] * 3
        y = cupy.ones((3, 2), dtype)[:, 0]
        group.all_reduce(y, op=dist.premul_sum(np.array([1, 2, 3]) * (rank + 1)))
        assert y.tolist() == [total, 2 * total, 3 * total]
        out = cupy.zeros(2, dtype)
        group.reduce_scatter_tensor(out, cupy.ones(2 * size, dtype), op=dist.premul_sum(rank + 1))
        assert out.tolist() == [total] * 2
    xs = [cupy.ones(2), cupy.ones(3)]
    group.all_reduce_coalesced(xs, op=dist.premul_sum(rank + 0.5))
    assert [x.tolist() for x in xs] == [[total - size / 2] * 2, [total - size / 2] * 3]


def messages(cupy, group):
    """Messages in every way: both ranks send first, in batches, in a ring."""
    rank, size = group.rank(), group.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    give, take = cupy.asarray(np.full(3, float(rank))), cupy.zeros((3, 2))[:, 1]
    sent, received = group.isend(give, right), group.irecv(take, left)
    assert sent.wait()
    assert received.wait()
    assert received.source_rank() == group.ranks[left]
    assert take.tolist() == [float(left)] * 3
    room = [cupy.zeros(2) for _ in range(size)]
    ops = [dist.P2POp(dist.irecv, room[peer], group=group, group_peer=peer) for peer in range(size) if peer != rank]
    ops += [
        dist.P2POp(dist.isend, cupy.asarray(np.full(2, rank + 10.0 * peer)), group=group, group_peer=peer)
        for peer in range(size)
        if peer != rank
    ]
    works = dist.batch_isend_irecv(ops)
    assert all(work.wait() for work in works)
    assert [room[peer].tolist() for peer in range(size) if peer != rank] == [
        [peer + 10.0 * rank] * 2 for peer in range(size) if peer != rank
    ]
    # Small ones are buffered: nobody has to receive first.
    group.send(give, right)
    give[...] = -1.0
    assert group.recv(take, left) == left
    assert take.tolist() == [float(left)] * 3
    give[...] = float(rank)
    group.send_object_list([{"from": rank}, rank], right)
    objects = [None, None]
    assert group.recv_object_list(objects, left) == left
    assert objects == [{"from": left}, left]
    group.send_object({"from": rank}, right)
    assert group.recv_object(left) == {"from": left}
    if group.carries("cpu"):
        assert group.sendrecv_object(rank, right, left) == left
        work = group.irecv_object_list(left, tag=3)
        group.isend_object_list([rank], right, tag=3).wait()
        assert work.result() == [left]
    else:
        for call in (lambda: group.isend_object_list([rank], right), lambda: group.irecv_object_list(left)):
            with pytest.raises(ValueError, match="object_list on group .*need a backend for arrays on the CPU"):
                call()
    with dist.coalescing_manager(group, async_ops=True) as pending:
        group.isend(give, right)
        group.irecv(room[left], left) if room[left].size == 3 else group.irecv(take, left)
    pending.wait()
    assert take.tolist() == [float(left)] * 3
    neighbours(cupy, group)


def neighbours(cupy, group):
    """sendrecv, and what a mesh does with messages between neighbours."""
    rank, size = group.rank(), group.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    give, take = cupy.asarray(np.full(3, float(rank))), cupy.zeros(3)
    assert group.sendrecv(give, take, right, left) == left
    assert take.tolist() == [float(left)] * 3
    row = dist.DeviceMesh.from_group(group, "cpu" if group.carries("cpu") else "cuda", mesh_dim_names=("x",))
    assert row.shift(give).tolist() == [float(left)] * 3
    after = row.shift(give, -1, periodic=False)
    assert (after is None) if rank == size - 1 else after.tolist() == [float(right)] * 3
    block = cupy.asarray(np.pad(np.full((2, 2), float(rank)), 1, constant_values=-1))
    # Of rows: the stand-in takes columns, which lie between each other, for the same memory.
    assert row.halo_exchange(block, periodic=True) is block
    assert block.tolist() == [[-1.0, value, value, -1.0] for value in (left, rank, rank, right)]


def without_change(cupy, group):
    """The functional forms."""
    from meshdist import functional

    rank, size = group.rank(), group.size()
    x = cupy.asarray(np.arange(size, dtype=np.float32) + rank)
    assert functional.all_reduce(x, group=group).tolist() == [float(size * k + sum(range(size))) for k in range(size)]
    assert functional.all_gather_into_tensor(x[:1], group=group).tolist() == [float(k) for k in range(size)]
    assert [y.tolist() for y in functional.all_gather(x[:1], group=group)] == [[float(k)] for k in range(size)]
    assert functional.reduce_scatter_tensor(x, group=group).tolist() == [float(size * rank + sum(range(size)))]
    assert functional.all_to_all_single(x, group=group).tolist() == [float(k + rank) for k in range(size)]
    assert x.tolist() == [float(k + rank) for k in range(size)]
    total = functional.all_reduce({"x": [x, x[:1]]}, group=group)
    assert total["x"][1].tolist() == [float(sum(range(size)))]
    assert total["x"][0].tolist() == [float(size * k + sum(range(size))) for k in range(size)]
    square = cupy.asarray(np.arange(2.0 * size).reshape(2, size) + rank)
    whole = functional.all_gather(square, group=group, axis=1)
    assert (
        whole.tolist() == np.concatenate([np.arange(2.0 * size).reshape(2, size) + k for k in range(size)], 1).tolist()
    )
    mine = functional.reduce_scatter_tensor(square, "max", group, axis=1)
    assert mine.tolist() == [[rank + size - 1.0], [rank + 2 * size - 1.0]]
    # Blocks of unequal lengths, and those of the source alone: rank k has k columns.
    columns = square[:, :rank]
    all_columns = [[float(row * size + c + k) for k in range(size) for c in range(k)] for row in range(2)]
    for found in (
        functional.all_gather(columns, group, axis=1, uneven=True),
        functional.gather(columns, None, group, 0, axis=1, uneven=True),
    ):
        assert found is None or (type(found) is type(x) and found.tolist() == all_columns)
    blocks = [{"x": x[:k]} for k in range(size)] if rank == 0 else None
    block = functional.scatter(blocks, group=group, group_src=0)
    assert type(block["x"]) is type(x)
    assert block["x"].tolist() == [float(k) for k in range(rank)]
