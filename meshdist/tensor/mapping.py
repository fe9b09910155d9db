"""A function of the user's, run on the blocks of DTensors: `local_map`, and `np.apply_along_axis`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, cast

import numpy as np

from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.system.name_hints import explaining
from meshdist.tensor.agreement import inherited, merged, origin_of
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.dispatch import begin, implements
from meshdist.tensor.distribution import Memory, array_module, as_block, from_local
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.index_keys import normalized
from meshdist.tensor.operands import local_of, mesh_of, require
from meshdist.tensor.placements import (
    Partial,
    Placement,
    Placements,
    PlacementsOf,
    Replicate,
    Shard,
    placements_in_order,
)

# Of the shapes of results that are remembered for a function.
_MOST_TOLD = 1_000


@explaining
def local_map(
    fn: Callable[..., Any],
    out_placements: Placements | Sequence[Placements | None] | None,
    in_placements: Sequence[Placements | None] | None = None,
    *,
    redistribute_inputs: bool = False,
    device_mesh: DeviceMesh | None = None,
) -> Callable[..., Any]:
    """Return a function of DTensors that calls `fn` on this rank's blocks, and converts its results to DTensors.

    `fn` may do anything with the blocks, including collectives of `mesh.get_group()`. All ranks of the mesh call the
    function. At the first call with arguments of given layouts (and of given types, for arguments that are not arrays),
    the ranks exchange the shapes of the results. Later calls send nothing, and must return blocks of the same shapes.

    Args:
        fn: Takes arrays where the function gets DTensors, and other arguments as they are.
        out_placements: The placements of the result, as in `distribute_tensor`; for several results a tuple of
            placements, each a list in mesh order or a dict by axis, or None for what is not an array and is returned
            as it is. Nothing is exchanged if they shard nothing, or into blocks of given `sizes`.
        in_placements: For each positional argument the placements it must have, None for any. A plain array is the same
            on every rank, and split accordingly. None: `fn` gets the blocks in their present placements, and this
            rank's part of pending reductions.
        redistribute_inputs: Redistribute arguments that have other placements, instead of raising.
        device_mesh: The mesh; None: that of the arguments.

    Raises:
        PlacementError: An argument that is not sharded as `in_placements`; results that do not form an array.
        ValueError: The number of arguments or results differs from that of placements; no DTensor and no `device_mesh`;
            blocks whose shape differs from that in the first call with these layouts.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.tensor import Partial, Shard, distribute_tensor, local_map
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     x = distribute_tensor(np.arange(4.0), mesh, {"dp": Shard(0)})
        ...     total = local_map(lambda block: block.sum(), {"dp": Partial()}, in_placements=({"dp": Shard(0)},))
        ...     return float(total(x))
        >>> meshdist.run(program, 2)
        [6.0, 6.0]
    """
    outputs = _placements_of_outputs(out_placements)
    memory = Memory()

    @wraps(fn)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        begin("local_map", *args, *kwargs.values())
        mesh = device_mesh or _mesh(args, kwargs)
        blocks = _blocks(args, in_placements, mesh, redistribute_inputs)
        results = fn(*blocks, **{name: _local(value) for name, value in kwargs.items()})
        told = memory.on(mesh)
        key = (tuple(map(_seen, args)), tuple((name, _seen(value)) for name, value in sorted(kwargs.items())))
        if len(told) >= _MOST_TOLD:  # on all ranks alike
            told.clear()
        if not isinstance(outputs, list):
            return _with_origins(_output(results, outputs, mesh, told, (key, None)), args, kwargs)
        if not isinstance(results, (tuple, list)) or len(results) != len(outputs):
            count = len(results) if isinstance(results, (tuple, list)) else f"one {type(results).__name__}"
            raise ValueError(f"local_map: out_placements are of {len(outputs)} results, and fn returned {count}")
        made = [_output(*pair, mesh, told, (key, at)) for at, pair in enumerate(zip(results, outputs, strict=True))]
        return _with_origins(made if type(results) is list else tuple(made), args, kwargs)

    return mapped


def _placements_of_outputs(given: Any) -> Any:
    """Return the placements of one result, or a list of those of several."""
    if isinstance(given, (Shard, Replicate, Partial, Mapping)) or given is None:
        return given
    listed = tuple(given)
    is_one = all(isinstance(placement, (Shard, Replicate, Partial)) for placement in listed)
    return listed if is_one else list(listed)


def _mesh(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeviceMesh:
    operands = (*args, *kwargs.values())
    if not any(isinstance(operand, DTensor) for operand in operands):
        raise ValueError("local_map: no argument is a DTensor; pass device_mesh=")
    return mesh_of("local_map", operands)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _blocks(
    args: tuple[Any, ...], in_placements: Sequence[Placements | None] | None, mesh: DeviceMesh, may_move: bool
) -> list[Any]:
    if in_placements is None:
        return list(map(_local, args))
    if isinstance(in_placements, (Shard, Replicate, Partial, Mapping)) or len(in_placements) != len(args):
        raise ValueError(
            f"local_map: in_placements must be placements for each argument: expected {len(args)}, got"
            f" {in_placements!r}"
        )
    targets: list[ArrayLayout | None] = []
    for arg, placements in zip(args, in_placements, strict=True):
        is_array = isinstance(arg, (DTensor, np.ndarray)) or hasattr(arg, "__cuda_array_interface__")
        if placements is None or not is_array:
            targets.append(None)
        else:
            with PlacementsOf("local_map"):
                ordered = placements_in_order(cast(Any, placements), mesh.shape, mesh.mesh_dim_names)
                targets.append(ArrayLayout.of(arg.shape, mesh.shape, ordered))
    return [
        _local(arg) if target is None else _block(arg, target, number, mesh, may_move)
        for number, (arg, target) in enumerate(zip(args, targets, strict=True))
    ]


def _block(arg: Any, target: ArrayLayout, number: int, mesh: DeviceMesh, may_move: bool) -> Any:
    if not isinstance(arg, DTensor):
        return local_of(arg, target, mesh)
    if arg.layout is target:
        return arg.to_local()
    if may_move:
        return local_of(arg, target, mesh)
    why = f"in_placements of argument {number} are {target.describe(mesh.mesh_dim_names)}"
    return require("local_map", arg, target, why, f"argument {number}")


def _seen(value: Any) -> Any:
    """Return what of an argument the shapes of results may depend on: the same on every rank, and hashable."""
    if isinstance(value, DTensor):
        return value.layout
    if hasattr(value, "shape"):
        return tuple(value.shape)
    return type(value)


def _output(result: Any, placements: Any, mesh: DeviceMesh, told: dict[Any, Any], key: Any) -> Any:
    if placements is None:
        return result
    if result is None:
        raise TypeError(
            "local_map: fn returned None where out_placements has placements; return an array, or pass None"
        )
    block = as_block(result, mesh, "local_map")
    with PlacementsOf("local_map"):
        ordered = placements_in_order(placements, mesh.shape, mesh.mesh_dim_names)
    found = told.get((key, ordered, block.ndim))
    if found is None:
        shape = _whole_shape(block.shape, ordered)
        made = from_local(block, mesh, cast(Any, ordered), shape, False, "local_map")
        told[key, ordered, block.ndim] = block.shape, made.layout
        return made
    shape, layout = found
    if shape != block.shape:
        raise ValueError(
            f"local_map: the block at {coordinate_in(mesh)} had shape {shape} at the first call with arguments of these"
            f" layouts, and has {block.shape} now; create results whose shapes change with DTensor.from_local"
        )
    return wrap(block, layout, mesh)


def _with_origins(made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return results, after those that are pending reductions got the arguments as their origin."""
    layouts = [given.layout for given in (*args, *kwargs.values()) if isinstance(given, DTensor)]
    for each in made if isinstance(made, (tuple, list)) else (made,):
        if isinstance(each, DTensor) and each.layout.pending:
            each._origin = merged(each._origin, origin_of(*layouts))
    return inherited(made, DTensor, args, kwargs)


def _whole_shape(block: tuple[int, ...], placements: tuple[Placement, ...]) -> list[int] | None:
    """Return the shape of the whole array where it follows from placements, and None where the ranks have to tell."""
    whole = list(block)
    for placement in placements:
        if isinstance(placement, Shard):
            if placement.sizes is None or any(isinstance(size, tuple) for size in placement.sizes):
                return None
            if not -len(block) <= placement.dim < len(block):
                return None
            whole[placement.dim] = sum(placement.sizes)
    outermost = [p.dim % len(block) for p in placements if isinstance(p, Shard)]
    return whole if len(set(outermost)) == len(outermost) else None


# ---- Along one dimension


@implements(np.apply_along_axis)
def apply_along_axis(func1d: Callable[..., Any], axis: int, arr: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """Call a function on every line along a dimension, which must not be sharded; see `numpy.apply_along_axis`.

    The results have the dimensions that the function returns in place of this one; the others stay sharded as they are.
    """
    if not isinstance(arr, DTensor):
        raise TypeError("np.apply_along_axis: the array must be a DTensor where a further argument is one")
    dim = normalized(axis, arr.ndim)
    if 0 in (*arr.shape[:dim], *arr.shape[dim + 1 :]):
        raise ValueError("Cannot apply_along_axis when any iteration dimensions are 0")
    layout = arr.layout.resolved().uncut((dim,))
    block = require("np.apply_along_axis", arr, layout, "the function needs whole lines")
    # A rank without lines calls the function once, for the shape and the dtype of what it returns.
    module, lines = array_module(arr.mesh), block
    has_lines = 0 not in (*block.shape[:dim], *block.shape[dim + 1 :])
    if not has_lines:
        lines = module.ones([arr.shape[dim] if at == dim else 1 for at in range(arr.ndim)], arr.dtype)
    made = module.apply_along_axis(func1d, dim, lines, *args, **kwargs)
    inner = made.shape[dim : made.ndim - (arr.ndim - dim - 1)]
    shape = (*arr.shape[:dim], *inner, *arr.shape[dim + 1 :])
    cuts = (*layout.cuts[:dim], *[None] * len(inner), *layout.cuts[dim + 1 :])
    result = ArrayLayout.of_cuts(shape, layout.mesh_shape, cuts, {})
    if not has_lines:
        made = module.empty(result.local_shape(coordinate_in(arr.mesh)), made.dtype)
    return wrap(made, result, arr.mesh)
