"""Redistribution: the steps from one layout of an array to another, and what they send. No mesh, no array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from heapq import heappop, heappush
from itertools import count
from typing import Any

from meshdist.runtime.plan_cache import remember
from meshdist.tensor.array_layout import ArrayLayout, Cut
from meshdist.tensor.placements import Partial, PlacementError
from meshdist.tensor.rank_blocks import RankBlocks
from meshdist.tensor.redistribution_steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Coordinate,
    Exchange,
    ReduceScatter,
    Slice,
    Step,
    Zero,
)

# The start of a collective costs about 20 us; at 6 GB/s, so many elements of 8 bytes could be received meanwhile.
COLLECTIVE_ELEMENTS = 16_384


class Redistribution:
    """How to get from one layout to another.

    Attributes:
        source, target: The layouts.
        steps: In order, each at most one collective. None where the blocks stay as they are. The first step starts
            from the source and the last one ends at the target, both without the axes of a single rank.
        programs: What `moves` prepared for the ranks at some coordinates.
    """

    def __init__(self, source: ArrayLayout, target: ArrayLayout, steps: tuple[Step, ...]) -> None:
        self.source = source
        self.target = target
        self.steps = steps
        self.programs: dict[Coordinate, Any] = {}

    def __repr__(self) -> str:
        return f"Redistribution({self.source!r} -> {self.target!r}: {', '.join(map(str, self.steps)) or 'no step'})"

    @cached_property
    def most_sent(self) -> tuple[int, ...]:
        """For each step, the elements sent by the rank of the mesh that sends most."""
        return tuple(int(step.sent(step.elements()).max()) for step in self.steps)

    def describe(self, names: Sequence[str] | None, itemsize: int) -> str:
        """Return a line for each step: the collective, the axes, and the bytes that the rank sends that sends most.

        Args:
            names: The names of the mesh's axes; None: they are numbered.
            itemsize: The bytes of an element.
        """
        lines = []
        for step, most in zip(self.steps, self.most_sent, strict=True):
            axes = ", ".join(repr(names[axis]) if names else f"axis {axis}" for axis in step.axes)
            sends = f": a rank sends at most {most * itemsize:,} bytes" if step.collective else ", sends nothing"
            lines.append(f"{step} over {axes}{sends}")
        return "\n".join(lines) or "nothing to do"


_PLANS: dict[tuple[ArrayLayout, ArrayLayout], Redistribution] = {}


def plan(source: ArrayLayout, target: ArrayLayout) -> Redistribution:
    """Return the cheapest redistribution from one layout to another that `_search` finds; the same object each time.

    Raises:
        PlacementError: A pending reduction would become another one.
        ValueError: The layouts are of different arrays or meshes.
    """
    known = _PLANS.get((source, target))
    if known is None:
        _check(source, target)
        steps = _search(_without_single(source), _without_single(target))
        known = Redistribution(source, target, steps)
        remember(_PLANS, (source, target), known)
    return known


def _check(source: ArrayLayout, target: ArrayLayout) -> None:
    if (source.shape, source.mesh_shape) != (target.shape, target.mesh_shape):
        raise ValueError(f"redistribute: {source!r} and {target!r} are layouts of different arrays or meshes")
    for axis, op in source.pending.items():
        other = target.pending.get(axis, op)
        if other != op:
            raise PlacementError(
                f"redistribute: {Partial(op)} along axis {axis} cannot become {Partial(other)}; redistribute to"
                " Replicate() along this axis first, which computes the reduction"
            )


def _without_single(layout: ArrayLayout) -> ArrayLayout:
    """Return the layout without what axes of one rank do, which is nothing."""
    shape = layout.mesh_shape
    if 1 not in shape:
        return layout
    cuts = []
    for cut in layout.cuts:
        axes = () if cut is None else tuple(axis for axis in cut.axes if shape[axis] > 1)
        cuts.append(Cut(axes, cut.sizes) if cut is not None and axes else None)
    pending = {axis: op for axis, op in layout.pending.items() if shape[axis] > 1}
    return ArrayLayout.of_cuts(layout.shape, shape, cuts, pending)


# ---- The search


def _search(source: ArrayLayout, target: ArrayLayout) -> tuple[Step, ...]:
    """Return the cheapest steps: Dijkstra's algorithm over the layouts that `_moves` reaches.

    The cost is the number of elements that the rank receives that receives most, with `COLLECTIVE_ELEMENTS` for each
    collective; of equal costs, the one with the smaller peak of elements held.
    """
    blocks_of = cache(RankBlocks)
    order = count()  # the ranks must all find the same plan: of equal plans the first
    open_: list[tuple[int, int, int, ArrayLayout, tuple[Step, ...]]] = [(0, 0, next(order), source, ())]
    best: dict[ArrayLayout, tuple[int, int]] = {source: (0, 0)}
    while True:
        cost, peak, _, layout, steps = heappop(open_)
        if layout is target:
            return steps
        if best[layout] < (cost, peak):
            continue
        limit = best.get(target)
        for step in _moves(layout, target):
            elements = step.elements(blocks_of(layout), blocks_of(step.target))
            received = int(step.received(elements).max())
            then = cost + received + (COLLECTIVE_ELEMENTS if step.collective else 0)
            held = max(peak, step.copies * int((elements.old + elements.new).max()))
            if (limit is None or (then, held) < limit) and (
                step.target not in best or (then, held) < best[step.target]
            ):
                best[step.target] = then, held
                heappush(open_, (then, held, next(order), step.target, (*steps, step)))


def _moves(layout: ArrayLayout, target: ArrayLayout) -> Iterator[Step]:
    """Return the steps from `layout` that may lead to `target`.

    What needs no message comes first and alone: it takes nothing from later steps, and makes blocks smaller.
    """
    taken = {axis for cut in layout.cuts if cut is not None for axis in cut.axes} | layout.pending.keys()
    free = [axis for axis in range(len(layout.mesh_shape)) if axis not in taken]
    local = _slice(layout, target, free) or _zero(layout, target, free)
    if local is not None:
        yield local
        return
    yield from _reductions(layout, target)
    yield from _gathers(layout, target)
    exchange = _exchange(layout, target, free)
    if exchange is not None:
        yield exchange


def _gathers(layout: ArrayLayout, target: ArrayLayout) -> Iterator[AllGather | AllToAll]:
    """Return the gathers of each dim that the target cuts in another way, and the one of all such dims.

    Where the gathered axis is to cut another dim, an all_to_all replaces the gather.
    """
    all_gathered = layout
    dims: list[int] = []
    all_axes: list[int] = []
    for dim, cut in enumerate(layout.cuts):
        if cut is None:
            continue
        same = _common(cut, target.cuts[dim], layout)
        for outer in range(len(cut.axes) - 1, same - 1, -1):
            axes = cut.axes[outer:]
            gathered = _with_cut(layout, dim, cut.coarser(outer, layout.mesh_shape))
            yield AllGather(layout, gathered, axes, (dim,))
            for to_dim in range(layout.ndim if len(axes) == 1 else 0):
                inner = _next_cut(gathered, target, to_dim)
                if inner is not None and inner.axes[-1:] == axes and to_dim != dim:
                    yield AllToAll(layout, _with_cut(gathered, to_dim, inner), axes, dim, to_dim)
        if same < len(cut.axes):
            all_gathered = _with_cut(all_gathered, dim, cut.coarser(same, layout.mesh_shape))
            dims.append(dim)
            all_axes.extend(cut.axes[same:])
    if len(dims) > 1:
        yield AllGather(layout, all_gathered, tuple(sorted(all_axes)), tuple(dims))


def _slice(layout: ArrayLayout, target: ArrayLayout, free: Sequence[int]) -> Slice | None:
    """Return the step that cuts along all axes along which the blocks are in place already."""
    sliced, axes = layout, []
    for dim in range(layout.ndim):
        cut = _next_cut(sliced, target, dim)
        while cut is not None and cut.axes[-1] in free:
            axes.append(cut.axes[-1])
            sliced = _with_cut(sliced, dim, cut)
            cut = _next_cut(sliced, target, dim)
    return Slice(layout, sliced, tuple(sorted(axes))) if axes else None


def _zero(layout: ArrayLayout, target: ArrayLayout, free: Sequence[int]) -> Zero | None:
    axes = tuple(axis for axis in free if axis in target.pending)
    if not axes:
        return None
    pending = layout.pending | {axis: target.pending[axis] for axis in axes}
    try:
        return Zero(layout, ArrayLayout.of_cuts(layout.shape, layout.mesh_shape, layout.cuts, pending), axes)
    except PlacementError:  # another reduction is to be computed first
        return None


def _reductions(layout: ArrayLayout, target: ArrayLayout) -> Iterator[Step]:
    left = {axis: op for axis, op in layout.pending.items() if axis not in target.pending}
    cut_later = {axis for cut in target.cuts if cut is not None for axis in cut.axes}
    scatters = {axis: list(_scatters(layout, target, axis, op)) for axis, op in left.items() if axis in cut_later}
    for steps in scatters.values():
        yield from steps
    for op in dict.fromkeys(left.values()):
        axes = tuple(axis for axis in left if left[axis] == op)
        uncut = tuple(axis for axis in axes if axis not in cut_later)
        alone = [(axis,) for axis in axes if not scatters.get(axis)]
        for some in dict.fromkeys((axes, uncut, *alone)):
            if some:
                yield AllReduce(layout, layout.resolved(some), some, op)


def _scatters(layout: ArrayLayout, target: ArrayLayout, axis: int, op: str) -> Iterator[ReduceScatter]:
    """Return the reduce_scatters over `axis`, and over further axes that cut the same dim next to it."""
    for dim in range(layout.ndim):
        axes: tuple[int, ...] = ()
        scattered = layout
        cut = _next_cut(layout, target, dim)
        while cut is not None and layout.pending.get(cut.axes[-1]) == op and (axes or cut.axes[-1] == axis):
            axes = (*axes, cut.axes[-1])
            scattered = _with_cut(scattered.resolved(axes), dim, cut)
            yield ReduceScatter(layout, scattered, axes, op, dim)
            cut = _next_cut(scattered, target, dim)
        if axes:
            return
    # Not in place: an exchange of equal blocks afterwards costs less than an all_reduce.
    parts = layout.mesh_shape[axis]
    for dim, cut in enumerate(layout.cuts):
        before, sizes = ((), (layout.shape[dim],)) if cut is None else cut
        if all(rows % parts == 0 for rows in sizes) and (not before or before[-1] < axis):
            cut = Cut((*before, axis), tuple(rows // parts for rows in sizes for _ in range(parts)))
            yield ReduceScatter(layout, _with_cut(layout.resolved((axis,)), dim, cut), (axis,), op, dim)
            return


def _exchange(layout: ArrayLayout, target: ArrayLayout, free: Sequence[int]) -> Exchange | None:
    """Return the exchange that cuts as the target does, but not along axes whose reduction is still pending."""
    cuts: list[Cut | None] = []
    held: set[int] = set()
    spread: set[int] = set()
    for cut, wanted in zip(layout.cuts, target.cuts, strict=True):
        if wanted is not None:
            depth = next((at for at, axis in enumerate(wanted.axes) if axis in layout.pending), len(wanted.axes))
            wanted = wanted.coarser(depth, layout.mesh_shape)
        cuts.append(wanted)
        same = _common(cut, wanted, layout)
        if cut is not None:
            held.update(cut.axes[same:])
        if wanted is not None:
            spread.update(axis for axis in wanted.axes[same:] if axis in free)
    if not held:
        return None
    return Exchange(layout, layout.with_cuts(cuts), tuple(sorted(held | spread)), tuple(sorted(spread)))


# ---- Cuts


def _common(cut: Cut | None, other: Cut | None, layout: ArrayLayout) -> int:
    """Return along how many axes, from the outermost on, two cuts are the same."""
    if cut is None or other is None:
        return 0
    for depth in range(min(len(cut.axes), len(other.axes)), 0, -1):
        if cut.axes[:depth] == other.axes[:depth] and cut.coarser(depth, layout.mesh_shape) == other.coarser(
            depth, layout.mesh_shape
        ):
            return depth
    return 0


def _next_cut(layout: ArrayLayout, target: ArrayLayout, dim: int) -> Cut | None:
    """Return the cut of `dim` one axis closer to the target's; None where it is there, or is another cut."""
    cut, wanted = layout.cuts[dim], target.cuts[dim]
    depth = 0 if cut is None else len(cut.axes)
    if wanted is None or len(wanted.axes) == depth or _common(cut, wanted, layout) < depth:
        return None
    return wanted.coarser(depth + 1, layout.mesh_shape)


def _with_cut(layout: ArrayLayout, dim: int, cut: Cut | None) -> ArrayLayout:
    return layout.with_cuts((*layout.cuts[:dim], cut, *layout.cuts[dim + 1 :]))
