"""Moves: the steps of a redistribution carried out on this rank's block, over the groups of a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from meshdist.arrays.device_types import new_empty
from meshdist.arrays.host import consecutive_views
from meshdist.arrays.reduce_op import ReduceOp
from meshdist.collectives.all_gather import all_gather
from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor
from meshdist.collectives.all_reduce import all_reduce, all_reduced
from meshdist.collectives.all_to_all import all_to_all
from meshdist.collectives.all_to_all_single import all_to_all_single
from meshdist.collectives.gather import gather
from meshdist.collectives.reduce_scatter import reduce_scatter
from meshdist.collectives.reduce_scatter_tensor import reduce_scatter_tensor
from meshdist.groups.process_group import ProcessGroup
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.tensor.agreement import Origin, with_origin, words_of
from meshdist.tensor.array_layout import ArrayLayout, number_in
from meshdist.tensor.known_calls import changes
from meshdist.tensor.message_arrays import Shape, Stack, contiguous
from meshdist.tensor.placements import placements_text
from meshdist.tensor.redistribution_search import Redistribution, plan
from meshdist.tensor.redistribution_steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Block,
    Coordinate,
    Exchange,
    Pairwise,
    ReduceScatter,
    Slice,
    Step,
    Zero,
    overlap,
    relative_to,
)

# What carries out a step: from the block before, and the mesh or the group that takes part, to the block after. The
# array's origin is compared where ranks communicate.
Program: TypeAlias = "Callable[[Any, DeviceMesh, Origin], Any]"
GroupProgram: TypeAlias = "Callable[[Any, ProcessGroup], Any]"
# The program of a step, None for none; and whether its result is neither the caller's array nor a view of it. Given are
# the step, this rank's coordinate, and whether that holds of the block before.
Made: TypeAlias = "tuple[Any, bool]"
Part: TypeAlias = "tuple[int, Block]"  # the number of a rank, and what it sends or gets


def move(local: Any, source: ArrayLayout, target: ArrayLayout, mesh: DeviceMesh, origin: Origin = None) -> Any:
    """Return this rank's block of the target layout.

    All ranks of the mesh call it.

    Args:
        local: This rank's block of the source layout, a NumPy or CuPy array; it stays as it is.
        source: The layout before.
        target: The layout after.
        mesh: The mesh, which this rank is in.
        origin: What the array was computed from, if it is a pending reduction: the ranks compare this as well.

    Returns:
        `local` itself if the layouts are the same. Else a C-contiguous array that shares no memory with it.

    Raises:
        PlacementError: A pending reduction would become another one.
        TypeError: A pending reduction that is not defined for the dtype.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    if source is target:
        return local
    changes.count += 1
    redistribution = plan(source, target)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside a mesh has no block"
    programs = redistribution.programs.get(coordinate)
    if programs is None:
        programs = redistribution.programs[coordinate] = _programs(redistribution, coordinate)
    for program in programs:
        local = program(local, mesh, origin)
    return local


def gather_to(local: Any, layout: ArrayLayout, mesh: DeviceMesh, root: int) -> Any:
    """Return the whole array on the rank `root`, and None on the others.

    All ranks of the mesh call it. Only those send that differ from `root` along the axes that shard the array.

    Args:
        local: This rank's block, a NumPy or CuPy array.
        layout: Its layout, without pending reductions.
        mesh: The mesh, which this rank is in.
        root: A rank of the mesh, in row-major order.

    Returns:
        A new C-contiguous array on `root`; else None.
    """
    assert not layout.pending, "pending reductions are resolved first"
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside a mesh has no block"
    place = tuple(int(part) for part in np.unravel_index(root, layout.mesh_shape))
    shape = layout.mesh_shape
    axes = tuple(sorted(axis for dim in range(layout.ndim) for axis in layout.axes_of(dim) if shape[axis] > 1))
    if any(coordinate[axis] != place[axis] for axis in range(len(shape)) if axis not in axes):
        return None
    if not axes:
        return local.copy(order="C")
    group, dst = group_of(mesh, axes), number_in(axes, place, shape)
    with group.hooks.comparing(words_of("a gather", layout)):
        if all(cut is None or len(set(cut.sizes)) == 1 for cut in layout.cuts):
            blocks = list(new_empty((group.size(), *local.shape), local)) if coordinate == place else None
            gather(contiguous(local), blocks, group=group, group_dst=dst)
            received = blocks
        else:
            received = _gathered_uneven(local, layout, axes, group, dst, coordinate)
    if coordinate != place:
        return None
    whole = new_empty(layout.shape, local)
    assert received is not None
    for peer, block in zip(_plane(axes, coordinate, shape), received, strict=True):
        whole[layout.index(peer)] = block
    return whole


def _gathered_uneven(
    local: Any, layout: ArrayLayout, axes: tuple[int, ...], group: ProcessGroup, dst: int, coordinate: Coordinate
) -> list[Any]:
    """Return the blocks of all ranks on `dst`: an all_to_all in which the others get nothing."""
    size = group.size()
    to = [local.size if rank == dst else 0 for rank in range(size)]
    shapes: list[Shape] = []
    if group.rank() == dst:
        shapes = [layout.local_shape(peer) for peer in _plane(axes, coordinate, layout.mesh_shape)]
    come = [math.prod(shape) for shape in shapes] or [0] * size
    flat = new_empty((sum(come),), local)
    all_to_all_single(flat, contiguous(local).reshape(-1), come, to, group)
    return consecutive_views(flat, shapes)


def _plane(axes: tuple[int, ...], coordinate: Coordinate, mesh_shape: Shape) -> list[Coordinate]:
    """Return the coordinates of the ranks that differ from this one along `axes` only, in row-major order."""
    peers = []
    for places in np.ndindex(*(mesh_shape[axis] for axis in axes)):
        peer = list(coordinate)
        for axis, place in zip(axes, places, strict=True):
            peer[axis] = place
        peers.append(tuple(peer))
    return peers


# ---- Arrays and groups


def group_of(mesh: DeviceMesh, axes: tuple[int, ...]) -> ProcessGroup:
    """Return the group of the ranks that differ from this one along `axes` only, in row-major order."""
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    if len(axes) == mesh.ndim:
        return mesh.collective_group
    return mesh._select(axes).collective_group


def _copied(array: Any, mesh: DeviceMesh, origin: Origin) -> Any:
    return array.copy(order="C")


# ---- The programs of steps


def _programs(redistribution: Redistribution, coordinate: Coordinate) -> tuple[Program, ...]:
    """Return what carries out each step on the rank at `coordinate`; the result shares no memory with the input."""
    programs: list[Program] = []
    is_new = False  # the block at hand is neither the caller's nor a view of it
    for step in redistribution.steps:
        program, makes_new = _PROGRAMS[type(step)](step, coordinate, is_new)
        if program is not None:
            programs.append(_over_group(step, program) if step.collective else program)
        is_new = makes_new
    if not is_new:
        programs.append(_copied)
    return tuple(programs)


def _over_group(step: Step, program: GroupProgram) -> Program:
    """Return what runs a program over the group of its ranks, which compare its layouts.

    Blocks of other layouts may have equal sizes.
    """
    before, after = (placements_text(layout.placements, None) for layout in (step.source, step.target))
    words = f"from {before} to {after} of {step.source.shape}"
    axes = step.axes

    def run(local: Any, mesh: DeviceMesh, origin: Origin) -> Any:
        group = group_of(mesh, axes)
        with group.hooks.comparing(words if origin is None else with_origin(words, origin)):
            return program(local, group)

    return run


def _slice(step: Any, coordinate: Coordinate, is_new: bool) -> Made:
    part = relative_to(step.target.index(coordinate), step.source.index(coordinate))
    return (lambda local, mesh, origin: local[part]), False


def _zero(step: Any, coordinate: Coordinate, is_new: bool) -> Made:
    away = [step.target.pending[axis] for axis in step.axes if coordinate[axis]]
    if not {"sum", "product"} & set(away):
        return None, is_new

    def filled(local: Any, mesh: DeviceMesh, origin: Origin) -> Any:
        array = new_empty(local.shape, local)
        # Adding -0.0 keeps the sign of every zero.
        array[...] = 1 if "product" in away else complex(-0.0, -0.0) if local.dtype.kind == "c" else -0.0
        return array

    return filled, True


def _all_reduce(step: Any, coordinate: Coordinate, is_new: bool) -> Made:
    op = ReduceOp(step.op)

    def program(local: Any, group: ProcessGroup) -> Any:
        return all_reduce(local, op, group) if is_new else all_reduced(local, op, group)

    return program, True


def _all_gather(step: Any, coordinate: Coordinate, is_new: bool) -> Made:
    axes, source = step.axes, step.source
    whole, shape = step.target.index(coordinate), step.target.local_shape(coordinate)
    cutting = {dim: tuple(axis for axis in source.axes_of(dim) if axis in axes) for dim in step.dims}
    if all(len(set(_sizes_along(source, dim, cutting[dim], coordinate))) == 1 for dim in step.dims):
        stack = Stack(shape, source.mesh_shape, cutting)

        def even(local: Any, group: ProcessGroup) -> Any:
            block = contiguous(local)
            return stack.received(local, lambda stacked: all_gather_into_tensor(stacked, block, group))

        return even, True
    peers = _plane(axes, coordinate, source.mesh_shape)
    shapes = [source.local_shape(peer) for peer in peers]
    places = [relative_to(source.index(peer), whole) for peer in peers]
    in_order = len(step.dims) == 1 and math.prod(shape[: step.dims[0]]) == 1

    def uneven(local: Any, group: ProcessGroup) -> Any:
        flat = new_empty((math.prod(shape),), local)
        blocks = consecutive_views(flat, shapes)
        all_gather(blocks, contiguous(local), group)
        if in_order:
            return flat.reshape(shape)
        array = new_empty(shape, local)
        for place, block in zip(places, blocks, strict=True):
            array[place] = block
        return array

    return uneven, True


def _reduce_scatter(step: Any, coordinate: Coordinate, is_new: bool) -> Made:
    axes, dim, op = step.axes, step.dim, ReduceOp(step.op)
    shape = step.target.local_shape(coordinate)
    sizes = _sizes_along(step.target, dim, axes, coordinate)
    if len(set(sizes)) == 1:
        stack = Stack(step.source.local_shape(coordinate), step.source.mesh_shape, {dim: axes})

        def even(local: Any, group: ProcessGroup) -> Any:
            with stack.sent(local) as stacked:
                return reduce_scatter_tensor(new_empty(shape, local), stacked, op, group)

        return even, True
    places = _places(dim, sizes)

    def uneven(local: Any, group: ProcessGroup) -> Any:
        block = new_empty(shape, local)
        return reduce_scatter(block, [contiguous(local[place]) for place in places], op, group)

    return uneven, True


def _all_to_all(step: Any, coordinate: Coordinate, is_new: bool) -> Made:
    axes, mesh_shape = step.axes, step.source.mesh_shape
    before = _sizes_along(step.source, step.from_dim, axes, coordinate)
    after = _sizes_along(step.target, step.to_dim, axes, coordinate)
    if len(set(before)) > 1 or len(set(after)) > 1:
        return _pairwise(step, coordinate, is_new)
    give = Stack(step.source.local_shape(coordinate), mesh_shape, {step.to_dim: axes})
    take = Stack(step.target.local_shape(coordinate), mesh_shape, {step.from_dim: axes})
    in_parts = cache(lambda: _in_parts(step, coordinate))

    def program(local: Any, group: ProcessGroup) -> Any:
        if local.nbytes >= group.least_strided_bytes(local):
            return in_parts()(local, group)
        with give.sent(local) as stacked:
            return take.received(local, lambda received: all_to_all_single(received, stacked, group=group))

    return program, True


def _pairwise(step: Pairwise, coordinate: Coordinate, is_new: bool) -> Made:
    return _in_parts(step, coordinate), True


def _in_parts(step: Pairwise, coordinate: Coordinate) -> GroupProgram:
    """Return what sends and receives a part of the block for each peer; what the rank keeps is copied once."""
    num_ranks = step.num_ranks
    old, new = step.source.index(coordinate), step.target.index(coordinate)
    shape = step.target.local_shape(coordinate)
    kept = overlap(old, new)
    keep = None if kept is None else (relative_to(kept, new), relative_to(kept, old))
    given = [(peer, relative_to(part, old)) for peer, part in step.parts_to(coordinate)]
    taken = [(peer, relative_to(part, new)) for peer, part in step.parts_from(coordinate)]

    def program(local: Any, group: ProcessGroup) -> Any:
        block = new_empty(shape, local)
        nothing = new_empty((0,), local)
        to, come = [nothing] * num_ranks, [nothing] * num_ranks
        for peer, part in given:
            to[peer] = local[part]
        for peer, part in taken:
            come[peer] = block[part]
        all_to_all(come, to, group)
        if keep is not None:
            block[keep[0]] = local[keep[1]]
        return block

    return program


def _sizes_along(layout: ArrayLayout, dim: int, axes: tuple[int, ...], coordinate: Coordinate) -> tuple[int, ...]:
    """Return the rows of `dim` on the ranks that differ along `axes`, which cut it innermost."""
    cut = layout.cuts[dim]
    assert cut is not None, "these axes cut it"
    parts = math.prod(layout.mesh_shape[axis] for axis in axes)
    outer = number_in(cut.axes[: -len(axes)], coordinate, layout.mesh_shape)
    return cut.sizes[outer * parts : (outer + 1) * parts]


def _places(dim: int, sizes: tuple[int, ...]) -> list[Block]:
    """Return the indices of consecutive blocks along a dim."""
    places, begin = [], 0
    for rows in sizes:
        places.append((*(slice(None),) * dim, slice(begin, begin + rows)))
        begin += rows
    return places


_PROGRAMS: dict[type[Step], Callable[[Any, Coordinate, bool], Made]] = {
    Slice: _slice,
    Zero: _zero,
    AllReduce: _all_reduce,
    AllGather: _all_gather,
    ReduceScatter: _reduce_scatter,
    AllToAll: _all_to_all,
    Exchange: _pairwise,
}
