"""Accounts: the calls of one rank and their bytes, by axis and collective, inside and between hosts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from meshdist.collectives.volume import Seat, sent_by
from meshdist.profiler.axes import Axes
from meshdist.profiler.call_size import call_size, collective_of, given_bytes, parts_bytes
from meshdist.profiler.charts import plot_volumes
from meshdist.profiler.tables import volume_html, volume_table

if TYPE_CHECKING:
    from meshdist.detour import Announcement
    from meshdist.mesh.device_mesh import DeviceMesh
    from meshdist.mesh.mesh_state import MeshState
    from meshdist.process_group import ProcessGroup
    from meshdist.world import World


@dataclass(frozen=True)
class Volume:
    """What this rank's calls came to.

    Attributes:
        calls: How many.
        nbytes: Their sizes in bytes. That of a call is the longer of what this rank gives and what it gets: the array
            of an all_reduce, the whole output of an all_gather, the whole input of a reduce_scatter.
        inside: Bytes that this rank must at least send to ranks of its host for them.
        between: The same, to ranks of other hosts.
    """

    calls: int = 0
    nbytes: int = 0
    inside: int = 0
    between: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(
            self.calls + other.calls,
            self.nbytes + other.nbytes,
            self.inside + other.inside,
            self.between + other.between,
        )


class _Group:
    """What is counted of a group: by collective."""

    def __init__(self, label: str, ranks: tuple[int, ...]) -> None:
        self.label = label
        self.ranks = ranks
        self.volumes: dict[str, Volume] = {}


class Account:
    """Counts the calls of one rank and their bytes; `mesh.account()` and `meshdist.dry_run` make it.

    Counted is every call on any group, by flat function or method, sync or async, once it is made; not one that raises.
    Calls inside a `coalescing_manager` count as the one that they become. Objects count as one call, with the
    bytes of their pickles. Calls on groups that this rank is not in are none.

    A group is counted under the axes of the mesh that it runs along, `tp` or `dp,tp` (`axis 1` where they have no
    names), whoever made it; a group that does not, under its label: `group 'label'`.

    What a rank must at least send is the standard cost of the collective, by the most sparing way between hosts; see
    `meshdist.collectives.volume.sent_by`. What really travels may be more.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ...     with mesh.account() as account:
        ...         mesh["tp"].all_reduce(np.zeros(250, np.float32))
        ...         dist.broadcast(np.zeros(100, np.uint8), src=0)
        ...     return account.as_dict()["tp"], str(account)
        >>> tp, table = dist.run(main, 4)[0]
        >>> tp
        {'all_reduce': {'calls': 1, 'nbytes': 1000, 'inside': 1000, 'between': 0}}
        >>> print(table)
        axis   collective  calls   bytes  sent inside hosts  sent between hosts
        tp     all_reduce      1  1000 B             1000 B                 0 B
        dp,tp  broadcast       1   100 B              100 B                 0 B
        all                    2  1100 B             1100 B                 0 B
    """

    def __init__(self, axes: Axes | None = None, hosts: Callable[[ProcessGroup], Sequence[str]] | None = None) -> None:
        self._axes = axes
        self._hosts = _hosts_of_the_world if hosts is None else hosts
        self._lock = threading.Lock()
        self._groups: dict[tuple[str, tuple[int, ...]], _Group] = {}
        self._known: WeakKeyDictionary[ProcessGroup, tuple[_Group, Seat]] = WeakKeyDictionary()

    def __call__(self, call: Announcement) -> Callable[[], None] | None:
        """Return what counts a call, once it is made; what groups that are watched do."""
        return None if call.is_prelude else lambda: self._count(call)

    def along(self, mesh: DeviceMesh) -> Account:
        """Return what has been counted so far, by the axes of `mesh`; between which hosts, as it was counted."""
        account = Account(_axes_of(mesh))
        with self._lock:
            account._groups = dict(self._groups)
        return account

    def as_dict(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the counts by axis and collective, each a dict of what `Volume` has, in the order of the calls."""
        return {
            axis: {name: asdict(volume) for name, volume in volumes.items()} for axis, volumes in self.volumes().items()
        }

    def volumes(self) -> dict[str, dict[str, Volume]]:
        """Return the counts by axis and collective."""
        with self._lock:
            groups = [(group, dict(group.volumes)) for group in self._groups.values()]
        found: dict[str, dict[str, Volume]] = {}
        for group, volumes in groups:
            of_axis = found.setdefault(self._name(group), {})
            for name, volume in volumes.items():
                of_axis[name] = of_axis.get(name, Volume()) + volume
        return found

    def total(self) -> Volume:
        """Return the sum of all counts."""
        return sum((volume for of_axis in self.volumes().values() for volume in of_axis.values()), Volume())

    def plot(self, ax: Any = None) -> Any:
        """Draw the bytes that are sent along each axis as bars, inside and between hosts, with matplotlib.

        Args:
            ax: The matplotlib Axes to draw in; those of a new figure where None.

        Returns:
            The Axes.

        Raises:
            ImportError: matplotlib is not installed; says how to install it.
        """
        return plot_volumes(self.volumes(), ax)

    def __str__(self) -> str:
        return volume_table(self.volumes(), self.total())

    def _repr_html_(self) -> str:
        return volume_html(self.volumes(), self.total())

    def _name(self, group: _Group) -> str:
        along = None if self._axes is None else self._axes.of(group.ranks)
        return f"group {group.label!r}" if along is None else along

    def _count(self, call: Announcement) -> None:
        group = call.group
        known = self._known.get(group)
        if known is None:
            known = self._known[group] = self._group(group), Seat(group.rank(), self._hosts(group))
        counted, seat = known
        size, kind = call_size(call), collective_of(call)
        given = given_bytes(call) if kind == "gather" else size
        sent = sent_by(kind, given, seat, call.root, parts_bytes(call, kind, seat))
        with self._lock:
            before = counted.volumes.get(call.name, Volume())
            counted.volumes[call.name] = before + Volume(1, size, sent.inside, sent.between)

    def _group(self, group: ProcessGroup) -> _Group:
        with self._lock:
            return self._groups.setdefault((group.label, group.ranks), _Group(group.label, group.ranks))


def _hosts_of_the_world(group: ProcessGroup) -> Sequence[str]:
    return group.hosts()


def _axes_of(mesh: MeshState) -> Axes | None:
    # A rank outside the mesh has no groups in it.
    if mesh.get_coordinate() is None:
        return None
    return Axes(mesh.mesh, mesh.mesh_dim_names, mesh.get_rank())


@contextmanager
def accounting(world: World, mesh: MeshState) -> Iterator[Account]:
    """Count the calls of the block; see `DeviceMesh.account`."""
    hosts = mesh._hosts()
    account = Account(_axes_of(mesh), None if hosts is None else hosts.of_group)
    world.listeners.watch(account)
    try:
        yield account
    finally:
        world.listeners.unwatch(account)
