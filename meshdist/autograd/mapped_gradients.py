"""local_map and map_overlap with gradients: functions of blocks, differentiated on each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
from autograd.extend import defvjp, defvjp_argnums, primitive
from autograd.tracer import getval, isbox

from meshdist.autograd.array_moves import block_of, checked_grad, from_block
from meshdist.autograd.collective_primitives import check_gradient
from meshdist.autograd.tape import is_differentiable, pullback
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.tensor import halos, mapping
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.operands import mesh_of
from meshdist.tensor.placements import Partial, Placements, Replicate, placements_in_order

Pull = Callable[[Any], Sequence[Any]]


def local_map(
    fn: Callable[..., Any],
    out_placements: Any,
    in_placements: Sequence[Placements | None] | None = None,
    *,
    redistribute_inputs: bool = False,
    device_mesh: DeviceMesh | None = None,
    vjp: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Return a function of DTensors that calls `fn` on this rank's blocks, with a gradient.

    Without `vjp`, `fn` is differentiated on each rank: it computes with the functions of `autograd.numpy` and the
    collectives of `meshdist.autograd`, with its arrays as positional arguments. The gradient of an argument that
    replicates along an axis is a pending sum there where a result is sharded or pending along it, since each rank
    computed a part of the results from it. Where all results replicate, it is that of each rank, which is the same.

    Args:
        fn: The function, as in `meshdist.tensor.local_map`.
        out_placements: The placements of the results, as there.
        in_placements: The placements of the arguments, as there.
        redistribute_inputs: Whether arguments with other placements are redistributed, as there.
        device_mesh: The mesh, as there.
        vjp: A function `vjp(g, result, *blocks)` that returns the gradients of the blocks, as a tuple of one for each
            argument, None for what is not an array; of one argument alone also the gradient itself. `g` is this rank's
            block of the gradient of the result, or a tuple of them as `result` is. None: `fn` is differentiated.

    Raises:
        TypeError: `meshdist.tensor.local_map` raises it, or a gradient has a different kind of dtype.
        ValueError: `meshdist.tensor.local_map` raises it, or `vjp` returned a gradient of a different shape, or the
            wrong number of gradients.
        PlacementError: `meshdist.tensor.local_map` raises it.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import grad, local_map
        >>> from meshdist.tensor import Partial, Shard, distribute_tensor
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     x = distribute_tensor(np.arange(3.0), mesh, {"dp": Shard(0)})
        ...     energy = local_map(lambda w, x: w * (x**2).sum(), {"dp": Partial()})
        ...     return float(grad(energy)(2.0, x)), grad(energy, 1)(2.0, x).full().tolist()
        >>> meshdist.run(program, 2)[0]
        (5.0, [0.0, 4.0, 8.0])
    """

    def recorded(*blocks: Any, _pulls: list[Any] | None = None, **options: Any) -> Any:
        if _pulls is None:
            return fn(*blocks, **options)
        if vjp is None:
            result, pull = pullback(lambda *arrays: fn(*arrays, **options), blocks)
            _check_numbers(result)
        else:
            result = fn(*blocks, **options)
            pull = _given(vjp, result, blocks)
        _pulls.append((blocks, pull))
        return result

    placed: dict[str, Any] = {"redistribute_inputs": redistribute_inputs, "device_mesh": device_mesh}
    on_blocks = mapping.local_map(recorded, out_placements, in_placements, **placed)

    @wraps(fn)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if not any(map(isbox, args)):
            return on_blocks(*args, **kwargs)
        return _MAPPED(*args, _call=(on_blocks, in_placements, device_mesh), _pulls=[], **kwargs)

    return mapped


def _run(*args: Any, _call: tuple[Any, ...], **kwargs: Any) -> Any:
    return _call[0](*args, **kwargs)


_run.__name__ = "local_map"
_MAPPED = primitive(_run)


def _check_numbers(result: Any) -> None:
    """Raise TypeError where a function of NumPy has made an array of objects from what is differentiated."""
    for each in result if isinstance(result, (list, tuple)) else [result]:
        if hasattr(each, "dtype") and np.dtype(each.dtype).kind == "O":
            raise TypeError(
                "local_map: fn returned an array of objects; to be differentiated, it computes with the functions of"
                " autograd.numpy, or pass vjp= to local_map"
            )


def _given(vjp: Callable[..., Any], result: Any, blocks: Sequence[Any]) -> Pull:
    def pull(g: Any) -> Sequence[Any]:
        found = vjp(g, result, *blocks)
        gradients = list(found) if isinstance(found, (tuple, list)) else [found]
        if len(gradients) != len(blocks):
            raise ValueError(
                f"local_map: vjp must return a gradient for each argument: expected {len(blocks)}, got {len(gradients)}"
            )
        for number, (gradient, block) in enumerate(zip(gradients, blocks, strict=True)):
            if gradient is not None:
                check_gradient("local_map: vjp", gradient, block, f"argument {number}")
        return gradients

    return pull


def _vjp_of_blocks(
    argnums: Sequence[int], made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Any], list[Any]]:
    _, in_placements, device_mesh = kwargs["_call"]
    values = [getval(arg) for arg in args]
    mesh = device_mesh or mesh_of("local_map", [value for value in values if isinstance(value, DTensor)])
    results = list(made) if isinstance(made, (list, tuple)) else [made]
    layouts = [result.layout if hasattr(result, "layout") else None for result in results]
    axes = range(len(mesh.shape))
    varying = {axis for axis in axes if any(_varies(layout, axis) for layout in layouts if layout is not None)}
    # Each rank has these results in whole: one of the ranks along the axis gives their part of a pending sum.
    coordinate = coordinate_in(mesh)
    counts = [
        layout is None or all(_varies(layout, axis) or axis not in varying or coordinate[axis] == 0 for axis in axes)
        for layout in layouts
    ]
    ((blocks, pull),) = kwargs["_pulls"]
    targets = {number: _gradient_layout(values[number], number, in_placements, mesh, varying) for number in argnums}

    def vjp(g: Any) -> list[Any]:
        of_results = list(g) if isinstance(made, (list, tuple)) else [g]
        parts = [
            part if layout is None else block_of(part, layout.resolved()) * (1.0 if counted else 0.0)
            for part, layout, counted in zip(of_results, layouts, counts, strict=True)
        ]
        gradients = pull(type(made)(parts) if isinstance(made, (list, tuple)) else parts[0])
        found = []
        for number in argnums:
            gradient = gradients[number]
            if gradient is None:
                gradient = np.zeros_like(blocks[number])
            found.append(from_block(gradient, targets[number], mesh))
        return found

    return vjp


defvjp_argnums(_MAPPED, _vjp_of_blocks)


def _varies(layout: ArrayLayout, axis: int) -> bool:
    return not isinstance(layout.placements[axis], Replicate)


def _gradient_layout(value: Any, number: int, in_placements: Any, mesh: DeviceMesh, varying: set[int]) -> ArrayLayout:
    """Return the layout of the gradient of an argument, whose blocks are what the ranks computed."""
    shape = np.shape(value)
    given = None if in_placements is None else in_placements[number]
    if given is not None and isinstance(value, DTensor):
        placements: Sequence[Any] = placements_in_order(given, mesh.shape, mesh.mesh_dim_names)
    elif isinstance(value, DTensor):
        placements = value.placements
    elif given is not None and is_differentiable(value) and hasattr(value, "ndim"):
        placements = placements_in_order(given, mesh.shape, mesh.mesh_dim_names)
    else:
        placements = [Replicate()] * len(mesh.shape)
    found = [
        Partial() if isinstance(placement, Replicate) and axis in varying
        else Replicate() if isinstance(placement, Partial)
        else placement
        for axis, placement in enumerate(placements)
    ]  # fmt: skip
    return ArrayLayout.of(shape, mesh.shape, found)


# ---- Halos


@primitive
def _with_halo(x: DTensor, width: Any, periodic: Any, grad: str) -> Any:
    return halos.halo(x, width, periodic)


@primitive
def _halo_put_back(g: Any, layout: ArrayLayout, mesh: DeviceMesh, width: Any, periodic: Any, grad: str) -> DTensor:
    """Return the array to which every rank adds the rows that it had, its own and the ghost rows."""
    widths, rings = halos.ghost_widths("halo", layout.ndim, width, periodic)
    rows = [
        np.arange(part.start - width, part.stop + width) % max(extent, 1)
        if ring
        else np.arange(max(0, part.start - width), min(extent, part.stop + width))
        for part, extent, width, ring in zip(
            layout.index(coordinate_in(mesh)), layout.shape, widths, rings, strict=True
        )
    ]
    block = np.zeros(layout.shape, g.dtype)
    np.add.at(block, np.ix_(*rows), g)
    cut = {axis for cut in layout.cuts if cut is not None for axis in cut.axes}
    adds = {axis for axis, placement in enumerate(layout.placements) if placement == Replicate() and grad == "reduce"}
    whole = ArrayLayout.of_cuts(
        layout.shape, layout.mesh_shape, (None,) * layout.ndim, dict.fromkeys(sorted(cut | adds), "sum")
    )
    return wrap(block, whole, mesh).redistribute(layout.resolved().placements)


_with_halo.__name__ = "halo"
defvjp(
    _with_halo,
    lambda y, x, width, periodic, grad: lambda g: _halo_put_back(g, x.layout, x.mesh, width, periodic, grad),
)
defvjp(
    _halo_put_back,
    lambda y, g, layout, mesh, width, periodic, grad: lambda h: _with_halo(h, width, periodic, grad),
)


def halo(x: Any, width: int | Sequence[int], periodic: bool | Sequence[bool] = False, *, grad: str = "identity") -> Any:
    """Return this rank's block with rows of its neighbours around it, with a gradient; see `meshdist.tensor.halo`.

    In the backward pass the gradients of ghost rows are added to those of the rows that they are copies of: by a
    reduce_scatter of an array of the shape of `x`.

    Args:
        x: The DTensor.
        width: The number of ghost rows, as in `meshdist.tensor.halo`.
        periodic: Whether the array is periodic, as there.
        grad: Along axes that replicate, as in `to_local`.

    Raises:
        TypeError: `x` is not a DTensor, or a width is not an integer.
        ValueError: A width is negative, there is not one for each dimension, or `grad` is unknown.
    """
    return _with_halo(x, width, periodic, checked_grad("halo", grad))


def map_overlap(
    fn: Callable[[Any], Any], x: Any, width: int | Sequence[int], periodic: bool | Sequence[bool] = False
) -> Any:
    """Return `fn` of an array whose results depend on at most `width` rows around each, with a gradient.

    `fn` is differentiated on each rank, and computes with the functions of `autograd.numpy`.

    Args:
        fn: The function, as in `meshdist.tensor.map_overlap`.
        x: The DTensor.
        width: The number of ghost rows, as there.
        periodic: Whether the array is periodic, as there.

    Raises:
        ValueError: The result has a different shape from the argument, or a width is negative.

    Example:
        >>> import autograd.numpy as np, meshdist
        >>> from meshdist.autograd import grad, map_overlap
        >>> from meshdist.tensor import Shard, distribute_tensor
        >>> def smooth(u):
        ...     return np.concatenate([u[:1], (u[:-2] + u[1:-1] + u[2:]) / 4, u[-1:]])
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     x = distribute_tensor(np.arange(4.0), mesh, {"dp": Shard(0)})
        ...     return grad(lambda x: np.sum(map_overlap(smooth, x, 1)))(x).full().tolist()
        >>> meshdist.run(program, 2)[0]
        [1.25, 0.5, 0.5, 1.25]
    """
    layout, mesh = x.layout.resolved(), x.mesh
    block = halo(x, width, periodic)
    result = fn(block)
    if np.shape(getval(result)) != np.shape(getval(block)):
        raise ValueError(
            f"map_overlap: fn must return an array of the shape of its argument, got {np.shape(getval(result))} for"
            f" {np.shape(getval(block))}"
        )
    widths, rings = halos.ghost_widths("map_overlap", layout.ndim, width, periodic)
    return from_block(result[halos.without_ghosts(widths, rings, layout.index(coordinate_in(mesh)))], layout, mesh)
