"""Accounts: the calls of one rank and their bytes, by axis and collective, inside and between hosts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from meshdist.collectives.registry import sent_in_call
from meshdist.collectives.traffic import Seat, nbytes_of
from meshdist.groups.world import resolve
from meshdist.profiler.tables import bytes_text, html_table, plot_bars, text_table
from meshdist.system.plurals import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meshdist.groups.process_group import ProcessGroup
    from meshdist.groups.world import World
    from meshdist.runtime.hooks import CallInfo

    Ranks = NDArray[np.int64]

_HEAD = ("axis", "collective", "calls", "bytes", "min sent inside hosts", "min sent between hosts")


class MeshView(Protocol):
    """The attributes of a DeviceMesh that define its axes."""

    @property
    def mesh(self) -> Ranks: ...

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    def get_coordinate(self) -> tuple[int, ...] | None: ...

    def get_rank(self) -> int: ...


def axes_of(mesh: MeshView) -> Axes | None:
    return None if mesh.get_coordinate() is None else Axes(mesh.mesh, mesh.mesh_dim_names, mesh.get_rank())


class Axes:
    """The axes of a mesh of global `ranks`, to find the axes along which a group of `rank` runs."""

    def __init__(self, ranks: Ranks, names: tuple[str, ...] | None, rank: int) -> None:
        self._ranks = ranks
        self._names = names
        self._rank = rank

    def of(self, ranks: tuple[int, ...]) -> str | None:
        """Return the axes along which the group of these global ranks runs, as `dp` or `dp,tp`; None if there are none.

        Such a group holds the calling rank and all ranks of the mesh that differ from it in these axes alone, in any
        order. It may belong to an axis, a slice, the flattened mesh, or none of them. A group of this rank alone runs
        along all axes of size 1.
        """
        inside = np.isin(self._ranks, ranks)
        if self._rank not in ranks or np.count_nonzero(inside) != len(ranks):
            return None
        places = np.nonzero(inside)
        along = [axis for axis, at in enumerate(places) if at.min() != at.max()]
        shape = self._ranks.shape
        if len(ranks) != np.prod([shape[axis] for axis in along], dtype=np.int64):
            return None
        along = along or [axis for axis, size in enumerate(shape) if size == 1]
        if not along:
            return None
        return f"axis {','.join(map(str, along))}" if self._names is None else ",".join(self._names[k] for k in along)


class _Group:
    def __init__(self, label: str, ranks: tuple[int, ...]) -> None:
        self.label = label
        self.ranks = ranks
        self.volumes: dict[str, Volume] = {}


@dataclass(frozen=True)
class Volume:
    """A sum over this rank's calls.

    Attributes:
        calls: The number of calls.
        nbytes: The sum of their sizes in bytes. The size of a call is the larger of input and output: the array of an
            all_reduce, the whole output of an all_gather, the whole input of a reduce_scatter.
        inside: The least bytes that this rank must send to ranks of its host.
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


def call_size(call: CallInfo) -> int:
    """Return the size of a call in bytes: the larger of this rank's input and output.

    For one array per device of a process it counts the process's own contribution: one array, or their reduction; for
    gather or reduce-scatter, all of them once.
    """
    longer = max(nbytes_of(call.send), nbytes_of(call.recv))
    collective = call.collective
    if collective is None or collective.composition is None or not collective.composition.by_device:
        return longer
    return longer // min(len(side) for side in (call.send, call.recv) if isinstance(side, (list, tuple)))


class Account:
    """Counts the calls of one rank and their bytes; made by `mesh.account()` and `meshdist.dry_run`.

    An account counts every call on any group, by flat function or method, sync or async, unless it raises. Calls inside
    a `coalescing_manager` count as the combined call. Collectives of objects count as one call with the bytes of their
    pickles. A `sendrecv`, `shift` or `halo_exchange` counts as one call on each group in which it exchanges messages.
    Calls on groups that do not contain this rank do not count.

    A group is counted under the axes of the mesh along which it runs, `tp` or `dp,tp` (`axis 1` without names); other
    groups under their label: `group 'label'`.

    The bytes sent are the least that the collective needs, with as few as possible between hosts. The actual traffic
    may be larger.

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
        axis   collective  calls   bytes  min sent inside hosts  min sent between hosts
        tp     all_reduce      1  1000 B                 1000 B                     0 B
        dp,tp  broadcast       1   100 B                  100 B                     0 B
        all                    2  1100 B                 1100 B                     0 B
    """

    def __init__(self, axes: Axes | None = None, hosts: Callable[[ProcessGroup], Sequence[str]] | None = None) -> None:
        self._axes = axes
        self._hosts = hosts or (lambda group: group.hosts())
        self._lock = threading.Lock()
        self._groups: dict[tuple[str, tuple[int, ...]], _Group] = {}
        self._known: WeakKeyDictionary[ProcessGroup, tuple[_Group, Seat]] = WeakKeyDictionary()

    def __call__(self, call: CallInfo) -> Callable[[], None] | None:
        """Return a function that counts the call once it is complete; called by the group's hooks."""
        return None if call.is_size_exchange else lambda: self._count(call)

    def along(self, mesh: MeshView) -> Account:
        """Return the counts so far by the axes of `mesh`, with the hosts as counted."""
        account = Account(axes_of(mesh))
        with self._lock:
            account._groups = dict(self._groups)
        return account

    def as_dict(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the counts by axis and collective as dicts of the fields of `Volume`, in the order of the calls."""
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
        """Draw the least bytes sent along each axis as bars, inside and between hosts, with matplotlib.

        Args:
            ax: The matplotlib Axes to draw in. None: those of a new figure.

        Returns:
            The Axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        volumes = self.volumes()
        inside = [sum(volume.inside for volume in found.values()) for found in volumes.values()]
        between = [sum(volume.between for volume in found.values()) for found in volumes.values()]
        return plot_bars(list(volumes), inside, between, ax)

    def __repr__(self) -> str:
        total = self.total()
        return f"<Account: {counted(total.calls, 'call')} of {bytes_text(total.nbytes)}; print it for the table>"

    def __str__(self) -> str:
        return text_table(_rows(self.volumes(), self.total()))

    def _repr_html_(self) -> str:
        return html_table(_rows(self.volumes(), self.total()))

    def _name(self, group: _Group) -> str:
        along = None if self._axes is None else self._axes.of(group.ranks)
        return f"group {group.label!r}" if along is None else along

    def _count(self, call: CallInfo) -> None:
        group = resolve(call.group)
        known = self._known.get(group)
        if known is None:
            known = self._known[group] = self._group(group), Seat(group.rank(), self._hosts(group))
        kept, seat = known
        size = call_size(call)
        sent = sent_in_call(call, size, seat)
        with self._lock:
            before = kept.volumes.get(call.name, Volume())
            kept.volumes[call.name] = before + Volume(1, size, sent.inside, sent.between)

    def _group(self, group: ProcessGroup) -> _Group:
        with self._lock:
            return self._groups.setdefault((group.label, group.ranks), _Group(group.label, group.ranks))


def _rows(volumes: dict[str, dict[str, Volume]], total: Volume) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [_HEAD]
    rows += [(axis, name, *_cells(volume)) for axis, found in volumes.items() for name, volume in found.items()]
    return [*rows, ("all", "", *_cells(total))]


def _cells(volume: Volume) -> tuple[str, str, str, str]:
    return str(volume.calls), *map(bytes_text, (volume.nbytes, volume.inside, volume.between))  # type: ignore[return-value]


@contextmanager
def accounting(
    world: World, mesh: MeshView, hosts: Callable[[ProcessGroup], Sequence[str]] | None
) -> Iterator[Account]:
    account = Account(axes_of(mesh), hosts)
    world.hook_registry.watch(account)
    try:
        yield account
    finally:
        world.hook_registry.unwatch(account)
