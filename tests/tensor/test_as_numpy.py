"""What NumPy does with arguments at the edges: empty blocks, bad indices, arrays without dimensions, other operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from placed_arrays import compare, on_meshes, outcome, place

import meshdist
from meshdist.tensor import Partial, Replicate, Shard

FEW_ROWS = ((2,), (3,))  # meshes on which an array of one row has empty blocks


def on_three_ranks(program: Callable[[Any], Any]) -> list[Any]:
    def body() -> Any:
        return program(meshdist.init_device_mesh("cpu", (3,), mesh_dim_names=("a",)))

    return meshdist.run(body, 3, timeout=30)


# ---- Blocks without elements

LINES: dict[str, Callable[[Any], Any]] = {
    "as long": lambda line: line * 2,
    "longer": lambda line: np.concatenate([line, line]),
    "of two dimensions": lambda line: line[:, None] * np.ones(5),
    "a number": np.sum,
}


@pytest.mark.parametrize("case", LINES)
@pytest.mark.parametrize("axis", [1, 2])
def test_lines_of_empty_blocks_have_the_shape_of_the_others(case: str, axis: int) -> None:
    def program(mesh: Any, rng: Any) -> None:
        whole = rng.random((1, 3, 4))
        compare(lambda x: np.apply_along_axis(LINES[case], axis, x), [whole], [{"a": Shard(0)}], mesh, case)
        uneven = {"a": Shard(3 - axis, sizes=(whole.shape[3 - axis],) + (0,) * (mesh.shape[0] - 1))}
        compare(lambda x: np.apply_along_axis(LINES[case], axis, x), [whole], [uneven], mesh, case)

    on_meshes(program, meshes=FEW_ROWS)


PLAIN_INDICES: dict[str, Callable[[Any], Any]] = {
    "take_along_axis": lambda x: np.take_along_axis(x, np.full((1, 1), 9), axis=0),
    "take_along_axis, below": lambda x: np.take_along_axis(x, np.full((1, 1), -6), axis=0),
    "take": lambda x: np.take(x, [9], 0),
    "x[[9]]": lambda x: x[[9]],
    "x[[9]] = 1": lambda x: x.__setitem__([9], 1),
    "x[:, [9]]": lambda x: x[:, [9]],
    "compress": lambda x: np.compress([True] * 9, x, 0),
    "repeat": lambda x: np.repeat(x, -1, 0),
}


@pytest.mark.parametrize("case", PLAIN_INDICES)
@pytest.mark.parametrize("shape", [(5, 4), (5, 1)])
def test_bad_plain_indices_raise_on_all_ranks(case: str, shape: tuple[int, ...]) -> None:
    whole = np.arange(float(np.prod(shape))).reshape(shape)
    wanted = outcome(PLAIN_INDICES[case], whole.copy())
    assert isinstance(wanted, Exception)
    for placement in (Shard(1), Replicate()):
        found = on_three_ranks(lambda mesh: outcome(PLAIN_INDICES[case], place(whole, mesh, {"a": placement})))  # noqa: B023
        assert all(isinstance(error, type(wanted)) for error in found), found


def test_no_index_is_looked_at_where_nothing_is_taken() -> None:
    def program(mesh: Any, rng: Any) -> None:
        for shape, of_indices in (((5, 0), (1, 1)), ((5, 0), (1, 0)), ((5, 3), (0, 3)), ((0, 3), (0, 3))):
            indices = np.full(of_indices, 9)
            compare(lambda x: np.take_along_axis(x, indices, 0), [np.zeros(shape)], [{"a": Shard(1)}], mesh, shape)  # noqa: B023

    on_meshes(program, meshes=FEW_ROWS)


@pytest.mark.parametrize("mode", ["clip", "raise"])
def test_indices_of_a_dimension_without_rows(mode: Any) -> None:
    def program(mesh: Any, rng: Any) -> None:
        for shape, axis in (((1, 0, 0), 1), ((1, 0, 2), 1), ((0, 0), 0), ((0, 0), 1), ((5, 0), 0), ((0,), 0)):
            for layout in ({"a": Shard(0)}, {"a": Shard(len(shape) - 1)}, {}):
                for _ in range(2):  # the second call is remembered
                    compare(lambda x: np.take(x, [3], axis, mode=mode), [np.zeros(shape)], [layout], mesh, shape)  # noqa: B023
        for _ in range(2):  # where NumPy does not return
            assert np.take(place(np.zeros((1, 0, 0)), mesh, {}), [3], 1, mode="wrap").shape == (1, 1, 0)

    on_meshes(program, meshes=((2,),))


SORTERS: dict[str, Any] = {"beyond": [3, 0, 9], "below": [0, -4, 1], "fitting": [2, 0, 1]}


@pytest.mark.parametrize("case", SORTERS)
def test_searchsorted_refuses_a_sorter_as_numpy_does(case: str) -> None:
    def program(mesh: Any, rng: Any) -> None:
        whole, sorter = np.array([3.0, 5.0, 1.0]), np.array(SORTERS[case])
        compare(lambda x: np.searchsorted(whole, x, sorter=sorter), [np.array([2.0, 7.0])], [{"a": Shard(0)}], mesh)

    on_meshes(program, meshes=FEW_ROWS)


def _masked(x: Any, values: Any) -> Any:
    np.putmask(x, np.ones(3, bool), values)
    return x


ASSIGNED: dict[str, Callable[[Any], Any]] = {
    "a list that overflows": lambda x: x.__setitem__(slice(None), [300, 1, 2]),
    "a list that fits": lambda x: (x.__setitem__(slice(None), [3, 1, 2]), x)[1],
    "a list of floats": lambda x: (x.__setitem__(slice(None), [3.5, 1, 2]), x)[1],
    "an array": lambda x: (x.__setitem__(slice(None), np.array([300, 1, 2])), x)[1],
    "putmask, an array": lambda x: _masked(x, np.array([0.5, 1, 2])),
    "putmask, a number": lambda x: _masked(x, 1.5),
    "putmask, a complex number": lambda x: _masked(x, 1j),
}


@pytest.mark.parametrize("case", ASSIGNED)
def test_what_does_not_fit_the_dtype_is_refused_as_in_numpy(case: str) -> None:
    def program(mesh: Any, rng: Any) -> None:
        compare(ASSIGNED[case], [np.zeros(3, np.uint8)], [{"a": Shard(0)}], mesh, case)

    on_meshes(program, meshes=FEW_ROWS)


# ---- Arrays without dimensions, and of booleans

_AVERAGES = "mean std var median average nanmean nanmedian nanvar"
_OTHERS = "sum max any all ptp argmax cumsum cumprod nancumsum cumulative_sum argsort sort squeeze count_nonzero"
REDUCED: dict[str, Callable[..., Any]] = {
    name: getattr(np, name) for name in f"{_AVERAGES} {_OTHERS}".split() if hasattr(np, name)
}


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("axis", [0, -1, 1, None])
def test_axes_of_an_array_without_dimensions(name: str, axis: Any) -> None:
    def program(mesh: Any, rng: Any) -> None:
        for dtype in (float, int):
            compare(lambda x: REDUCED[name](x, axis=axis), [np.array(3, dtype)], [{}], mesh, dtype)
        compare(lambda x: REDUCED[name](x, axis=axis), [np.array(2.0)], [{"a": Partial()}], mesh)

    on_meshes(program, meshes=((2,),))


@pytest.mark.parametrize("dtype", [bool, np.int8, float, complex])
def test_conjugates_have_the_dtype_of_the_array(dtype: Any) -> None:
    def program(mesh: Any, rng: Any) -> None:
        whole = (np.array([0, 1, 2]) * (1j if dtype is complex else 1)).astype(dtype)
        for layout in ({"a": Shard(0)}, {}):
            compare(lambda x: x.conj(), [whole], [layout], mesh)
            compare(lambda x: x.conjugate(), [whole], [layout], mesh)

    on_meshes(program, meshes=((2,),))


# ---- Comparisons with what is no number

OTHERS: dict[str, Any] = {
    "a text": "a",
    "bytes": b"a",
    "None": None,
    "texts": ["a", "b", "c"],
    "an array of texts": np.array(["a"]),
    "other shape": ["a", "b"],
    "a date": np.datetime64("2020-01-01"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_numbers_equal_no_texts_and_not_none(case: str) -> None:
    def program(mesh: Any, rng: Any) -> None:
        other = OTHERS[case]
        for whole in (np.array([0.0, np.nan, 2.0]), np.array([0, 1, 2]), np.array([True, False, True])):
            for layout in ({"a": Shard(0)}, {}):
                compare(lambda x: x == other, [whole], [layout], mesh, case)
                compare(lambda x: x != other, [whole], [layout], mesh, case)
        pending = place(np.arange(3.0), mesh, {"a": Partial()})
        if np.shape(other) != (2,):
            assert not (pending == other).full().any()
            assert other not in pending if np.ndim(other) == 0 else True
        assert not np.array_equal(pending, np.array(["a", "b", "c"]))

    on_meshes(program, meshes=((2,),))
