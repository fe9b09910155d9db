"""Functions that rearrange, join, split, pad and choose elements, compared with NumPy's on whole arrays."""

import numpy as np
import pytest
from array_layouts import SPECIAL, random_shape, values
from placed_arrays import compare, layout_for, on_meshes, place

import meshdist
from meshdist.tensor import DTensor, Partial, PlacementError, Replicate, Shard, implicit_redistribution


def divided(rng, rows):
    """Factors of a number, in random order."""
    factors = []
    while rows > 1:
        factor = next(f for f in (2, 3, 5, 7, 11, rows) if rows % f == 0)
        factors.append(factor)
        rows //= factor
    rng.shuffle(factors)
    return factors


def reshaped(rng, shape):
    """A shape of as many elements: neighbours merged, dimensions split, ones added and left out."""
    dims = []
    for rows in shape:
        kind = rng.random()
        if kind < 0.3 and dims:
            dims[-1] *= rows
        elif kind < 0.6 and rows > 1:
            dims += divided(rng, rows)
        elif rows != 1 or kind < 0.8:
            dims.append(rows)
        if rng.random() < 0.1:
            dims.append(1)
    if dims and rng.random() < 0.3 and all(dims):
        dims[rng.integers(len(dims))] = -1
    return tuple(map(int, dims))


def axis_of(rng, shape, more=0):
    ndim = len(shape) + more
    return int(rng.integers(-ndim, ndim + (rng.random() < 0.03))) if ndim else 0


def _squeezed(rng, shape):
    ones = [dim for dim, rows in enumerate(shape) if rows == 1]
    axis = None if rng.random() < 0.5 or not ones else int(rng.choice(ones))
    return lambda a: np.squeeze(a, axis)


def _broadcast(rng, shape):
    extents = [int(rng.integers(1, 4)) if rows == 1 else rows for rows in shape]
    return lambda a: np.broadcast_to(a, (*([2] * int(len(shape) < 3)), *extents))


def _transposed(rng, shape):
    order = None if rng.random() < 0.3 else tuple(rng.permutation(len(shape)).tolist())
    return lambda a: np.transpose(a, order)


def _padded(rng, shape):
    mode = str(
        rng.choice(["constant", "edge", "reflect", "wrap", "mean", "linear_ramp"], p=[0.4, 0.3, 0.1, 0.1, 0.05, 0.05])
    )
    widths = [tuple(rng.integers(0, 3, 2).tolist()) if rng.random() < 0.7 else (0, 0) for _ in shape]
    if mode == "mean":
        mode = "maximum"
    more = {"constant_values": 5} if mode == "constant" else {}
    return lambda a: np.pad(a, widths, mode, **more)


def _repeated(rng, shape):
    axis = axis_of(rng, shape)
    times = int(rng.integers(0, 3))
    if rng.random() < 0.5 and shape and -len(shape) <= axis < len(shape):
        times = rng.integers(0, 3, shape[axis])
    return lambda a: np.repeat(a, times, axis)


def _rolled(rng, shape):
    if rng.random() < 0.2:
        return lambda a: np.roll(a, 2)
    shifts = rng.integers(-7, 8, 2).tolist()
    axes = [axis_of(rng, shape), axis_of(rng, shape)]
    if rng.random() < 0.5:
        return lambda a: np.roll(a, shifts[0], axes[0])
    return lambda a: np.roll(a, shifts, axes)


def _taken(rng, shape):
    axis = axis_of(rng, shape) if rng.random() < 0.8 else None
    rows = int(np.prod(shape)) if axis is None else shape[axis] if -len(shape) <= axis < len(shape) else 1
    indices = (
        rng.integers(-rows, max(rows, 1), (2, 2)) if rng.random() < 0.7 else int(rng.integers(-rows, max(rows, 1)))
    )
    mode = str(rng.choice(["raise", "wrap", "clip"]))
    return lambda a: np.take(a, indices, axis, mode=mode)


def _along(rng, shape):
    axis = axis_of(rng, shape)
    if not -len(shape) <= axis < len(shape):
        axis = 0
    rows = shape[axis] if shape else 0
    indices = (
        rng.integers(-rows, rows, [4 if dim == axis % len(shape) else n for dim, n in enumerate(shape)])
        if rows
        else None
    )
    return lambda a: np.take_along_axis(a, indices, axis) if rows else a


def _cast(rng, shape):
    dtype = str(rng.choice(["float32", "float64", "complex128", "int64", "bool"]))
    casting = str(rng.choice(["unsafe", "safe"], p=[0.8, 0.2]))
    return lambda a: a.astype(dtype, casting=casting)


def drawn(function, *draw):
    """Make cases that call `function` with what is drawn for a shape."""

    def make(rng, shape):
        arguments = [one(rng, shape) for one in draw]
        return lambda a: function(a, *arguments)

    return make


def drawn_for_all(function, *draw):
    """Make cases that call `function` with a list of arrays and what is drawn for their shape."""

    def make(rng, shape):
        arguments = [one(rng, shape) for one in draw]
        return lambda *arrays: function(arrays, *arguments)

    return make


def _offset(rng, shape):
    return int(rng.integers(-2, 3))


def _new_axis(rng, shape):
    return axis_of(rng, shape, 1)


def _times(rng, shape):
    return tuple(rng.integers(0, 3, rng.integers(0, 4)).tolist())


def _sections(rng, shape):
    return int(rng.integers(1, 5)) if rng.random() < 0.5 else sorted(rng.integers(0, 8, 2).tolist())


def _mask(rng, shape):
    return rng.random(shape) < 0.5


DTYPES = ("float64", "float32", "complex128", "int64", "int32", "uint8", "bool")
# Each makes a function of one array, for a shape.
ONE = {
    "transpose": _transposed,
    "swapaxes": drawn(np.swapaxes, axis_of, axis_of),
    "moveaxis": drawn(np.moveaxis, axis_of, axis_of),
    "rollaxis": drawn(np.rollaxis, axis_of),
    "expand_dims": drawn(np.expand_dims, _new_axis),
    "expand_dims of two": drawn(lambda a: np.expand_dims(a, (0, 2) if a.ndim else (0, 1))),
    "squeeze": _squeezed,
    "atleast_1d": drawn(np.atleast_1d),
    "atleast_2d": drawn(np.atleast_2d),
    "atleast_3d": drawn(np.atleast_3d),
    "broadcast_to": _broadcast,
    "reshape": drawn(np.reshape, reshaped),
    "reshape back": drawn(lambda a, new: a.reshape(new).reshape(a.shape), reshaped),
    "reshape in order F": drawn(lambda a, new: np.reshape(a, new, order="F"), reshaped),
    "ravel": drawn(np.ravel),
    "array_split": drawn(lambda a, n, i: np.array_split(a, n, i) if a.ndim else a, _sections, axis_of),
    "split": drawn(lambda a, n, i: np.split(a, n, i) if a.ndim else a, _sections, axis_of),
    "hsplit": drawn(lambda a: np.hsplit(a, 2)),
    "vsplit": drawn(lambda a: np.vsplit(a, [1])),
    "dsplit": drawn(lambda a: np.dsplit(a, [1, 2])),
    "repeat": _repeated,
    "tile": drawn(np.tile, _times),
    "flip": drawn(np.flip, axis_of),
    "flip all": drawn(np.flip),
    "fliplr": drawn(np.fliplr),
    "flipud": drawn(np.flipud),
    "roll": _rolled,
    "pad": _padded,
    "copy": drawn(np.copy),
    "flatten": drawn(lambda a: a.flatten()),
    "astype": _cast,
    "real": drawn(np.real),
    "imag": drawn(np.imag),
    "angle": drawn(np.angle),
    "round": drawn(lambda a: np.round(a, -1)),
    "clip": drawn(lambda a: np.clip(a, -2, 3)),
    "clip from below": drawn(lambda a: np.clip(a, 1, None)),
    "where": drawn(lambda a: np.where(a > 0, a, 1)),
    "where of two": drawn(lambda a, mask: np.where(mask, a, a * 2), _mask),
    "select": drawn(lambda a: np.select([a > 2, a < -2], [a, 1], 7)),
    "tril": drawn(np.tril, _offset),
    "triu": drawn(np.triu, _offset),
    "nan_to_num": drawn(np.nan_to_num),
    "take": _taken,
    "take_along_axis": _along,
}
# Of several arrays of one shape.
MANY = {
    "concatenate": drawn_for_all(np.concatenate, axis_of),
    "concatenate all": drawn_for_all(lambda arrays: np.concatenate(arrays, None)),
    "stack": drawn_for_all(np.stack, _new_axis),
    "vstack": drawn_for_all(np.vstack),
    "hstack": drawn_for_all(np.hstack),
    "dstack": drawn_for_all(np.dstack),
    "column_stack": drawn_for_all(np.column_stack),
    "broadcast_arrays": drawn_for_all(lambda arrays: np.broadcast_arrays(*arrays, np.ones(arrays[0].shape[1:]))),
    "where": drawn_for_all(lambda arrays, mask: np.where(mask, arrays[0], arrays[1]), _mask),
    "append": drawn_for_all(lambda arrays: np.append(arrays[0], arrays[1], 0)),
    "clip": drawn_for_all(lambda arrays: np.clip(arrays[0], arrays[1], None)),
}


def one_at_random(mesh, rng, rounds):
    refused = 0
    for _ in range(rounds):
        for name, make in ONE.items():
            shape = random_shape(rng)
            x = values(rng, shape, rng.choice(DTYPES), special=SPECIAL)
            layout = layout_for(rng, x, mesh, partial=x.dtype.kind != "b")
            if layout.pending:  # the sign of a zero is not that of its parts, and np.angle tells
                x = x + x.dtype.type(0)
            refused += compare(make(rng, shape), [x], [layout], mesh, name, signs=not layout.pending)
    return refused / len(ONE) / rounds


def many_at_random(mesh, rng, rounds):
    refused = 0
    for _ in range(rounds):
        for name, make in MANY.items():
            shape = random_shape(rng)
            arrays = [values(rng, shape, rng.choice(DTYPES), special=SPECIAL) for _ in range(rng.integers(2, 4))]
            partial = len({x.dtype.kind for x in arrays}) == 1 and arrays[0].dtype.kind != "b"
            layouts = [
                layout_for(rng, x, mesh, None, partial) if n == 0 or rng.random() < 0.5 else None
                for n, x in enumerate(arrays)
            ]
            signs = not any(layout and layout.pending for layout in layouts)
            refused += compare(make(rng, shape), arrays, layouts, mesh, name, signs=signs)
    return refused / len(MANY) / rounds


# Of the calls, how many may be refused, for what is cut.
def test_functions_of_one_array_at_random():
    assert max(max(ranks) for ranks in on_meshes(one_at_random, 2)) < 0.45


def test_functions_of_several_arrays_at_random():
    assert max(max(ranks) for ranks in on_meshes(many_at_random, 2)) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_functions_at_random_with_more_seeds(seed):
    on_meshes(one_at_random, 5, seed=seed)
    on_meshes(many_at_random, 10, seed=seed)


def layouts(mesh):
    x = place(np.zeros((4, 6)), mesh, [Shard(0), Shard(1)])
    y = place(np.zeros((4, 6)), mesh, [Shard(0), Replicate()])
    pending = place(np.ones((4, 6)), mesh, [Partial(), Replicate()])
    return {
        "T": x.T.placements,
        "heads": x.reshape(4, 2, 3).placements,
        "flat": y.reshape(-1).placements,
        "rows": y.reshape(2, 2, 6).placements,
        "padded": np.pad(x, 1).placements,
        "pieces": [piece.placements for piece in np.split(y, [1])],
        "pending": np.concatenate([pending, np.zeros((4, 1))], 1).placements,
        "repeated": np.repeat(x, [0, 1, 2, 3], 0).placements,
        "rolled": np.roll(y, 1, 0).placements,
        "wider": place(np.ones(3, "f4"), mesh, [Partial(), Replicate()]).astype("f8").placements,
        "narrower": pending.astype("f4").placements,
    }


def test_what_becomes_of_placements():
    found = meshdist.run(lambda: layouts(meshdist.init_device_mesh("cpu", (2, 2))), 4)[0]
    assert found == {
        "T": (Shard(1), Shard(0)),
        "heads": (Shard(0), Shard(1)),
        "flat": (Shard(0), Replicate()),
        "rows": (Shard(0), Replicate()),
        "padded": (Shard(0), Shard(1)),
        "pieces": [(Shard(0), Replicate()), (Shard(0, sizes=(1, 2)), Replicate())],
        "pending": (Partial(), Replicate()),
        "repeated": (Shard(0, sizes=(1, 5)), Shard(1)),
        "rolled": (Shard(0), Replicate()),
        "wider": (Partial(), Replicate()),
        "narrower": (Replicate(), Replicate()),
    }


REFUSED = [
    (lambda x: x.reshape(3, 4), r"Shard\(0, sizes=\(4, 2\)\)"),
    (lambda x: x.T.ravel(), r"np.ravel: to reshape .* x.redistribute\(\[Shard\(0\)\]\), which sends 24 B"),
    (lambda x: np.flip(x, 0), "reversing a dimension"),
    (lambda x: np.tile(x, (2, 1)), "np.tile"),
    (lambda x: np.concatenate([x, np.ones((1, 2)), x]), "operand 0.*operand 2"),
    (lambda x: np.pad(x, 1, mode="reflect"), "np.pad"),
    (lambda x: np.take_along_axis(x, np.zeros((1, 2), int), 0), "np.take_along_axis"),
]


def refusals(mesh):
    x = place(np.arange(12.0).reshape(6, 2), mesh, [Shard(0)])
    for function, match in REFUSED:
        with pytest.raises(PlacementError, match=match) as raised:
            function(x)
        assert "redistribute([" in str(raised.value)
        assert "per rank" in str(raised.value)
        with implicit_redistribution():
            assert isinstance(function(x), DTensor)


@pytest.mark.parametrize(
    ("old", "new", "dim", "placement"),
    [
        ((6, 8), (48,), 1, Shard(0)),
        ((5, 8), (40,), 1, Shard(0, sizes=(24, 16))),
        ((1, 5, 8), (40,), 2, Shard(0, sizes=(24, 16))),
        ((4, 3, 2), (6, 4), 2, Shard(0)),
        ((4, 3, 2), (4, 6), 2, Shard(1, sizes=(4, 2))),
        ((3, 8), (2, 12), 1, Replicate()),  # a rank with whole rows of both has all
    ],
)
def test_a_reshape_that_moves_elements_shards_the_outermost_dimension(old, new, dim, placement):
    def program():
        whole = np.arange(np.prod(old)).reshape(old)
        x = place(whole, meshdist.init_device_mesh("cpu", (2,)), [Shard(dim)])
        with implicit_redistribution():
            y = x.reshape(new)
        assert y.full().tolist() == whole.reshape(new).tolist()
        return y.placements

    assert meshdist.run(program, 2) == [(placement,)] * 2


def test_what_is_cut_does_not_move_unasked():
    meshdist.run(lambda: refusals(meshdist.init_device_mesh("cpu", (2,))), 2)


def test_out_and_bad_arguments():
    def program():
        x = place(np.arange(6.0).reshape(3, 2), meshdist.init_device_mesh("cpu", (2,)), [Shard(0)])
        out = np.zeros_like(x)
        assert np.clip(x, 1, 2, out=out) is out
        assert out.full().tolist() == [[1, 1], [2, 2], [2, 2]]
        for bad, error in (
            (lambda: x.reshape(4, 2), ValueError),
            (lambda: x.reshape(-1, -1), ValueError),
            (lambda: np.squeeze(x, 0), ValueError),
            (lambda: np.concatenate([x, np.ones((3, 3))]), ValueError),
            (lambda: np.concatenate([x, x], 2), np.exceptions.AxisError),
            (lambda: np.stack([x, x[:2]]), ValueError),
            (lambda: np.repeat(x, -1, 0), ValueError),
            (lambda: np.repeat(x, [1, 2], 0), ValueError),
            (lambda: np.pad(x, -1), ValueError),
            (lambda: np.pad(x, 1.5), TypeError),
            (lambda: np.pad(x, 1, "never"), ValueError),
            (lambda: np.split(x, 2), ValueError),
            (lambda: np.transpose(x, (0, 0)), ValueError),
            (lambda: np.flip(x, 3), np.exceptions.AxisError),
            (lambda: np.roll(x, 1, 3), np.exceptions.AxisError),
            (lambda: np.broadcast_to(x, (3, 3)), ValueError),
            (lambda: x.astype("int32", casting="safe"), TypeError),
            (lambda: x.astype(str), TypeError),
            (lambda: x.astype(object), TypeError),
            (lambda: np.where(x > 0, x, np.ones(4)), ValueError),
        ):
            with pytest.raises(error):
                bad()

    meshdist.run(program, 2)
