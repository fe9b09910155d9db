"""Layouts with other axes, against brute force: dictionaries from coordinate to rank in plain Python."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshdist.mesh.layout.layout import Layout

NAMES = ("pp", "dp", "cp", "tp")
EXTENTS = st.sampled_from([1, 2, 3, 4, 6])


def coordinates(shape):
    return itertools.product(*map(range, shape))


def table(layout):
    """A layout as a dictionary from coordinate to rank."""
    return {at: int(layout.ranks[at]) for at in coordinates(layout.shape)}


def check(layout, expected, shape, names=None):
    """Check all that a layout says against the dictionary of what it should hold."""
    assert (layout.shape, layout.ndim, layout.size) == (tuple(shape), len(shape), math.prod(shape))
    assert layout.names == names
    assert table(layout) == expected
    assert layout.members() == tuple(expected[at] for at in coordinates(shape))
    assert layout.first_rank() == expected[(0,) * len(shape)]
    for at, rank in expected.items():
        assert layout.coordinate(rank) == at
    assert layout.coordinate(max(expected.values()) + 1) is None
    assert layout == Layout(layout.ranks, names)
    assert hash(layout) == hash(Layout(layout.ranks, names))


def unraveled(index, shape):
    digits = []
    for extent in reversed(shape):
        index, digit = divmod(index, extent)
        digits.insert(0, digit)
    return tuple(digits)


@st.composite
def layouts(draw, max_axes=4):
    """Layouts of unsorted ranks with gaps: as they were given, or planes and parts of larger ones, or transposed."""
    shape = tuple(draw(st.lists(EXTENTS, min_size=1, max_size=max_axes)))
    size = math.prod(shape)
    seed = draw(st.integers(0, 2**32 - 1))
    ranks = np.random.default_rng(seed).permutation(2 * size)[:size].reshape(shape)
    layout = Layout(ranks, NAMES[: len(shape)])
    kind = draw(st.sampled_from(["given", "transposed", "plane", "part", "flattened"]))
    order = draw(st.permutations(range(len(shape))))
    if kind == "transposed":
        return layout.transpose(order)
    if kind == "plane":
        axes = order[: draw(st.integers(1, len(shape)))]
        return layout.select(axes, [draw(st.integers(0, extent - 1)) for extent in shape])
    if kind == "part":
        axis = order[0]
        cut = draw(st.integers(0, shape[axis] - 1))
        return layout.split(axis, (cut, shape[axis] - cut))[1] if cut else layout
    if kind == "flattened" and len(shape) > 1:
        return layout.flatten(order[:2], "both")
    return layout


def subset(draw, count, least=1):
    return draw(st.permutations(range(count)))[: draw(st.integers(least, count))]


@given(layouts(), st.data())
def test_select(layout, data):
    whole = table(layout)
    at = data.draw(st.sampled_from(sorted(whole)))
    axes = subset(data.draw, layout.ndim)
    shape = [layout.shape[axis] for axis in axes]
    expected = {}
    for inner in coordinates(shape):
        full = list(at)
        for axis, index in zip(axes, inner, strict=True):
            full[axis] = index
        expected[inner] = whole[tuple(full)]
    check(layout.select(axes, at), expected, shape, tuple(layout.names[axis] for axis in axes))


@given(layouts(), st.data())
def test_transpose(layout, data):
    order = data.draw(st.permutations(range(layout.ndim)))
    expected = {tuple(at[axis] for axis in order): rank for at, rank in table(layout).items()}
    transposed = layout.transpose(order)
    check(
        transposed,
        expected,
        [layout.shape[axis] for axis in order],
        tuple(layout.names[axis] for axis in order),
    )
    assert transposed.transpose([order.index(axis) for axis in range(layout.ndim)]) == layout


@given(layouts(), st.data())
def test_flatten_axes_in_any_order(layout, data):
    axes = subset(data.draw, layout.ndim)
    others = [axis for axis in range(layout.ndim) if axis not in axes]
    place = len([axis for axis in others if axis < axes[0]])
    expected = {}
    for at, rank in table(layout).items():
        index = 0
        for axis in axes:
            index = index * layout.shape[axis] + at[axis]
        rest = [at[axis] for axis in others]
        expected[(*rest[:place], index, *rest[place:])] = rank
    shape = [layout.shape[axis] for axis in others]
    shape.insert(place, math.prod(layout.shape[axis] for axis in axes))
    names = [layout.names[axis] for axis in others]
    names.insert(place, "flat")
    flat = layout.flatten(axes, "flat")
    check(flat, expected, shape, tuple(names))
    # Back: the same axes in the place of the flat one, then where they were.
    back = flat.unflatten(place, [layout.shape[axis] for axis in axes], [layout.names[axis] for axis in axes])
    order = [*others[:place], *axes, *others[place:]]
    assert back.transpose([order.index(axis) for axis in range(layout.ndim)]) == layout


@given(layouts(), st.data())
def test_unflatten_at_any_seams(layout, data):
    axis = data.draw(st.integers(0, layout.ndim - 1))
    extent = layout.shape[axis]
    sizes = []
    while extent > 1:
        sizes.append(data.draw(st.sampled_from([n for n in range(2, extent + 1) if extent % n == 0])))
        extent //= sizes[-1]
    sizes.insert(data.draw(st.integers(0, len(sizes))), 1)
    new = tuple(f"n{number}" for number in range(len(sizes)))
    names = (*layout.names[:axis], *new, *layout.names[axis + 1 :])
    expected = {(*at[:axis], *unraveled(at[axis], sizes), *at[axis + 1 :]): rank for at, rank in table(layout).items()}
    parted = layout.unflatten(axis, sizes, new)
    check(parted, expected, [*layout.shape[:axis], *sizes, *layout.shape[axis + 1 :]], names)
    assert parted.flatten(range(axis, axis + len(sizes)), layout.names[axis]) == layout


@given(layouts(), st.data())
def test_split_and_concatenate(layout, data):
    axis = data.draw(st.integers(0, layout.ndim - 1))
    left, sizes = layout.shape[axis], []
    while left:
        sizes.append(data.draw(st.integers(1, left)))
        left -= sizes[-1]
    whole, begin = table(layout), 0
    parts = layout.split(axis, sizes)
    for part, size in zip(parts, sizes, strict=True):
        expected = {
            (*at[:axis], at[axis] - begin, *at[axis + 1 :]): rank
            for at, rank in whole.items()
            if begin <= at[axis] < begin + size
        }
        check(part, expected, [*layout.shape[:axis], size, *layout.shape[axis + 1 :]], layout.names)
        begin += size
    assert Layout.concatenate(parts, axis) == layout


@given(layouts(), st.data())
def test_axes_put_together_are_planes_that_do_not_overlap(layout, data):
    axis = data.draw(st.integers(0, layout.ndim - 1))
    extent = layout.shape[axis]
    inner = data.draw(st.sampled_from([n for n in range(1, extent + 1) if extent % n == 0]))
    parted = layout.unflatten(axis, (extent // inner, inner), ("outer", "inner"))
    if not parted.shares_list(layout):
        return
    chosen = subset(data.draw, parted.ndim)
    axes, names = [parted.axes[number] for number in chosen], [parted.names[number] for number in chosen]
    planes = set()
    for at, rank in table(parted).items():
        plane = layout.over(axes, names, rank)
        assert plane == parted.select(chosen, at)
        planes.add(plane.members())
    assert sorted(rank for plane in planes for rank in plane) == sorted(layout.members())


@given(st.lists(EXTENTS, min_size=1, max_size=3), st.data())
def test_axes_are_put_together_only_where_no_plane_overlaps(shape, data):
    layout = Layout(np.arange(math.prod(shape)).reshape(shape))
    pool = [axis for order in itertools.permutations(range(len(shape))) for axis in layout.transpose(order).axes]
    for axis in range(len(shape)):
        for size in (n for n in range(2, shape[axis]) if shape[axis] % n == 0):
            pool += layout.unflatten(axis, (shape[axis] // size, size), None).axes
    axes = data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
    if not layout.holds(axes):
        with pytest.raises(ValueError, match="make no mesh together"):
            layout.over(axes, None, 0)
        # Right to refuse: with these axes some two ranks do not agree on who is in their plane.
        wheels = [wheel for axis in axes for wheel in axis]
        positions = [
            sum(i * s for i, (_, s) in zip(at, wheels, strict=True)) for at in coordinates([n for n, _ in wheels])
        ]
        tiles = len(set(positions)) == len(positions) and max(positions) < layout.size
        assert not (tiles and divides(wheels, layout.size))
        return
    planes = {layout.over(axes, None, rank).members() for rank in layout.members()}
    assert sorted(rank for plane in planes for rank in plane) == sorted(layout.members())


def divides(wheels, size):
    """Whether the wheels, fastest first, each turn a whole number of times within the next and within `size`."""
    reached = 1
    for extent, stride in sorted(wheels, key=lambda wheel: wheel[1]):
        if stride % reached:
            return False
        reached = stride * extent
    return size % reached == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda layout: layout.unflatten(1, (2, 2), ("a", "b")), "axis 'tp' has 3 ranks, but 2 x 2 is 4"),
        (lambda layout: layout.unflatten(1, (3, 1), ("a", "dp")), "'dp' is repeated"),
        (lambda layout: layout.unflatten(1, (3, 1), ("a",)), "so pass 2 names, got 1: "),
        (lambda layout: layout.unflatten(1, (3, 1), None), "becomes 2 axes, so pass 2 names, got none"),
        (lambda layout: layout.flatten((1,), "dp"), "'dp' is repeated"),
        (lambda layout: layout.over([layout.axes[0], layout.axes[0]], ("a", "b"), 0), "make no mesh together"),
        (lambda layout: layout.over([layout.axes[0]], ("a",), 6), "rank 6 is not in the mesh"),
        (lambda layout: Layout.concatenate([layout, layout], 0), "rank 0 appears 2 times"),
        (lambda layout: Layout.concatenate([layout, layout.transpose((1, 0))], 0), "must have the same axes"),
    ],
)
def test_what_does_not_fit(change, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        change(Layout([[0, 1, 2], [3, 4, 5]], ("dp", "tp")))


def test_flattening_a_part_of_a_layout_without_names_takes_no_name():
    layout = Layout([[0, 1], [2, 3]])
    assert layout.flatten((0, 1), "all").names == ("all",)
    assert layout.flatten((1,), None).names is layout.flatten((1, 0), None).names is None
    assert layout.flatten((1, 0), None).describe() == "(4)"
    with pytest.raises(ValueError, match="whose others have none"):
        layout.flatten((1,), "tp")


def test_arrays_of_derived_layouts_cannot_be_written():
    layout = Layout(np.arange(8).reshape(2, 2, 2))
    for derived in (layout.flatten((2, 0), None), layout.transpose((1, 2, 0)), layout.split(0, (1, 1))[1]):
        with pytest.raises(ValueError, match="read-only"):
            derived.ranks[...] = 7
