"""Grid: a mesh as rows and columns of cells, common to all drawings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.errors import DistError
from meshdist.mesh.layout.layout import Layout
from meshdist.system.drawing_style import ONE_HOST, fill

if TYPE_CHECKING:
    from meshdist.mesh.mesh_state import MeshHosts

# A mesh of up to so many panels, rows and columns is drawn whole.
WHOLE = (8, 16, 16)
# Of a larger one, the part around the calling rank is drawn that fits on a screen of 80 x 24.
_MOST_COLUMNS = 8
_MOST_ROWS, _MOST_ROWS_OF_PANELS = 14, 5
_MOST_LINES = 18
# Of a mesh of one axis, as text: the lines into which its ranks are folded.
_MOST_FOLDS = 6


@dataclass(frozen=True)
class Cell:
    """One rank of the mesh."""

    rank: int
    host: int | None  # the index of its host in `Grid.hosts`; None if the hosts are unknown
    group: int | None  # the number of its group along the shown axis; None without one
    is_mine: bool
    is_with_me: bool  # the rank is in the calling rank's group along the shown axis


@dataclass(frozen=True)
class Panel:
    """The cells along the last two axes at one place of the others; `title` is that place, such as `pp=0`."""

    title: str
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Window:
    """The visible range `first` to `end` (exclusive) of `size` places along an axis."""

    first: int
    end: int
    size: int

    @classmethod
    def around(cls, middle: int, most: int, size: int) -> Window:
        first = max(0, min(middle - (most - 1) // 2, size - most))
        return cls(first, min(first + most, size), size)

    @property
    def is_cut_before(self) -> bool:
        return self.first > 0

    @property
    def is_cut_after(self) -> bool:
        return self.end < self.size


@dataclass(frozen=True)
class Grid:
    """A mesh to draw."""

    name: str  # the axes with their sizes
    place: str  # the calling rank and its coordinate, in words; empty if it does not stand out
    row_labels: list[str]  # one per visible row; empty for a mesh of one axis
    column_labels: list[str]  # one per visible column
    rows: Window  # those visible, of the last axis but one
    columns: Window  # those visible, of the last axis
    panels: list[Panel]
    hosts: list[tuple[str, int]]  # the name of each visible host and its number of ranks in the mesh; empty if unknown
    my_host: int | None  # the index of the calling rank's host in `hosts`; None if unknown or not visible
    num_hosts: int  # the number of hosts of the mesh
    axis: str | None  # the axis whose groups are shown; None without one
    groups_text: str  # the number of groups along `axis`, in words
    left_out: str  # what is not visible, in words; empty if all is

    @property
    def headline(self) -> str:
        """The mesh and its groups, in words."""
        return f"{self.name}: {self.groups_text}" if self.groups_text else self.name

    def fill(self, cell: Cell) -> str:
        """Return the colour of a cell: that of its group, or of its host if there are several."""
        is_alike = cell.group is None and self.num_hosts == 1
        return ONE_HOST if is_alike else fill(cell.host, cell.group)

    @property
    def notes(self) -> list[str]:
        """What stands below a drawing that has neither swatches nor frames for it."""
        return [note for note in ("" if self.frame_text else self.place, self.left_out) if note]

    @property
    def frame_text(self) -> str:
        """What is framed, in words; empty if no cell has a frame."""
        if not any(cell.is_mine for panel in self.panels for row in panel.rows for cell in row):
            return ""
        return self.place if self.axis is None else f"{self.place} and its group"


def grid_of(
    layout: Layout, known: MeshHosts | None, axis: int | str | None, *, marks_me: bool = True, width: int = 0
) -> Grid:
    """Return the grid of a mesh, with the groups of `axis` if given.

    `known` has the calling rank and the hosts; None for a mesh without a world. With
    `marks_me`, the calling rank stands out. Text is for a terminal of `width` characters; 0 if that is unknown.
    """
    shown_axis = None if axis is None else layout.axis(axis)
    mine = -1 if known is None or not marks_me else known.rank
    at = layout.coordinate(mine)
    outer, rows, columns = _mappings(layout, at, width)
    ranks = _ranks_by_panel(layout)[outer.first : outer.end, rows.first : rows.end, columns.first : columns.end]
    hosts = _Hosts(layout, ranks.reshape(-1).tolist(), known)
    groups = _groups(layout.shape, shown_axis)
    my_group = None if groups is None or at is None else int(groups[at])

    def cell(rank: int, place: tuple[int, ...]) -> Cell:
        group = None if groups is None else int(groups[place])
        return Cell(rank, hosts.number_of.get(rank), group, rank == mine, group is not None and group == my_group)

    panels = []
    for number, panel in enumerate(ranks.tolist(), outer.first):
        place = tuple(int(index) for index in np.unravel_index(number, layout.shape[:-2])) if layout.ndim > 2 else ()
        cells = [
            [
                cell(rank, (*place, *((column,) if layout.ndim == 1 else (row, column))))
                for column, rank in enumerate(of_row, columns.first)
            ]
            for row, of_row in enumerate(panel, rows.first)
        ]
        panels.append(Panel(", ".join(_label(layout, k, index) for k, index in enumerate(place)), cells))
    return Grid(
        name=f"mesh {layout.describe()}",
        place=_place(layout, mine, at),
        row_labels=[
            "" if layout.ndim == 1 else _label(layout, layout.ndim - 2, row) for row in range(rows.first, rows.end)
        ],
        column_labels=[_label(layout, layout.ndim - 1, column) for column in range(columns.first, columns.end)],
        rows=rows,
        columns=columns,
        panels=panels,
        hosts=hosts.shown,
        my_host=hosts.number_of.get(mine),
        num_hosts=hosts.count,
        axis=None if shown_axis is None else _name(layout, shown_axis),
        groups_text="" if shown_axis is None else _groups_text(layout, shown_axis),
        left_out=_left_out(layout, outer, rows, columns),
    )


def _ranks_by_panel(layout: Layout) -> np.ndarray[Any, np.dtype[np.int64]]:
    rows, columns = (1, layout.shape[0]) if layout.ndim == 1 else layout.shape[-2:]
    return np.asarray(layout.ranks).reshape(-1, rows, columns)


def _mappings(layout: Layout, at: Sequence[int] | None, width: int) -> tuple[Window, Window, Window]:
    """Return the visible range of panels, rows and columns around the calling rank."""
    place = tuple(at) if at is not None else (0,) * layout.ndim
    num_panels, num_rows, num_columns = _ranks_by_panel(layout).shape
    outer = int(np.ravel_multi_index(place[:-2], layout.shape[:-2])) if layout.ndim > 2 else 0
    row = place[-2] if layout.ndim > 1 else 0
    sizes = num_panels, num_rows, num_columns
    is_whole = all(size <= limit for size, limit in zip(sizes, WHOLE, strict=True))
    most = WHOLE if is_whole else most_on_a_screen(num_panels, num_rows)
    if width and not is_whole:
        most = (*most[:2], _most_columns(layout, width))
    outer_window, rows, columns = map(Window.around, (outer, row, place[-1]), most, sizes)
    return outer_window, rows, columns


def most_on_a_screen(num_panels: int, num_rows: int) -> tuple[int, int, int]:
    """Return how many panels, rows and columns fit on a screen."""
    if num_panels == 1:
        return 1, _MOST_ROWS, _MOST_COLUMNS
    rows = min(num_rows, _MOST_ROWS_OF_PANELS)
    lines = rows + 2 + 2 * (rows < num_rows)  # a panel has a head and a blank line, and marks where rows are left out
    return _MOST_LINES // lines, rows, _MOST_COLUMNS


def _most_columns(layout: Layout, width: int) -> int:
    """Return how many columns fit into a width; those of a mesh of one axis are folded into several lines."""
    longest = [len(_label(layout, axis, extent - 1)) for axis, extent in enumerate(layout.shape)]
    cell = max(len(str(max(layout.members()))) + 4, longest[-1])  # with brackets, and two letters of a host
    margin = 6 + (longest[-2] if layout.ndim > 1 else 0)
    fitting = max(2, (width - margin) // (cell + 1))
    return fitting * _MOST_FOLDS if layout.ndim == 1 else fitting


def _groups(shape: Sequence[int], axis: int | None) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Return the group number of each place along `axis`, in row-major order of the other axes."""
    if axis is None:
        return None
    others = [1 if k == axis else extent for k, extent in enumerate(shape)]
    return np.broadcast_to(np.arange(int(np.prod(others))).reshape(others), shape)


class _Hosts:
    """The hosts of a mesh; the visible ones are numbered."""

    def __init__(self, layout: Layout, seen: list[int], known: MeshHosts | None) -> None:
        self.count = 0  # 0 if the hosts are unknown
        self.number_of: dict[int, int] = {}  # for each visible rank, the number of its host
        self.shown: list[tuple[str, int]] = []  # the name of each numbered host, and its number of ranks in the mesh
        if known is None:
            return
        members = layout.members()
        try:
            names, hosts = known.host_names(), known.hosts(members)
        except DistError:  # after the world was destroyed: draw the mesh without hosts
            return
        if names is None:
            return
        counts = Counter(hosts)
        self.count = len(counts)
        host_of = dict(zip(members, hosts, strict=True))
        numbers: dict[str, int] = {}
        for rank in sorted(seen):
            host = host_of[rank]
            if host not in numbers:
                numbers[host] = len(numbers)
                self.shown.append((names[rank], counts[host]))
            self.number_of[rank] = numbers[host]


def _name(layout: Layout, axis: int) -> str:
    return f"axis {axis}" if layout.names is None else layout.names[axis]


def _groups_text(layout: Layout, axis: int) -> str:
    count = layout.size // layout.shape[axis]
    return f"{count} {'group' if count == 1 else 'groups'} along {_name(layout, axis)}"


def _label(layout: Layout, axis: int, index: int) -> str:
    return str(index) if layout.names is None else f"{layout.names[axis]}={index}"


def _place(layout: Layout, mine: int, at: Sequence[int] | None) -> str:
    if mine < 0:
        return ""
    if at is None:
        return f"rank {mine} is outside"
    return f"rank {mine} at ({', '.join(_label(layout, axis, index) for axis, index in enumerate(at))})"


def _left_out(layout: Layout, outer: Window, rows: Window, columns: Window) -> str:
    shown = [window.end - window.first for window in (outer, rows, columns)]
    if int(np.prod(shown)) == layout.size:
        return ""
    parts = []
    if outer.end - outer.first < outer.size:
        parts.append(f"{shown[0]} of {outer.size} panels")
    for what, axis, window in (("rows", layout.ndim - 2, rows), ("columns", layout.ndim - 1, columns)):
        if window.end - window.first < window.size:
            name = f"{what} " if layout.names is None else f"{layout.names[axis]}="
            parts.append(f"{name}{window.first}..{window.end - 1} of {window.size}")
    return f"{int(np.prod(shown))} of {layout.size} ranks are shown: {', '.join(parts)}"
