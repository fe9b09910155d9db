"""Layout: rank arithmetic against brute force, for any arrangement of any ranks."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshdist.errors import UnknownAxisError
from meshdist.mesh.layout.layout import Layout

NAMES = ("pp", "dp", "cp", "tp")


@st.composite
def arrangements(draw):
    """Nested lists of unique ranks, in any order and with gaps, of up to four axes."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    size = int(np.prod(shape))
    ranks = draw(st.lists(st.integers(0, 10**6), min_size=size, max_size=size, unique=True))
    return np.array(ranks).reshape(shape).tolist(), tuple(shape)


def at(nested, coordinate):
    """The entry of nested lists at `coordinate`."""
    for index in coordinate:
        nested = nested[index]
    return nested


def coordinates(shape):
    return itertools.product(*map(range, shape))


@given(arrangements())
def test_every_rank_is_found_where_it_was_put(arrangement):
    nested, shape = arrangement
    layout = Layout(nested)
    assert layout.ranks.tolist() == nested
    assert (layout.shape, layout.ndim, layout.size) == (shape, len(shape), int(np.prod(shape)))
    for coordinate in coordinates(shape):
        assert layout.coordinate(at(nested, coordinate)) == coordinate


@given(arrangements(), st.integers(-5, 2 * 10**6))
def test_a_rank_that_was_not_put_is_not_found(arrangement, rank):
    nested, shape = arrangement
    expected = [c for c in coordinates(shape) if at(nested, c) == rank]
    assert Layout(nested).coordinate(rank) == (expected[0] if expected else None)


@given(arrangements(), st.data())
def test_a_row_differs_in_its_axis_alone(arrangement, data):
    nested, shape = arrangement
    coordinate = data.draw(st.sampled_from(list(coordinates(shape))))
    axis = data.draw(st.integers(0, len(shape) - 1))
    expected = [at(nested, (*coordinate[:axis], i, *coordinate[axis + 1 :])) for i in range(shape[axis])]
    assert Layout(nested).row(axis, coordinate).tolist() == expected


@given(arrangements(), st.data())
def test_a_selection_holds_its_axes_in_the_order_named(arrangement, data):
    nested, shape = arrangement
    axes = data.draw(st.permutations(range(len(shape))))[: data.draw(st.integers(1, len(shape)))]
    fixed = data.draw(st.sampled_from(list(coordinates(shape))))
    layout = Layout(nested, NAMES[: len(shape)])
    selected = layout.select(axes, fixed)
    assert selected.shape == tuple(shape[axis] for axis in axes)
    assert selected.names == tuple(NAMES[axis] for axis in axes)
    row_major = []
    for inner in coordinates(selected.shape):
        full = list(fixed)
        for axis, index in zip(axes, inner, strict=True):
            full[axis] = index
        rank = at(nested, full)
        assert selected.ranks[inner] == rank
        assert selected.coordinate(rank) == inner
        row_major.append(rank)
    assert selected.members() == tuple(row_major)


@given(arrangements(), st.data())
def test_selecting_twice_is_selecting_once(arrangement, data):
    nested, shape = arrangement
    fixed = data.draw(st.sampled_from(list(coordinates(shape))))
    outer = data.draw(st.permutations(range(len(shape))))[: data.draw(st.integers(1, len(shape)))]
    inner = data.draw(st.permutations(range(len(outer))))[: data.draw(st.integers(1, len(outer)))]
    layout = Layout(nested, NAMES[: len(shape)])
    twice = layout.select(outer, fixed).select(inner, [fixed[axis] for axis in outer])
    assert twice == layout.select([outer[axis] for axis in inner], fixed)


@given(arrangements())
def test_equal_by_arrangement(arrangement):
    nested, shape = arrangement
    names = NAMES[: len(shape)]
    layout, same = Layout(nested, names), Layout(np.array(nested, dtype=np.int32), list(names))
    assert layout == same
    assert hash(layout) == hash(same)
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert layout != Layout(nested)
    assert layout != Layout([nested], ("extra", *names))
    assert layout != Layout((np.array(nested) + 1).tolist(), names)


def test_axes_by_name_and_index():
    layout = Layout([[0, 1], [2, 3]], ("dp", "tp"))
    assert [layout.axis(axis) for axis in ("dp", "tp", 0, 1, -1, -2, np.int64(1))] == [0, 1, 0, 1, 1, 0, 1]
    assert layout.describe() == "(dp=2, tp=2)"
    assert Layout([[0, 1, 2]]).describe() == "(1, 3)"


@pytest.mark.parametrize("kind", [KeyError, ValueError, UnknownAxisError])
def test_an_unknown_name_lists_the_known_ones(kind):
    with pytest.raises(kind) as error:
        Layout([[0, 1], [2, 3]], ("dp", "tp")).axis("pp")
    assert str(error.value) == "unknown axis 'pp': this mesh is (dp=2, tp=2), its axes are 'dp', 'tp'"


@pytest.mark.parametrize(
    ("axis", "hint"),
    [("pd", "; did you mean 'dp'?"), ("DP", "; did you mean 'dp'?"), ("mdl", "; did you mean 'model'?"), ("x", "")],
)
def test_a_misspelt_name_is_told(axis, hint):
    with pytest.raises(UnknownAxisError) as error:
        Layout([[0, 1], [2, 3]], ("dp", "model")).axis(axis)
    assert str(error.value).endswith(f"its axes are 'dp', 'model'{hint}")


def test_the_error_about_an_axis_is_public():
    from meshdist import device_mesh, errors

    assert device_mesh.UnknownAxisError is errors.UnknownAxisError is UnknownAxisError
    assert UnknownAxisError.__module__ == "meshdist.errors"


@pytest.mark.parametrize("axis", [2, -3])
def test_an_index_beyond_the_axes(axis):
    with pytest.raises(
        UnknownAxisError, match=rf"unknown axis {axis}: this mesh is \(2, 2\) and has no names; .*below 2"
    ):
        Layout([[0, 1], [2, 3]]).axis(axis)


@pytest.mark.parametrize("axis", [1.0, True, None, ("dp",)])
def test_what_cannot_be_an_axis(axis):
    with pytest.raises(TypeError, match="an axis is a name or an index, got"):
        Layout([[0, 1], [2, 3]]).axis(axis)


@pytest.mark.parametrize(
    ("ranks", "kind", "words"),
    [
        ([], ValueError, r"at least one axis and one rank, got shape \(0,\)"),
        (3, ValueError, r"at least one axis and one rank, got shape \(\)"),
        ([[0, 1], [2]], ValueError, "rows of unequal length"),
        ([0, 1, 2, 1], ValueError, "rank 1 appears 2 times among the 4"),
        ([0, -1], ValueError, "must not be negative, got -1"),
        ([0.0, 1.0], TypeError, "must be integers, got an array of float64"),
        ([True, False], TypeError, "must be integers, got an array of bool"),
        (["0", "1"], TypeError, "must be integers"),
    ],
)
def test_what_cannot_be_a_mesh(ranks, kind, words):
    with pytest.raises(kind, match=words):
        Layout(ranks)


@pytest.mark.parametrize(
    ("names", "kind", "words"),
    [
        (("dp",), ValueError, r"expected 2 names, one per axis of the mesh of shape \(2, 2\), got 1: \('dp',\)"),
        (("dp", "dp"), ValueError, r"a name can be used only once, but 'dp' is repeated in \('dp', 'dp'\)"),
        (("dp", ""), ValueError, "must not be empty"),
        (("dp", 1), TypeError, r"expected strings, got 1 \(int\)"),
        ("dp", TypeError, r"got the string 'dp'; write \('dp',\)"),
    ],
)
def test_what_cannot_be_names(names, kind, words):
    with pytest.raises(kind, match=words):
        Layout([[0, 1], [2, 3]], names)


def test_the_ranks_belong_to_the_layout():
    given_ranks = np.arange(4).reshape(2, 2)
    layout = Layout(given_ranks)
    given_ranks[0, 0] = 9
    assert layout.ranks.tolist() == [[0, 1], [2, 3]]
    for array in (layout.ranks, layout.row(0, (0, 0)), layout.select((1,), (0, 0)).ranks):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 7


def test_65536_ranks_in_no_particular_order():
    ranks = np.random.default_rng(0).permutation(65536).reshape(16, 64, 64)
    layout = Layout(ranks, ("pp", "dp", "tp"))
    where = (3, 50, 17)
    assert layout.coordinate(int(ranks[where])) == where
    assert layout.select((2, 1), where).ranks.tolist() == ranks[3].T.tolist()
    assert layout.coordinate(65536) is None
