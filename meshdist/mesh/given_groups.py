"""Existing groups that a mesh is made of: the group that contains it, or the groups of its axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.groups.non_member import NonMember
from meshdist.groups.world import current_world, resolve
from meshdist.mesh.layout.layout import Layout
from meshdist.mesh.layout.rank_list import rank_array
from meshdist.runtime.context import GroupLike
from meshdist.system.plurals import counted

if TYPE_CHECKING:
    from meshdist.groups.process_group import ProcessGroup
    from meshdist.mesh.layout.rank_list import Ranks


def universe_of(group: GroupLike) -> ProcessGroup | None:
    """Return the group that contains a new mesh; None for the world."""
    if group is None:
        return None
    found = _own(group, "DeviceMesh: group")
    return None if found is current_world().default_group else found


def group_backend(group: ProcessGroup | None) -> str | None:
    """Return the backend that a mesh inherits from a group; None if it is the world's."""
    return None if group is None or group.backend_name == current_world().backend_name else group.backend_name


def check_inside(layout: Layout, universe: ProcessGroup) -> None:
    outside = sorted(set(layout.members()) - set(universe.ranks))
    if outside:
        raise ValueError(
            f"DeviceMesh {layout.describe()}: its ranks must be of the group {universe.label!r}, ranks"
            f" {list(universe.ranks)}, got rank {outside[0]}; a mesh holds global ranks also inside a group"
        )


def groups_of(group: GroupLike | Sequence[GroupLike]) -> tuple[ProcessGroup, ...]:
    given = group if isinstance(group, (list, tuple)) else (group,)
    if not given:
        raise ValueError("from_group: expected a group or a list of groups, one per axis, got none")
    return tuple(_own(one, "from_group: group") for one in given)


def ranks_of_groups(groups: Sequence[ProcessGroup], mesh: Any) -> Ranks:
    """Return the ranks of the mesh: those of the single group, or `mesh` for several groups."""
    if len(groups) == 1:
        return np.array(groups[0].ranks)
    if mesh is None:
        raise ValueError(
            f"from_group: {len(groups)} groups are the rows of one rank, and say nothing of the other ranks; give"
            " mesh, the global ranks by axes"
        )
    return rank_array(mesh)


def layout_of_groups(groups: Sequence[ProcessGroup], mesh: Any, names: Sequence[str] | None) -> Layout:
    """Return the layout in which `groups` are the rows through the calling rank.

    There is one group per axis; or one group of all ranks of `mesh`, in its order, where None means its ranks.
    """
    if mesh is None:
        return Layout(ranks_of_groups(groups, mesh), names)
    layout, rank = Layout(mesh, names), current_world().rank
    coordinate = layout.coordinate(rank)
    if coordinate is None:
        raise ValueError(f"from_group: rank {rank} is in the groups, and not in the mesh {layout.describe()}")
    if len(groups) == 1:
        _check_row("the mesh", layout.members(), groups[0])
        return layout
    if layout.ndim != len(groups):
        raise ValueError(
            f"from_group: expected {counted(layout.ndim, 'group')}, one for each axis of the mesh {layout.describe()},"
            f" got {len(groups)}"
        )
    for axis, group in enumerate(groups):
        row = tuple(layout.row(axis, coordinate).tolist())
        _check_row(f"axis {layout.axis_text(axis)} through rank {rank}", row, group)
    return layout


def name_of_ranks(ranks: Ranks) -> str:
    """Return the key under which the ranks of a mesh, in any order, count their meshes."""
    from hashlib import sha256  # loaded since this rank has joined

    return f"of {sha256(np.sort(ranks, axis=None).tobytes()).hexdigest()[:16]}"


def _check_row(what: str, row: tuple[int, ...], group: ProcessGroup) -> None:
    if row != group.ranks:
        raise ValueError(
            f"from_group: {what} has the ranks {list(row)}, and the group {group.label!r} given for it"
            f" {list(group.ranks)}; they must be the same, in the same order"
        )


def _own(group: GroupLike, what: str) -> ProcessGroup:
    if group is None:
        raise TypeError(f"{what} must be a ProcessGroup or a DeviceMesh, got None")
    found = resolve(group)
    if isinstance(found, NonMember) or found.rank() < 0:
        raise ValueError(
            f"{what}: rank {current_world().rank} is not in it; only the ranks of a group create meshes of it"
        )
    current_world().check_holds(found)
    return found
