"""The functional forms of trees: nested lists, tuples and dicts of arrays and numbers."""

from collections import OrderedDict, namedtuple

import cases
import numpy as np
import pytest

import meshdist as dist
from meshdist import functional

pytestmark = pytest.mark.timeout(120)
Layer = namedtuple("Layer", ["weights", "bias"])


def tree(rank, scale=1):
    """Arrays of several dtypes and layouts, numbers, and empty parts."""
    weights = np.arange(6.0).reshape(2, 3).T + rank
    return {
        "layers": [Layer(weights * scale, np.full(2, rank * scale, np.float32)), Layer(np.zeros((0, 2)), None)],
        "step": (rank * scale, 0.5 * rank * scale, np.float32(rank * scale)),
        "big": np.full(3, rank * scale, ">i4"),
        7: OrderedDict(b=np.array(rank * scale), a=[]),
    }


def same(actual, expected, what):
    """Compare structures, types, dtypes, shapes and values."""
    if isinstance(expected, dict):
        cases.same((type(actual), list(actual)), (type(expected), list(expected)), what)
        for key in expected:
            same(actual[key], expected[key], f"{what}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        cases.same((type(actual), len(actual)), (type(expected), len(expected)), what)
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            same(one, other, f"{what}[{number}]")
    elif expected is None:
        assert actual is None, what
    else:
        kind = np.ndarray if isinstance(expected, np.ndarray) else np.generic
        assert isinstance(actual, kind), f"{what}: {type(actual)}"
        cases.same((actual.dtype, actual.shape), (np.asarray(expected).dtype, np.shape(expected)), what)
        np.testing.assert_array_equal(actual, expected, err_msg=what)


def every_form():
    rank, size = dist.get_rank(), dist.get_world_size()
    root, ranks = size - 1, range(size)
    mine, before = tree(rank), sum(range(rank))
    total = tree(1, sum(ranks))
    total["layers"][0] = Layer(sum(tree(other)["layers"][0].weights for other in ranks), total["layers"][0].bias)
    summed = functional.all_reduce(mine)
    same(summed, total, "all_reduce")
    same(functional.all_reduce(mine, "max")["step"], tree(root)["step"], "all_reduce, max")
    same(functional.reduce(mine, root), total if rank == root else None, "reduce")
    same(functional.scan(mine)["step"], tree(before + rank)["step"], "scan")
    same(functional.exscan(mine)["step"], tree(before)["step"], "exscan")
    same(functional.broadcast(mine, root), tree(root), "broadcast")
    same(functional.all_gather(mine), [tree(other) for other in ranks], "all_gather")
    same(functional.gather(mine, root), [tree(other) for other in ranks] if rank == root else None, "gather")
    pair = {"a": np.full((2, 1), rank), "b": rank}
    rows = {"a": np.concatenate([np.full((2, 1), other) for other in ranks]), "b": np.arange(size)}
    columns = {**rows, "a": np.concatenate([np.full((2, 1), other) for other in ranks], 1)}
    same(functional.all_gather_into_tensor(pair), rows, "all_gather_into_tensor")
    same(functional.all_gather_into_tensor(pair, axis=-1), columns, "all_gather_into_tensor along 1")
    same(functional.all_gather(pair, dim=0), rows, "all_gather along 0")
    same(functional.gather(pair, root, axis=-1), columns if rank == root else None, "gather along 1")
    cases.same(repr(mine), repr(tree(rank)), "the input")


def test_every_form(world):
    world.run(every_form)


def numbers():
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, kind in ((rank, np.int64), (0.5 * rank, np.float64), (1j * rank, np.complex128)):
        total = functional.all_reduce(number)
        cases.same((type(total), total), (kind, number / max(rank, 1) * sum(range(size)) if rank else total), "number")
    cases.same(functional.all_reduce(rank > 0, "bor"), np.bool_(size > 1), "truth")
    cases.same(functional.all_gather(np.int8(rank)), [np.int8(other) for other in range(size)], "all_gather of numbers")
    cases.same(functional.broadcast(float(rank), 0), 0.0, "broadcast of a number")
    cases.same(functional.all_reduce({}), {}, "nothing")


def test_numbers(world_of_3):
    world_of_3.run(numbers)


def test_ranks_of_different_byte_order():
    def main():
        x = [np.ones(2, "<f8"), np.ones(3, ">f8" if dist.get_rank() else "<f8")]
        return [(y.dtype.byteorder, y.tolist()) for y in functional.all_reduce(x)]

    assert dist.run(main, 2) == [[("=", [2, 2]), (order, [2, 2, 2])] for order in "=>"]


DIFFERENT = {
    "key": lambda rank: {"a": 1, "b" if rank else "c": 2},
    "length": lambda rank: [1.0] * (2 + rank),
    "dtype": lambda rank: [np.zeros(2, "f4" if rank else "f8")],
    "shape": lambda rank: [np.zeros((2, 3) if rank else (3, 2))],
    "kind": lambda rank: (1, 2) if rank else [1, 2],
    "none": lambda rank: [1.0, None if rank else 2.0],
    "empty": lambda rank: [1.0] if rank else [],
}


def disagreeing(name):
    group = dist.new_group()
    x = DIFFERENT[name](dist.get_rank())
    with pytest.raises(dist.DistBackendError) as caught:
        functional.all_reduce(x, group=group)
    return str(caught.value)


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_structures(worlds, name):
    texts = worlds.world("threads", 2).run(disagreeing, name)
    if name == "key":
        for text in texts:
            assert "{'a': int64[], 'c': int64[]}" in text
            assert "{'a': int64[], 'b': int64[]}" in text


@pytest.mark.parametrize("backend", ["gloo", "gloo-tcp"])
def test_different_structures_of_processes(worlds, backend):
    for text in worlds.world(backend, 2).run(disagreeing, "key"):
        assert "{'a': int64[], 'b': int64[]}" in text


def test_wrong_leaves_are_named_before_anything_is_sent():
    def main():
        for x, kind, words in (
            ({"a": [1.0, "text"]}, TypeError, r"all_reduce on group 'world' .*x\['a'\]\[1\]"),
            ([np.zeros(2), np.full(2, "u")], TypeError, r"x\[1\] has the unsupported dtype <U1"),
            ([1.0, np.zeros(1, object)], TypeError, r"x\[1\] has the unsupported dtype object"),
        ):
            with pytest.raises(kind, match=words):
                functional.all_reduce(x)
        with pytest.raises(TypeError, match=r"x\[1\]: .*AVG is not defined for int64"):
            functional.all_reduce([1.0, 2], "avg")
        with pytest.raises(ValueError, match="all_gather_into_tensor on group .*axis must be -1 to 0"):
            functional.all_gather_into_tensor([np.zeros((2, 2)), np.zeros(2)], axis=1)
        return functional.all_reduce([1.0])

    assert dist.run(main, 2) == [[2.0], [2.0]]


def test_one_call_for_each_dtype():
    def main():
        with dist.profile() as profile:
            functional.all_reduce([np.ones(3), 1.0, {"x": np.ones((2, 2)), "n": 3}])
            functional.all_gather((np.ones(3), 1.0))
        return [(event.name, event.nbytes) for event in profile.events]

    assert dist.run(main, 2)[0] == [("all_reduce", 64), ("all_reduce", 8), ("all_gather", 64)]
    with dist.dry_run(8):
        assert functional.all_reduce({"a": 2, "b": [1.5]}) == {"a": 16, "b": [12.0]}
        assert functional.all_gather([1])[7] == [1]


@pytest.mark.filterwarnings("ignore:.*that this rank is not in")
def test_outside_of_the_group():
    def main():
        group = dist.new_group([0])
        if dist.get_rank() == 1:
            assert functional.all_gather([1], group) == []
            assert functional.all_gather_into_tensor({"a": 1}, group)["a"].shape == (0,)
            return functional.all_reduce({"a": 2}, group=group)
        return functional.all_reduce({"a": 1}, group=group)

    assert dist.run(main, 2) == [{"a": 1}, {"a": 2}]
