"""ArrayLayout: blocks partition the array, and equal layouts are one object."""

import pickle

import numpy as np
import pytest
from array_layouts import random_layout, random_shape
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdist.tensor.array_layout import ArrayLayout, Cut, chunk_sizes
from meshdist.tensor.placements import PENDING_OPS, Partial, PlacementError, Replicate, Shard

MESHES = [(1,), (2,), (3,), (2, 2), (2, 3), (1, 2, 2)]


@st.composite
def layouts(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return random_layout(rng, random_shape(rng), draw(st.sampled_from(MESHES)), PENDING_OPS)


quickly = settings(max_examples=60, derandomize=True, database=None)


@quickly
@given(layouts())
def test_blocks_partition_the_array(layout):
    # Ranks that differ along an axis that cuts hold different parts; all others hold the same.
    cutting = {axis for dim in range(layout.ndim) for axis in layout.axes_of(dim)}
    counts = np.zeros(layout.shape, int)
    for coordinate in layout.coordinates():
        counts[layout.index(coordinate)] += 1
        assert counts[layout.index(coordinate)].shape == layout.local_shape(coordinate)
    repeats = [extent for axis, extent in enumerate(layout.mesh_shape) if axis not in cutting]
    assert (counts == np.prod(repeats, dtype=int)).all()


@quickly
@given(layouts())
def test_equal_layouts_are_one_object(layout):
    assert ArrayLayout.of(layout.shape, layout.mesh_shape, layout.placements) is layout
    assert ArrayLayout.of_cuts(layout.shape, layout.mesh_shape, layout.cuts, layout.pending) is layout
    assert pickle.loads(pickle.dumps(layout)) is layout


@quickly
@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks(rows, parts):
    sizes = chunk_sizes(rows, parts)
    assert sum(sizes) == rows
    assert len(sizes) == parts
    assert list(sizes) == sorted(sizes, reverse=True)


def test_canonical_placements():
    layout = ArrayLayout.of((5, 3), (2, 2), [Shard(-2, sizes=(3, 2)), Shard(0, sizes=((2, 1), (1, 1)))])
    assert layout.placements == (Shard(0), Shard(0))
    assert layout.cuts == (Cut((0, 1), (2, 1, 1, 1)), None)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([Shard(2), Replicate()], r"shards dimension 2, but the array, of shape \(5, 3\), has only 2 dimensions"),
        ([Shard(0, sizes=(1, 2)), Replicate()], r"has sizes of 1 \+ 2 = 3 rows, for 5 rows of dimension 0"),
        ([Shard(0, sizes=(1, 2, 2)), Replicate()], "must have 2 sizes, one for each rank"),
        ([Partial("max"), Partial("sum")], "cannot be .* at once"),
    ],
)
def test_placements_that_do_not_fit(placements, message):
    with pytest.raises(PlacementError, match=message):
        ArrayLayout.of((5, 3), (2, 2), placements)
