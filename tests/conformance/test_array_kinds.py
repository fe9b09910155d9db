"""Every collective, and messages, with every kind of array that there is: right, in place, and nothing beside it."""

import array_kinds
import calls
import numpy as np
import pytest

import meshdist as dist

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")]
EXTENSIONS = ("int4", "uint2", "float8_e5m2", "bfloat16")


def all_collectives(kind):
    """Make every call, the first of the shapes twice: the second call finds a plan."""
    wrap, dtype, shapes = array_kinds.KINDS[kind]
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape in shapes:
        for number, name in enumerate(calls.OF_ARRAYS):
            cut = shape if len(shape) and name != "all_to_all_single" else (*shape, 2)[:2]
            for salt in (0, 1) if shape == shapes[0] else (number % 2,):
                case = calls.Case(
                    name, dtype, cut, root=number % size, stacked=len(shape) == 0, async_op=bool(salt), salt=salt
                )
                check(wrap, case, rank, size, f"rank {rank} of {size}, {case}")


def check(wrap, case, rank, size, what):
    made = calls.make(case, rank, size)
    give, take = [wrap(array) for array in made.give], [wrap(array) for array in made.take]
    values = [kept.value for kept in take]
    returned = made.call([kept.value for kept in give], values, group=dist.group.WORLD, **made.how)
    if isinstance(returned, dist.Work):
        returned.wait()
    for kept, content in zip(give, made.give, strict=True):
        kept.check(content, f"{what}, an input")
    for kept, want in zip(take, made.want, strict=True):
        kept.check(want, f"{what}, an output")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.torch] if "tensor" in kind else []) for kind in array_kinds.KINDS],
)
def test_every_collective(world_of_3, kind):
    _, dtype, _ = array_kinds.KINDS[kind]
    if dtype in EXTENSIONS:
        pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    if "tensor" in kind:
        pytest.importorskip("torch", reason="torch is not installed")
    world_of_3.run(all_collectives, kind)


def mixed_byte_orders():
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (3, 30_000):
        mine = np.arange(count).astype(">i4" if rank == 0 else "<i4")
        assert dist.all_reduce(mine) is mine
        np.testing.assert_array_equal(mine, np.arange(count) * size)
        out = np.zeros((size, count), "<i4" if rank == 0 else ">i4")
        dist.all_gather_into_tensor(out, mine)
        np.testing.assert_array_equal(out, np.tile(np.arange(count) * size, (size, 1)))
        scaled = dist.all_reduce(np.ones(count, ">f8"), dist.ReduceOp.PREMUL_SUM(rank + 1))
        assert (scaled == sum(range(1, size + 1))).all()


def test_ranks_may_have_different_byte_orders(world_of_3):
    world_of_3.run(mixed_byte_orders)


class Copying:
    """Gives NumPy a copy of its elements, and nothing else."""

    def __init__(self, content):
        self.content = content

    def __array__(self, dtype=None, copy=None):
        return np.array(self.content)


def copies():
    rank, size = dist.get_rank(), dist.get_world_size()
    out = np.zeros(size)
    dist.all_gather_into_tensor(out, Copying([float(rank)]))
    assert out.tolist() == list(range(size))
    dist.broadcast(Copying([7.0]) if rank == 0 else out[:1], 0)
    assert rank == 0 or out[0] == 7
    with pytest.raises(TypeError, match=r"tensor is a Copying, of which NumPy makes a copy.*np.array\(tensor\)"):
        dist.all_reduce(Copying([1.0]))
    with pytest.raises(TypeError, match=r"tensor_list\[1\] is a Copying, of which NumPy makes a copy"):
        dist.all_gather([np.zeros(1), Copying([1.0]), np.zeros(1)], np.zeros(1))
    if rank == 0:
        dist.send(Copying([3.0]), 1)
    if rank == 1:
        with pytest.raises((TypeError, ValueError), match="tensor is"):
            dist.recv(Copying([3.0]), 0)
        dist.recv(out[:1], 0)
        assert out[0] == 3


def test_what_is_copied_is_sent_but_not_written(world_of_3):
    world_of_3.run(copies)
