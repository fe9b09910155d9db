"""scan and exscan against NumPy's accumulate."""

import cases
import numpy as np
import pytest
from cases import DTYPES, EXTENSION_DTYPES, Placed, describe, values

import meshdist as dist
from meshdist import ReduceOp, functional
from meshdist.arrays.reduce_op import identity

pytestmark = pytest.mark.timeout(120)


def due(arrays, op, rank, exclusive):
    """Return what `rank` must get: the reduction in rank order, to the last bit."""
    last = rank - 1 if exclusive else rank
    if last < 0:
        return np.full_like(arrays[0], identity(op, arrays[0].dtype))
    total = arrays[0].copy()
    with np.errstate(all="ignore"):
        for array in arrays[1 : last + 1]:
            op.ufunc(total, array, out=total)
    return total


def check(name, shape, layout, op, salt):
    rank, size = dist.get_rank(), dist.get_world_size()
    arrays = [values(name, shape, peer, salt, op is ReduceOp.PRODUCT) for peer in range(size)]
    for function, exclusive in ((dist.scan, False), (dist.exscan, True)):
        x = Placed(arrays[rank], layout)
        assert function(x.view, op if salt % 2 else op.value) is x.view
        x.check(due(arrays, op, rank, exclusive), f"{function.name} {describe(name, shape, op)}")


def small_arrays(names):
    for name, shape, layout, op, number in cases.reductions(names):
        if op is not ReduceOp.AVG:
            check(name, shape, layout, op, number)


@pytest.mark.parametrize("names", [DTYPES, EXTENSION_DTYPES], ids=["numpy", "ml_dtypes"])
def test_small_arrays(world, names):
    if names is EXTENSION_DTYPES:
        pytest.importorskip("ml_dtypes", reason="bfloat16 and float8 need ml_dtypes")
    world.run(small_arrays, names)


def large_arrays():
    for count in (65_536, 65_537, 400_000):
        check("float32", (count,), "plain", ReduceOp.SUM, count)
    check("int16", (500, 1000), "plain", ReduceOp.MAX, 3)


def test_large_arrays(world):
    world.run(large_arrays)


def other_forms():
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    x = np.array([rank + 1, 1])
    before = [rank * (rank + 1) // 2, rank]
    assert mesh["x"].exscan(x.copy()).tolist() == before
    assert mesh.get_group().scan(x.copy()).tolist() == [before[0] + rank + 1, rank + 1]
    assert functional.exscan(x).tolist() == before
    assert functional.scan(x, "max").tolist() == [rank + 1, 1]
    y = x.astype(float)
    works = [dist.scan(array, async_op=True) for array in (x, y)]
    for work in works:
        work.wait()
    assert x.tolist() == y.tolist() == [before[0] + rank + 1, rank + 1]
    assert dist.scan(np.ones(2), dist.premul_sum(2.0)).tolist() == [2.0 * (rank + 1)] * 2
    assert dist.exscan(np.array(1.5)).tolist() == 1.5 * rank


def test_methods_functions_and_async_calls(world):
    world.run(other_forms)


def what_is_refused():
    for function in (dist.scan, dist.exscan):
        with pytest.raises(ValueError, match=r"scan on group .* op must not be AVG; use SUM, and divide"):
            function(np.ones(2), "avg")
        with pytest.raises(TypeError, match="op BXOR is not defined for float64"):
            function(np.ones(2), "bxor")


def test_wrong_ops_are_refused(worlds):
    worlds.world("threads", 2).run(what_is_refused)


@pytest.mark.parametrize("name", ["bool", "int8", "uint16", "float16", "float64", "complex64", *EXTENSION_DTYPES])
def test_the_identity_changes_nothing(name):
    if name in EXTENSION_DTYPES:
        pytest.importorskip("ml_dtypes", reason="bfloat16 and float8 need ml_dtypes")
    dtype = cases.dtype_of(name)
    some = np.array([0, 1, 3, 100]).astype(dtype)
    if dtype.kind in "fV" and np.isinf(infinite := np.array([-np.inf, np.inf]).astype(dtype)).all():
        some = np.concatenate([some, infinite])
    for op in ReduceOp:
        if op is ReduceOp.AVG or (name == "complex64" and op is not ReduceOp.SUM):
            continue
        if op.name.startswith("B") and dtype.kind in "fV":
            continue
        alone = np.full_like(some, identity(op, dtype))
        assert (op.ufunc(alone, some) == some).all(), op
