"""A mesh as rows and columns of cells: what all drawings of it have in common."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.errors import DistError
from meshdist.mesh.layout import Layout

if TYPE_CHECKING:
    from meshdist.world import World

# What is seen of a large mesh: the first so many along each axis, and of the panels.
MOST_ROWS = 16
MOST_COLUMNS = 16
MOST_PANELS = 8


@dataclass(frozen=True)
class Cell:
    """One rank of the mesh.

    Attributes:
        rank: Its global rank.
        host: The number of its host, in the order of `Grid.hosts`; None where the hosts are not known.
        group: The number of its group along the axis that is shown; None where none is.
        is_mine: It is the calling rank.
        is_with_me: It is in the calling rank's group along the axis that is shown.
    """

    rank: int
    host: int | None
    group: int | None
    is_mine: bool
    is_with_me: bool


@dataclass(frozen=True)
class Panel:
    """The cells along the last two axes, at one place of the others.

    Attributes:
        title: That place, such as `pp=0`; empty where there are no other axes.
        rows: The cells, row by row.
    """

    title: str
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Grid:
    """A mesh to be drawn.

    Attributes:
        title: The axes with their sizes and where the calling rank is.
        row_labels, column_labels: One for each row and column shown; a row label is empty for a mesh of one axis.
        panels: What is shown of the mesh.
        hosts: The name of each host and how many ranks of the mesh it has; empty where the hosts are not known.
        axis: The axis whose groups are shown, in words; None where none is.
        groups_text: How many groups it has, in words; whose are marked where one is the calling rank's.
        left_out: What is not shown, in words; empty where all is.
    """

    title: str
    row_labels: list[str]
    column_labels: list[str]
    panels: list[Panel]
    hosts: list[tuple[str, int]]
    axis: str | None
    groups_text: str
    left_out: str


def grid_of(layout: Layout, world: World | None, axis: int | str | None) -> Grid:
    """Return what is to be drawn of a mesh, with the groups of `axis` if one is given.

    Args:
        layout: The ranks by axes.
        world: The world that the mesh stands in, which knows the calling rank and the hosts; None for a mesh without.
        axis: The axis whose groups are shown, by name or index, or None.

    Raises:
        UnknownAxisError: There is no such axis (a KeyError and a ValueError).
    """
    shown_axis = None if axis is None else layout.axis(axis)
    host_of, hosts = _hosts(layout, world)
    mine = -1 if world is None else world.rank
    groups = None if shown_axis is None else _groups(layout.shape, shown_axis)
    my_group = None
    at = layout.coordinate(mine)
    if groups is not None and at is not None:
        my_group = int(groups[at])

    def cell(place: tuple[int, ...]) -> Cell:
        rank = int(layout.ranks[place])
        group = None if groups is None else int(groups[place])
        return Cell(rank, host_of.get(rank), group, rank == mine, group is not None and group == my_group)

    rows, columns = (1, layout.shape[0]) if layout.ndim == 1 else layout.shape[-2:]
    outer = layout.shape[:-2]
    panels = [
        Panel(
            ", ".join(_label(layout, k, index) for k, index in enumerate(place)),
            [
                [
                    cell((*place, *((column,) if layout.ndim == 1 else (row, column))))
                    for column in range(min(columns, MOST_COLUMNS))
                ]
                for row in range(min(rows, MOST_ROWS))
            ],
        )
        for place in itertools.islice(itertools.product(*map(range, outer)), MOST_PANELS)
    ]
    return Grid(
        title=_title(layout, mine, at),
        row_labels=[
            "" if layout.ndim == 1 else _label(layout, layout.ndim - 2, row) for row in range(min(rows, MOST_ROWS))
        ],
        column_labels=[_label(layout, layout.ndim - 1, column) for column in range(min(columns, MOST_COLUMNS))],
        panels=panels,
        hosts=hosts,
        axis=None if shown_axis is None else _name(layout, shown_axis),
        groups_text="" if shown_axis is None else _groups_text(layout, shown_axis, my_group is not None),
        left_out=_left_out(layout, panels),
    )


def _groups(shape: Sequence[int], axis: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the number of each place's group along `axis`, counted in row-major order of the other axes."""
    others = [1 if k == axis else extent for k, extent in enumerate(shape)]
    return np.broadcast_to(np.arange(int(np.prod(others))).reshape(others), shape)


def _hosts(layout: Layout, world: World | None) -> tuple[dict[int, int], list[tuple[str, int]]]:
    """Return the number of each rank's host, and of each host its name and number of ranks."""
    if world is None:
        return {}, []
    members = layout.members()
    try:
        names, hosts = world.host_names(), world.hosts(members)
    except DistError:  # asked after the end of the world: the mesh can still be drawn, without its hosts
        return {}, []
    if names is None:
        return {}, []
    numbers: dict[str, int] = {}
    labels: list[str] = []
    for rank, host in sorted(zip(members, hosts, strict=True)):
        if host not in numbers:
            numbers[host] = len(numbers)
            labels.append(names[rank])
    counts = Counter(hosts)
    named = [(label, counts[host]) for host, label in zip(numbers, labels, strict=True)]
    return {rank: numbers[host] for rank, host in zip(members, hosts, strict=True)}, named


def _name(layout: Layout, axis: int) -> str:
    return f"axis {axis}" if layout.names is None else layout.names[axis]


def _groups_text(layout: Layout, axis: int, marked: bool) -> str:
    count = layout.size // layout.shape[axis]
    text = f"{count} {'group' if count == 1 else 'groups'} along {_name(layout, axis)}"
    return f"{text}; this rank's is marked" if marked else text


def _label(layout: Layout, axis: int, index: int) -> str:
    return str(index) if layout.names is None else f"{layout.names[axis]}={index}"


def _title(layout: Layout, mine: int, at: Sequence[int] | None) -> str:
    what = f"mesh {layout.describe()}"
    if mine < 0:
        return what
    if at is None:
        return f"{what}, rank {mine} is outside"
    return f"{what}, rank {mine} at ({', '.join(_label(layout, axis, index) for axis, index in enumerate(at))})"


def _left_out(layout: Layout, panels: list[Panel]) -> str:
    shown = sum(len(row) for panel in panels for row in panel.rows)
    return "" if shown == layout.size else f"{shown} of {layout.size} ranks are shown"
