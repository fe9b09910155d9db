"""Arrays made in place on the ranks of a mesh, without messages: zeros, ones, full, eye, arange, and their likes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from meshdist.arrays.host import check_dtype
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.system.name_hints import explaining
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.dispatch import NUMBERS, implements
from meshdist.tensor.distribution import array_module, checked_shape, layout_on
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.placements import REPLICATE, PlacementError, Placements, Shard


def _made(
    name: str, shape: Any, dtype: Any, mesh: DeviceMesh, placements: Placements | None, make: Callable[..., Any]
) -> DTensor:
    """Return the array of the blocks `make(shape, dtype)`."""
    layout = layout_on(name, mesh, checked_shape(shape), placements)
    if layout.pending:
        raise PlacementError(f"{name}: placements must not be Partial, got {list(layout.placements)}")
    if isinstance(dtype, (int, np.integer)):
        raise TypeError(
            f"{name}: expected a dtype after the shape, got {dtype!r}; write a shape of several dimensions as one"
            " tuple, such as (4, 3)"
        )
    block = make(layout.local_shape(coordinate_in(mesh)), dtype)
    if isinstance(block, np.ndarray):
        check_dtype(block, f"{name}: the array", hint="")
    return wrap(block, layout, mesh)


@explaining
def empty(shape: Any, dtype: Any = float, *, mesh: DeviceMesh, placements: Placements | None = None) -> DTensor:
    """Return an uninitialized array; see `numpy.empty`, and `distribute_tensor` for the placements."""
    return _made("empty", shape, dtype, mesh, placements, array_module(mesh).empty)


@explaining
def zeros(shape: Any, dtype: Any = float, *, mesh: DeviceMesh, placements: Placements | None = None) -> DTensor:
    """Return an array of zeros; see `numpy.zeros`, and `distribute_tensor` for the placements."""
    return _made("zeros", shape, dtype, mesh, placements, array_module(mesh).zeros)


@explaining
def ones(shape: Any, dtype: Any = float, *, mesh: DeviceMesh, placements: Placements | None = None) -> DTensor:
    """Return an array of ones; see `numpy.ones`, and `distribute_tensor` for the placements."""
    return _made("ones", shape, dtype, mesh, placements, array_module(mesh).ones)


@explaining
def full(
    shape: Any, fill_value: Any, dtype: Any = None, *, mesh: DeviceMesh, placements: Placements | None = None
) -> DTensor:
    """Return an array filled with one value; see `numpy.full`, and `distribute_tensor` for the placements."""
    if dtype is None:
        dtype = fill_value.dtype if hasattr(fill_value, "dtype") else np.asarray(fill_value).dtype
    made = _made("full", shape, dtype, mesh, placements, array_module(mesh).empty)
    _fill(made, fill_value)
    return made


def _fill(array: DTensor, value: Any) -> None:
    """Set all elements to a number, or to those of an array, which is broadcast to the whole array."""
    if type(value) in NUMBERS or not np.ndim(value):
        array._local[...] = value
    else:
        array[...] = value


@explaining
def eye(
    n: int,
    m: int | None = None,
    k: int = 0,
    dtype: Any = float,
    *,
    mesh: DeviceMesh,
    placements: Placements | None = None,
) -> DTensor:
    """Return a matrix with ones on a diagonal and zeros elsewhere, as `numpy.eye`.

    Args:
        n: The number of rows.
        m: The number of columns; None: as many.
        k: Which diagonal: 0 is the main one, positive ones are above it.
        dtype: Of the result.
        mesh: Where the array is placed.
        placements: See `distribute_tensor`.

    Raises:
        PlacementError: A placement is Partial.
    """
    k = operator.index(k)
    layout = layout_on("eye", mesh, checked_shape((n, n if m is None else m)), placements)
    if layout.pending:
        raise PlacementError(f"eye: placements must not be Partial, got {list(layout.placements)}")
    rows, columns = layout.index(coordinate_in(mesh))
    num_rows, num_columns = layout.local_shape(coordinate_in(mesh))
    # Row i has its one in column i + k; both are counted from the first of the block.
    return wrap(array_module(mesh).eye(num_rows, num_columns, k + rows.start - columns.start, dtype), layout, mesh)


@explaining
def arange(
    start: Any,
    stop: Any = None,
    step: Any = 1,
    dtype: Any = None,
    *,
    mesh: DeviceMesh,
    placements: Placements | None = None,
) -> DTensor:
    """Return evenly spaced values, as `numpy.arange`; see `distribute_tensor` for the placements."""
    if stop is None:
        start, stop = 0, start
    rows = max(0, int(np.ceil((stop - start) / step)))
    made: Any = np.arange
    # Of ranges without rows: NumPy finds the dtype from all three numbers.
    dtype = np.result_type(made(start, start, step, dtype), made(stop, stop, step, dtype))
    few = made(start, stop, step, dtype) if dtype.kind == "b" else None  # NumPy has those of up to two rows
    layout = layout_on("arange", mesh, (rows,), placements)
    if layout.pending:
        raise PlacementError(f"arange: placements must not be Partial, got {list(layout.placements)}")
    (held,) = layout.index(coordinate_in(mesh))
    if few is not None:
        values = few[held]
    else:
        first = np.asarray(start, dtype)
        # As numpy.arange computes: the second value less the first, times the number of steps.
        delta = np.asarray(start + step, dtype) - first
        values = first + np.arange(held.start, held.stop).astype(dtype) * delta
    return wrap(array_module(mesh).asarray(values.astype(dtype)), layout, mesh)


@explaining
def linspace(
    start: Any,
    stop: Any,
    num: int = 50,
    endpoint: bool = True,
    *,
    dtype: Any = None,
    mesh: DeviceMesh,
    placements: Placements | None = None,
) -> DTensor:
    """Return evenly spaced numbers from `start` to `stop`, as `numpy.linspace`.

    Args:
        start: The first number.
        stop: The last number, or with `endpoint=False` the one that would follow.
        num: How many.
        endpoint: Whether `stop` is among them.
        dtype: Of the result; None: float64, or complex128.
        mesh: Where the array is placed.
        placements: See `distribute_tensor`.

    Raises:
        ValueError: `num` is negative, or `start` or `stop` is an array.
        PlacementError: A placement is Partial.
    """
    if np.ndim(start) or np.ndim(stop):
        raise ValueError("linspace: start and stop must be numbers; for arrays of them, compute with arange")
    few = np.linspace(start, stop, min(num, 2), endpoint, dtype=dtype)
    layout = layout_on("linspace", mesh, (num,), placements)
    if layout.pending:
        raise PlacementError(f"linspace: placements must not be Partial, got {list(layout.placements)}")
    (held,) = layout.index(coordinate_in(mesh))
    places, kind = np.arange(held.start, held.stop), np.result_type(start, stop, 1.0)
    parts = num - 1 if endpoint else num
    # As numpy.linspace computes.
    delta = np.asarray(stop, kind) - np.asarray(start, kind)
    step = delta / parts if parts > 0 else delta
    values = places * step if step != 0 or parts <= 0 else places / parts * delta
    values = values + start
    if endpoint and num > 1 and held.start < held.stop == num:
        values[-1] = stop
    if few.dtype.kind in "iu":
        np.floor(values, out=values)
    return wrap(array_module(mesh).asarray(values.astype(few.dtype)), layout, mesh)


def _like(name: str, prototype: Any, dtype: Any, shape: Any, device: Any) -> tuple[tuple[int, ...], Any, ArrayLayout]:
    """Return the block's shape, the dtype and the layout of an array like another one."""
    if device not in (None, "cpu") or (device and prototype.mesh.device_type != "cpu"):
        raise ValueError(
            f"np.{name}: device must be None, or 'cpu' on a mesh of CPUs, got {device!r}; write x.cpu() or x.cuda() for"
            " another device"
        )
    layout = prototype.layout.resolved()
    if shape is not None and checked_shape(shape) != prototype.shape:
        layout = _of_another_shape(layout, checked_shape(shape))
    dtype = np.dtype(prototype.dtype if dtype is None else dtype)
    check_dtype(np.empty(0, dtype), f"np.{name}: the array", hint="")
    return layout.local_shape(coordinate_in(prototype.mesh)), dtype, layout


def _of_another_shape(layout: ArrayLayout, shape: tuple[int, ...]) -> ArrayLayout:
    """Return the layout of an array of a different shape: in blocks of equal size, along the dimensions it has."""
    placements = [
        Shard(placement.dim) if isinstance(placement, Shard) and placement.dim < len(shape) else REPLICATE
        for placement in layout.placements
    ]
    return ArrayLayout.of(shape, layout.mesh_shape, placements)


@implements(np.empty_like)
def empty_like(
    prototype: DTensor,
    /,
    dtype: Any = None,
    order: Any = "K",
    subok: bool = True,
    shape: Any = None,
    *,
    device: Any = None,
) -> DTensor:
    """Return an array of any values, of the shape, dtype and sharding of another; see `numpy.empty_like`."""
    del order, subok
    block, dtype, layout = _like("empty_like", prototype, dtype, shape, device)
    return wrap(array_module(prototype.mesh).empty(block, dtype), layout, prototype.mesh)


def _filled_like(name: str) -> Callable[..., DTensor]:
    def like(
        a: DTensor, dtype: Any = None, order: Any = "K", subok: bool = True, shape: Any = None, *, device: Any = None
    ) -> DTensor:
        del order, subok
        block, dtype, layout = _like(f"{name}_like", a, dtype, shape, device)
        return wrap(getattr(array_module(a.mesh), name)(block, dtype), layout, a.mesh)

    return like


implements(np.zeros_like)(_filled_like("zeros"))
implements(np.ones_like)(_filled_like("ones"))


@implements(np.full_like)
def full_like(
    a: DTensor,
    fill_value: Any,
    dtype: Any = None,
    order: Any = "K",
    subok: bool = True,
    shape: Any = None,
    *,
    device: Any = None,
) -> DTensor:
    """Return an array filled with one value, of the shape, dtype and sharding of another; see `numpy.full_like`."""
    made = empty_like(a, dtype, order, subok, shape, device=device)
    _fill(made, fill_value)
    return made
