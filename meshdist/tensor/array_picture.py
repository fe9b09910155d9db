"""Which ranks hold which block of an array: what all its drawings show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshdist.mesh.show.grid import Window, most_on_a_screen
from meshdist.mesh.show.text import CUT
from meshdist.system.drawing_style import PLAIN, fill
from meshdist.tensor.array_layout import ArrayLayout, is_cut
from meshdist.tensor.dtensor import DTensor
from meshdist.tensor.placements import Replicate, Shard

# Arrays of up to so many slices, and rows of blocks in all, are drawn whole; of larger ones, what is around the block
# of the calling rank.
MOST_SLICES, MOST_ROWS_OF_SLICES = 8, 32
MOST_ROWS = 16
MOST_LETTERS = 88  # in a line of text; columns are left out beyond
MOST_LISTED = 4  # ranks in a cell

_NOUNS = {"sum": "sum", "product": "product", "max": "maximum", "min": "minimum", "avg": "average"}


@dataclass(frozen=True)
class Block:
    """A cell of the drawing."""

    text: str  # the ranks that hold it
    holders: list[int]  # the ranks that hold it, by their places in the order of the mesh, for its colours
    is_mine: bool  # the calling rank, which stands out, holds it, or a part of its reduction
    is_empty: bool

    @property
    def colours(self) -> list[str]:
        """The colours of the ranks that hold it: one fills it, several share a band; none for too many."""
        if self.is_empty:
            return [PLAIN]
        return [fill(number, None) for number in self.holders] if len(self.holders) <= MOST_LISTED else []


@dataclass(frozen=True)
class Side:
    """The visible blocks along one dimension: the slice of each, and its rows."""

    dim: int | None
    labels: list[str]
    sizes: list[int]
    window: Window


@dataclass(frozen=True)
class Slice:
    """The blocks along two dimensions at one block of the others; `index` is that place, such as `[0:2, :, :]`."""

    index: str  # empty if no other dimension is sharded
    blocks: list[list[Block]]


@dataclass(frozen=True)
class Picture:
    """An array to draw."""

    title: str  # shape, dtype and placements
    mesh: str  # its axes with their sizes
    held: str  # the calling rank and what it holds, in words; empty if it does not stand out
    rows: Side
    columns: Side
    slices: list[Slice]
    notes: list[str]  # what replicates, what is pending and what is left out, in words

    @property
    def blocks(self) -> list[Block]:
        """All visible blocks."""
        return [block for part in self.slices for row in part.blocks for block in row]

    @property
    def framed(self) -> str:
        """What is framed, in words; empty if no visible block is."""
        return self.held if any(block.is_mine for block in self.blocks) else ""

    @property
    def outside(self) -> list[str]:
        """The words about a calling rank that has no visible block."""
        return [self.held] if self.held and not self.framed else []


def picture_of(x: DTensor, *, marks_me: bool) -> Picture:
    """Return the blocks of `x` along the last two of its dimensions that are cut, in a slice for each block of others.

    With `marks_me`, the calling rank stands out, and of many blocks those around its own are visible.
    """
    layout, mesh, names = x.layout, x.mesh, x.mesh.mesh_dim_names
    coordinate = mesh.get_coordinate() if marks_me else None
    at = (0,) * mesh.ndim if coordinate is None else tuple(coordinate)
    row_dim, column_dim = _shown_dims(layout)
    other_dims = [dim for dim in range(layout.ndim) if is_cut(layout, dim) and dim not in (row_dim, column_dim)]
    extents = [_num_blocks(layout, dim) for dim in other_dims]
    num_slices = math.prod(extents)
    here = [_block_at(layout, dim, at) for dim in other_dims]
    most_slices, most_rows = _most_shown(num_slices, _num_blocks(layout, row_dim))
    slices = Window.around(int(np.ravel_multi_index(here, extents)) if here else 0, most_slices, num_slices)
    rows = _side(layout, row_dim, at, most_rows)
    columns = _side(layout, column_dim, at, _most_columns(layout, column_dim))
    ranks = np.asarray(mesh.mesh)
    numbers = np.arange(ranks.size).reshape(ranks.shape)
    mine = mesh.get_rank()
    pending = tuple(layout.pending)

    def block_at(number_of: Mapping[int | None, int]) -> Block:
        place = {axis: at for dim, number in number_of.items() for axis, at in _place(layout, dim, number).items()}
        free = [axis for axis in range(mesh.ndim) if axis not in place and axis not in pending]
        order, index = (*place, *free, *pending), tuple(place.values())
        held = ranks.transpose(order)[index].reshape(math.prod(mesh.shape[axis] for axis in free), -1)
        sizes = [cut.sizes[number_of[dim]] for dim, cut in enumerate(layout.cuts) if cut and dim in number_of]
        return Block(
            _held_text(held, set(layout.pending.values())),
            numbers.transpose(order)[index].ravel().tolist(),
            coordinate is not None and bool((held == mine).any()),
            0 in sizes or 0 in layout.shape,
        )

    def slice_at(number: int) -> Slice:
        others: dict[int | None, int] = (
            dict(zip(other_dims, map(int, np.unravel_index(number, extents)), strict=True)) if extents else {}
        )
        return Slice(
            _index_text(layout, others) if others else "",
            [
                [
                    block_at({**others, row_dim: row, column_dim: column})
                    for column in range(columns.window.first, columns.window.end)
                ]
                for row in range(rows.window.first, rows.window.end)
            ],
        )

    held = ", ".join(f"{part.start}:{part.stop}" for part in layout.index(at)) or "..."
    sizes = [f"{size}" if names is None else f"{names[axis]}={size}" for axis, size in enumerate(mesh.shape)]
    return Picture(
        f"{x.dtype} {layout.describe(names)}",
        f"mesh ({', '.join(sizes)})",
        f"rank {mine} " + ("is outside" if coordinate is None else f"holds [{held}]") if marks_me else "",
        rows,
        columns,
        [slice_at(number) for number in range(slices.first, slices.end)],
        [*_notes(layout, names), *_left_out(layout, slices, rows, columns)],
    )


def _shown_dims(layout: ArrayLayout) -> tuple[int | None, int | None]:
    """Return the dimensions drawn downwards and across."""
    if layout.ndim < 2:
        return None, (0 if layout.ndim else None)
    cut = [dim for dim in range(layout.ndim) if is_cut(layout, dim)]
    others = [dim for dim in range(layout.ndim) if dim not in cut]
    first, last = sorted((others + cut)[-2:])
    return first, last


def _num_blocks(layout: ArrayLayout, dim: int | None) -> int:
    cut = None if dim is None else layout.cuts[dim]
    return 1 if cut is None else len(cut.sizes)


def _most_shown(num_slices: int, num_rows: int) -> tuple[int, int]:
    """Return how many slices, and rows of blocks in each, are drawn."""
    if num_slices == 1:
        return 1, MOST_ROWS
    if num_slices <= MOST_SLICES and num_slices * num_rows <= MOST_ROWS_OF_SLICES:
        return num_slices, num_rows
    slices, rows, _ = most_on_a_screen(num_slices, num_rows)
    return slices, rows


def _most_columns(layout: ArrayLayout, dim: int | None) -> int:
    if dim is None:
        return 1
    one_each = all(isinstance(placement, Shard) for placement in layout.placements)
    ranks = len(str(math.prod(layout.mesh_shape))) * (1 if one_each else 2) + 6
    return max(2, MOST_LETTERS // max(2 * len(str(layout.shape[dim])) + 2, ranks))


def _side(layout: ArrayLayout, dim: int | None, at: Sequence[int], most: int) -> Side:
    cut = None if dim is None else layout.cuts[dim]
    if dim is None or cut is None:
        rows = 1 if dim is None else layout.shape[dim]
        return Side(dim, ["" if dim is None else f"0:{rows}"], [rows], Window(0, 1, 1))
    window = Window.around(_block_at(layout, dim, at), most, len(cut.sizes))
    visible = range(window.first, window.end)
    return Side(dim, [_rows_text(cut.sizes, block) for block in visible], [cut.sizes[k] for k in visible], window)


def _rows_text(sizes: Sequence[int], block: int) -> str:
    """Return the rows of a block: `4:8`."""
    start = sum(sizes[:block])
    return f"{start}:{start + sizes[block]}"


def _index_text(layout: ArrayLayout, block_of: Mapping[int | None, int]) -> str:
    """Return the index of these blocks of some dimensions."""
    parts = [
        ":" if cut is None or dim not in block_of else _rows_text(cut.sizes, block_of[dim])
        for dim, cut in enumerate(layout.cuts)
    ]
    return f"[{', '.join(parts)}]"


def _block_at(layout: ArrayLayout, dim: int, at: Sequence[int]) -> int:
    """Return the number of the block of a dimension that the rank at this coordinate holds."""
    axes = layout.axes_of(dim)
    return int(np.ravel_multi_index([at[axis] for axis in axes], [layout.mesh_shape[axis] for axis in axes]))


def _place(layout: ArrayLayout, dim: int | None, block: int) -> dict[int, int]:
    """Return the coordinates of the ranks with this block of a dimension, along the axes that cut it."""
    axes = () if dim is None else layout.axes_of(dim)
    if not axes:
        return {}
    index = np.unravel_index(block, [layout.mesh_shape[axis] for axis in axes])
    return dict(zip(axes, map(int, index), strict=True))


def _held_text(held: np.ndarray[Any, np.dtype[np.int64]], pending: set[str]) -> str:
    """Return the ranks of one block in words, those of a pending reduction with its operation: `0+1, 2+3`."""
    copies, parts = held.shape
    if parts == 1:
        return _listed([str(rank) for rank in _ends(held[:, 0])], copies, " ")
    op = pending.pop() if len(pending) == 1 else "sum"
    sign = {"sum": "+", "product": "*"}.get(op, " ")
    sums = [_listed([str(rank) for rank in _ends(copy)], parts, sign) for copy in _ends(held)]
    return _listed(sums if sign != " " else [f"{op}({ranks})" for ranks in sums], copies, ", ")


def _ends(ranks: np.ndarray[Any, Any]) -> list[Any]:
    """Return all of a few, and the first and the last of many."""
    return list(ranks) if len(ranks) <= MOST_LISTED else [ranks[0], ranks[-1]]


def _listed(words: list[str], count: int, sign: str) -> str:
    if count > MOST_LISTED or len(sign.join(words)) > 15:
        return words[0] if count == 1 else f"{words[0]}{sign}{CUT}{sign}{words[-1]}"
    return sign.join(words)


def _notes(layout: ArrayLayout, names: Sequence[str] | None) -> list[str]:
    notes = ["the array has no elements"] if 0 in layout.shape else []
    for axis, (placement, size) in enumerate(zip(layout.placements, layout.mesh_shape, strict=True)):
        along = f"the {size} ranks along {f'axis {axis}' if names is None else names[axis]}"
        if isinstance(placement, Replicate):
            notes.append(f"replicated: {along} hold the same block")
        elif not isinstance(placement, Shard):
            notes.append(f"pending {placement.op}: the array is the {_NOUNS[placement.op]} of what {along} hold")
    return notes


def _left_out(layout: ArrayLayout, slices: Window, rows: Side, columns: Side) -> list[str]:
    notes = [f"down: dimension {rows.dim}; across: dimension {columns.dim}"] if layout.ndim > 2 else []
    windows = slices, rows.window, columns.window
    shown = math.prod(window.end - window.first for window in windows)
    whole = math.prod(window.size for window in windows)
    if shown < whole:
        of_slices = f", in {slices.end - slices.first} of {slices.size} slices" if slices.size > 1 else ""
        notes.append(f"{shown} of {whole} blocks are shown{of_slices}")
    return notes
