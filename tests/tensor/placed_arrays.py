"""Arrays over the meshes of a test, placed at random, and the comparison of functions of them with NumPy's.

Every rank has the whole arrays, so to place one sends nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest
from array_layouts import Random, assert_close, block_of, ops_of, parts_of, random_layout

import meshdist
from meshdist.tensor import DTensor, PlacementError, implicit_redistribution
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.placements import placements_in_order

MESHES = ((1,), (2,), (3,), (2, 2))


def cases(quick: int, slow: int) -> pytest.MarkDecorator:
    """Run a test with the argument `cases`, once with few random cases and once with many, which is slow."""
    return pytest.mark.parametrize("cases", [quick, pytest.param(slow, marks=pytest.mark.slow)])


# A layout, or the placements that `distribute_tensor` takes.
Layout: TypeAlias = Any


def on_meshes(
    program: Callable[..., Any], *args: Any, meshes: Iterable[Sequence[int]] = MESHES, seed: int = 0, **options: Any
) -> list[list[Any]]:
    """Run `program(mesh, rng, *args, **options)` on the ranks of each mesh; return what the ranks of each returned.

    The axes are "a" and "b". The generators of all ranks have one seed. Warnings are ignored, for NumPy's calls too.
    """
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for shape in map(tuple, meshes):

            def body(shape: tuple[int, ...] = shape) -> Any:
                mesh = meshdist.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])
                with np.errstate(all="ignore"):
                    return program(mesh, np.random.default_rng((seed, *shape)), *args, **options)

            results.append(meshdist.run(body, math.prod(shape), timeout=60))
    return results


def mesh_2x2() -> Any:
    """Return the mesh of four ranks with the axes "dp" and "tp"."""
    return meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def place(whole: Any, mesh: Any, layout: Layout, seed: int = 0) -> DTensor:
    """Return `whole` as a DTensor; where a reduction is pending, the ranks hold different parts of it."""
    whole = np.asarray(whole)
    if not isinstance(layout, ArrayLayout):
        placements = placements_in_order(layout, mesh.shape, mesh.mesh_dim_names)
        layout = ArrayLayout.of(whole.shape, mesh.shape, placements)
    parts = parts_of(np.random.default_rng(seed), whole, layout) if layout.pending else whole
    block = block_of(parts, layout, mesh.get_coordinate())
    return DTensor.from_local(block, mesh, layout.placements, shape=layout.shape)


def layout_for(
    rng: Random, whole: Any, mesh: Any, dims: Iterable[int] | None = None, partial: bool = True
) -> ArrayLayout:
    """Return a random layout of `whole`: cuts of `dims` (None: any), and the pending reductions that its dtype has."""
    whole = np.asarray(whole)
    ops = ops_of(whole.dtype) if partial else ()
    if whole.dtype.kind == "c" and not np.isfinite(whole).all():
        ops = tuple(op for op in ops if op != "avg")  # a complex infinity divided by a number is NaN
    return random_layout(rng, whole.shape, mesh.shape, ops, dims)


def placed(rng: Random, whole: Any, mesh: Any, dims: Iterable[int] | None = None, partial: bool = True) -> DTensor:
    """Return `whole` as a DTensor that is placed at random; see `layout_for`."""
    return place(whole, mesh, layout_for(rng, whole, mesh, dims, partial), int(rng.integers(1 << 30)))


def assert_same(found: Any, wanted: Any, tolerance: float | None = None, signs: bool = False) -> None:
    """Compare a DTensor with NumPy's array: dtype, shape, the shape of the block of this rank, and its values.

    What is pending is computed, so all ranks must call. `assert_close` says what `tolerance` and `signs` are.
    """
    wanted = np.asarray(wanted)
    assert isinstance(found, DTensor), (found, wanted)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), (found, wanted)
    layout, block = found.layout, found.to_local()
    held = layout.local_shape(found.mesh.get_coordinate())
    assert (block.dtype, block.shape) == (wanted.dtype, held), (block, layout)
    if layout.pending:
        assert_close(found.full(), wanted, tolerance, signs)
    else:
        assert_close(block, wanted[found.index], tolerance, signs)


def compare(
    function: Callable[..., Any],
    wholes: Sequence[Any],
    layouts: Sequence[Layout],
    mesh: Any,
    described: Any = "",
    tolerance: float | None = None,
    signs: bool = False,
) -> bool:
    """Compare `function` of placed arrays with that of the whole ones; return whether it was refused for placements.

    What is refused must say what to redistribute, must leave the arrays as they are, and must work where redistribution
    is implicit. What raises in NumPy must raise the same.

    Args:
        function: Of the arrays; it may change them.
        wholes: NumPy arrays.
        layouts: The layout of each; None passes the array as it is.
        mesh: Where the arrays are placed.
        described: What is added to the message of a failure.
        tolerance: See `assert_close`.
        signs: See `assert_close`.
    """
    tensors = [
        _copied(whole) if layout is None else place(whole, mesh, layout, number)
        for number, (whole, layout) in enumerate(zip(wholes, layouts, strict=True))
    ]
    wanted = outcome(function, *map(_copied, wholes))
    found = outcome(function, *tensors)
    refused = isinstance(found, PlacementError)
    try:
        if refused:
            assert "redistribut" in str(found), found
            with implicit_redistribution():
                found = outcome(function, *tensors)
        if isinstance(wanted, Exception):
            assert _is_same_exception(found, wanted), f"{found!r} for {wanted!r}"
        elif isinstance(found, Exception):
            raise found
        else:
            for one, other in _pairs(found, wanted):
                _compare_results(one, other, tolerance, signs)
    except Exception as error:
        arrays = [(np.shape(x), np.asarray(x).dtype, layout) for x, layout in zip(wholes, layouts, strict=True)]
        raise AssertionError(f"{error!r}\nof {arrays}\non {mesh.shape}: {described}") from error
    return refused and not isinstance(wanted, Exception)


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """Return what the function returns, or the exception that it raises."""
    with np.errstate(all="ignore"):
        try:
            return function(*args)
        except Exception as error:
            return error


def _copied(array: Any) -> Any:
    return array.copy() if isinstance(array, np.ndarray) else array


def _is_same_exception(found: Any, wanted: Exception) -> bool:
    """Return whether NumPy's exception, or the public one that its own is derived from, was raised."""
    public = next(kind for kind in type(wanted).__mro__ if "._" not in kind.__module__ and kind.__name__[0] != "_")
    return isinstance(found, public) and not isinstance(found, PlacementError)


def _pairs(found: Any, wanted: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(wanted, (list, tuple)):
        return iter(((found, wanted),))
    assert isinstance(found, type(wanted)), (type(found), type(wanted))
    return zip(found, wanted, strict=True)


def _compare_results(found: Any, wanted: Any, tolerance: float | None, signs: bool) -> None:
    if isinstance(found, DTensor):
        assert_same(found, wanted, tolerance, signs)
    else:  # a comparison of whole arrays, or a call without a placed array
        assert_close(found, wanted, tolerance, signs)
