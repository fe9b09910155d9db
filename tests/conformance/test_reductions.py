"""all_reduce, reduce, reduce_scatter and reduce_scatter_tensor against the reference."""

import cases
import numpy as np
import pytest
import reference
from cases import DTYPES, EXTENSION_DTYPES, Placed, describe, values

import meshdist as dist
from meshdist import ReduceOp

pytestmark = pytest.mark.timeout(120)
# Of one rank's share, large arrays take every way at these sizes already, and five ranks share two cores.
SIZES_OF_BLOCKS = (6 * cases.KIB, 32 * cases.KIB, 100 * cases.KIB, 512 * cases.KIB + 16)


@pytest.fixture(params=["numpy", "ml_dtypes"])
def dtypes(request):
    if request.param == "numpy":
        return DTYPES
    pytest.importorskip("ml_dtypes", reason="bfloat16 and float8 need ml_dtypes")
    return EXTENSION_DTYPES


def all_ranks(name, shape, op, salt):
    return [values(name, shape, rank, salt, op is ReduceOp.PRODUCT) for rank in range(dist.get_world_size())]


# ---- all_reduce


def check_all_reduce(name, shape, layout, op, salt):
    rank, arrays = dist.get_rank(), all_ranks(name, shape, op, salt)
    x = Placed(arrays[rank], layout)
    # Both spellings of an op, half of the cases each.
    y = dist.all_reduce(x.view, op if salt % 2 else op.value)
    x.check(reference.all_reduce(arrays, op)[rank], f"all_reduce {describe(name, shape, op)}")
    assert y is x.view


def all_reduce_small(names):
    for name, shape, layout, op, number in cases.reductions(names):
        check_all_reduce(name, shape, layout, op, number)


def all_reduce_large():
    for name, shape, layout, number in cases.large(("uint8", "float32", "complex128")):
        for op in (ReduceOp.SUM, ReduceOp.AVG) if name == "float32" else (ReduceOp.SUM,):
            check_all_reduce(name, shape, layout, op, number)
    check_all_reduce("complex128", (100 * cases.KIB // 16,), "plain", ReduceOp.PRODUCT, 1)
    for op in (ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BXOR):
        for num_bytes in (100 * cases.KIB, 600 * cases.KIB):
            check_all_reduce("int16", (num_bytes // 2,), "plain", op, num_bytes)


def test_all_reduce(world, dtypes):
    world.run(all_reduce_small, dtypes)


def test_all_reduce_of_large_arrays(world):
    world.run(all_reduce_large)


# ---- reduce


def check_reduce(name, shape, layout, op, root, salt):
    rank, arrays = dist.get_rank(), all_ranks(name, shape, op, salt)
    x = Placed(arrays[rank], layout)
    dist.reduce(x.view, root, op if salt % 2 else op.value)
    x.check(reference.reduce(arrays, op, root)[rank], f"reduce {describe(name, shape, op, root)}")


def reduce_small(names):
    for name, shape, layout, op, number in cases.reductions(names):
        check_reduce(name, shape, layout, op, number % dist.get_world_size(), number)


def reduce_to_every_root():
    for root in range(dist.get_world_size()):
        for shape, layout in cases.SMALL:
            for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG):
                check_reduce("float32", shape, layout, op, root, root)
        for num_bytes in (6 * cases.KIB, 100 * cases.KIB, 600 * cases.KIB):
            check_reduce("int32", (num_bytes // 4,), "plain", ReduceOp.SUM, root, root)


def reduce_large():
    for name, shape, layout, number in cases.large(("uint8", "float64")):
        check_reduce(name, shape, layout, ReduceOp.SUM, number % dist.get_world_size(), number)


def test_reduce(world, dtypes):
    world.run(reduce_small, dtypes)


def test_reduce_to_every_root(world):
    world.run(reduce_to_every_root)


def test_reduce_of_large_arrays(world):
    world.run(reduce_large)


# ---- reduce_scatter


def check_reduce_scatter(name, shapes, layout, op, salt):
    """`shapes` are those of the ranks' blocks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    product = op is ReduceOp.PRODUCT
    lists = [[values(name, shapes[k], giver, salt + k, product) for k in range(size)] for giver in range(size)]
    given = [Placed(block, layout) for block in lists[rank]]
    output = Placed(np.zeros_like(lists[rank][rank]), layout)
    what = f"reduce_scatter {describe(name, shapes[rank], op)}"
    y = dist.reduce_scatter(output.view, [block.view for block in given], op if salt % 2 else op.value)
    output.check(reference.reduce_scatter(lists, op)[rank], what)
    assert y is output.view
    for block in given:
        block.check_unchanged(what)


def reduce_scatter_small(names):
    for name, shape, layout, op, number in cases.reductions(names):
        check_reduce_scatter(name, [shape] * dist.get_world_size(), layout, op, number)


def reduce_scatter_unequal():
    size = dist.get_world_size()
    for count in (1, 5, 300, 3000, 40_000):
        for first in range(min(size, 3)):
            # One block is empty, the others have 1, 2, 3... times `count` elements.
            shapes = [((rank + first) % size * count,) for rank in range(size)]
            for op in (ReduceOp.SUM, ReduceOp.MIN):
                check_reduce_scatter("float32", shapes, "plain", op, first)
    check_reduce_scatter("int8", [(rank % 3, 4) for rank in range(size)], "columns of more", ReduceOp.SUM, 0)


def reduce_scatter_large():
    for name, shape, layout, number in cases.large(("uint8", "float32"), SIZES_OF_BLOCKS):
        check_reduce_scatter(name, [shape] * dist.get_world_size(), layout, ReduceOp.SUM, number)
        check_reduce_scatter_tensor(name, shape, layout, ReduceOp.SUM, number, stacked=False)


def test_reduce_scatter(world, dtypes):
    world.run(reduce_scatter_small, dtypes)


def test_reduce_scatter_of_unequal_blocks(world):
    world.run(reduce_scatter_unequal)


def test_reduce_scatter_of_large_arrays(world):
    world.run(reduce_scatter_large)


# ---- reduce_scatter_tensor


def check_reduce_scatter_tensor(name, shape, layout, op, salt, stacked):
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = (size, *shape) if stacked or not shape else (size * shape[0], *shape[1:])
    arrays = all_ranks(name, whole, op, salt)
    given = Placed(arrays[rank], layout if len(whole) > 1 or layout != "plain" else "plain")
    output = Placed(np.zeros(shape, cases.dtype_of(name)), layout)
    what = f"reduce_scatter_tensor {describe(name, shape, op)}, stacked {stacked}"
    y = dist.reduce_scatter_tensor(output.view, given.view, op if salt % 2 else op.value)
    total = reference.reduced(arrays, op)
    output.check(total.reshape(size, *shape)[rank], what)
    assert y is output.view
    given.check_unchanged(what)


def reduce_scatter_tensor_small(names):
    for name, shape, layout, op, number in cases.reductions(names):
        check_reduce_scatter_tensor(name, shape, layout, op, number, stacked=bool(number % 2))


def test_reduce_scatter_tensor(world, dtypes):
    world.run(reduce_scatter_tensor_small, dtypes)


# ---- What is not defined


def refused_everywhere(names):
    calls = {
        "all_reduce": lambda x, op: dist.all_reduce(x, op),
        "reduce": lambda x, op: dist.reduce(x, 0, op),
        "reduce_scatter": lambda x, op: dist.reduce_scatter(x, [x] * dist.get_world_size(), op),
        "reduce_scatter_tensor": lambda x, op: dist.reduce_scatter_tensor(x, np.stack([x] * dist.get_world_size()), op),
    }
    for name in names:
        for op in ReduceOp:
            if cases.is_defined(op, cases.dtype_of(name)):
                continue
            for collective, call in calls.items():
                for spelling in (op, op.value):
                    x = Placed(values(name, (4,), dist.get_rank()), "plain")
                    try:
                        call(x.view, spelling)
                    except TypeError as error:
                        missing = [word for word in (collective, "group", op.name, name) if word not in str(error)]
                        cases.same(missing, [], f"what {error} does not name")
                    else:
                        raise AssertionError(f"{collective} took {name} with {op.name}")
                    x.check_unchanged(f"{collective} {describe(name, (4,), op)}")
    # Nothing was sent: the ranks are in step.
    check_all_reduce("int64", (5,), "plain", ReduceOp.SUM, 0)


def test_undefined_combinations_are_type_errors_on_every_rank(world, dtypes):
    world.run(refused_everywhere, dtypes)


def products_of_complex_numbers():
    """The last chunk has one number: NumPy rounds its product differently if the result takes the place of a factor."""
    x, last = np.ones((4 << 20) // 16 + 1, np.complex128), []
    for seed in range(20):
        random = np.random.default_rng([seed, dist.get_rank()])
        x[-1] = complex(*random.standard_normal(2))
        last.append(dist.all_reduce(x, "product")[-1])
        x[:] = 1
    return np.array(last).tobytes()


def test_all_ranks_have_the_same_products_of_complex_numbers(world_of_3):
    assert len(set(world_of_3.run(products_of_complex_numbers))) == 1


def unknown_op():
    for op, kind in [("total", ValueError), ("", ValueError), (3, TypeError), (np.add, TypeError)]:
        try:
            dist.all_reduce(np.ones(3), op)
        except kind as error:
            known = [op.value for op in ReduceOp if kind is ValueError]
            cases.same([word for word in known if word not in str(error)], [], f"what {error} does not name")
        else:
            raise AssertionError(f"all_reduce took op {op!r}")
    check_all_reduce("int64", (5,), "plain", ReduceOp.SUM, 0)


def test_an_unknown_op_is_refused_with_the_list_of_the_known(world_of_3):
    world_of_3.run(unknown_op)


def names_in_any_case():
    for spelling in ("MAX", "Max", "max"):
        cases.same(int(dist.all_reduce(np.array(dist.get_rank()), spelling)), dist.get_world_size() - 1, spelling)


def test_an_op_is_named_in_any_case(world_of_3):
    world_of_3.run(names_in_any_case)
