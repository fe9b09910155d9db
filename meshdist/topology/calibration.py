"""calibrate: measure collectives on the ranks of this world, and make a cost model of the times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshdist.current import current_world
from meshdist.topology.cost_model import CostModel
from meshdist.topology.curves import Curve
from meshdist.topology.fitting import fitted, monotone
from meshdist.topology.topology import Topology

if TYPE_CHECKING:
    from meshdist.process_group import ProcessGroup

MIB = 1 << 20
LEAST_BYTES, MOST_BYTES = 1 << 10, 64 * MIB
# Caches, and changes of algorithm, put knees into the curves from here on: every power of two is measured, below every
# other one.
KNEES_BYTES = 1 << 14
TURN_S = 0.008
MOST_CALLS = 200
# The median of the rounds over the shortest, of most of what is measured, up to which the machine counts as quiet.
BUSY_SPREAD = 1.5


class Cell(NamedTuple):
    """One thing to measure."""

    collective: str
    group: tuple[int, ...]
    nbytes: int


def calibrate(seconds: float = 10.0, topology: Any = "auto", *, max_bytes: int = MOST_BYTES) -> CostModel:
    """Measure this world's collectives for some seconds, and return a cost model that predicts them. All ranks call it.

    all_reduce, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single and broadcast of NumPy arrays are
    timed at sizes from 1 KiB on, on 2, 4, 8, ... and all ranks of the fullest host, and, where there are several
    hosts, on one rank of two and of each, and on all ranks. Sizes and groups take turns, as many rounds as there is
    time for, at least one. A time is that of the slowest rank of the group, in the round that a quarter of all rounds
    beat: what other processes add on a busy machine is left out as far as it can be, and where the rounds differ much,
    `note` of the model says so. A curve never falls: where a larger size was measured to be faster, both get their
    geometric mean. The links are fitted to the
    curves: the memory between ranks of a host to groups of one host, the network to groups of one rank of each.

    Where a host has fewer cores than ranks, this is in the curves: they hold for groups of these sizes on such hosts
    that call alone, as measured.

    Args:
        seconds: How long to measure; making the groups comes on top. At least one round is run.
        topology: Where the ranks are; anything that `Topology.of` takes.
        max_bytes: The largest size; every rank needs four times as much memory, as each size is measured in
            arrays of its own.

    Returns:
        The model, on every rank. Its curves are the same on all.

    Raises:
        ValueError: There is no world, or only one rank; the topology has another number of ranks; `seconds` or
            `max_bytes` are too small.

    Example:
        >>> import meshdist
        >>> def program():
        ...     cost = calibrate(0.1, max_bytes=4096)
        ...     return cost.predict("all_reduce", 4096, 2) > 0
        >>> meshdist.run(program, 2)
        [True, True]
    """
    world = current_world()
    machine = Topology.of(topology)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise ValueError(f"calibrate: seconds must be a positive number, got {seconds!r}")
    if max_bytes < LEAST_BYTES:
        raise ValueError(f"calibrate: max_bytes must be at least {LEAST_BYTES}, got {max_bytes}")
    if machine.num_ranks != world.size or world.size < 2:
        raise ValueError(
            f"calibrate: needs at least 2 ranks and a topology of all of them; the world has {world.size} and the"
            f" topology {machine.num_ranks}"
        )
    groups = groups_to_measure(machine.hosts)
    cells = [
        Cell(name, group, nbytes) for group in groups for name in CALLS for nbytes in sizes_for(len(group), max_bytes)
    ]
    mine = {group: world.shared_group(group, desc="calibrate") for group in groups if world.rank in group}
    times, note = _Stopwatch(world.default_group, mine, cells).run(seconds)
    curves = []
    for group in groups:
        members = tuple(sorted((len(set(group) & set(ranks)) for ranks in machine.hosts.values()), reverse=True))
        for name, call in CALLS.items():
            points = {cell.nbytes: times[cell] for cell in cells if cell.collective == name and cell.group == group}
            kind = tuple(count for count in members if count)
            curves.append(Curve(call.name, kind, tuple(points), tuple(monotone([*points.values()]))))
    return CostModel(Topology(fitted(machine.parts, curves)), curves, note)


def groups_to_measure(hosts: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the groups that tell most about hosts, each kind once."""
    fullest = max(hosts.values(), key=len)
    counts = [1 << power for power in range(1, len(fullest).bit_length()) if 1 << power <= len(fullest)]
    groups = [tuple(fullest[:count]) for count in [*counts, len(fullest)] if count > 1]
    heads = tuple(ranks[0] for ranks in hosts.values())
    if len(heads) > 1:
        groups += [heads[:2], heads, tuple(rank for ranks in hosts.values() for rank in ranks)]
    return list(dict.fromkeys(groups))


def sizes_for(num_ranks: int, max_bytes: int) -> list[int]:
    """Return the sizes to measure, rounded to what the ranks divide among them.

    Example:
        >>> sizes_for(3, 4096)
        [1020, 4092]
    """
    sizes = []
    nbytes = LEAST_BYTES
    while nbytes <= max_bytes:
        sizes.append(nbytes)
        nbytes *= 2 if nbytes >= KNEES_BYTES else 4
    block = 4 * num_ranks
    return list(dict.fromkeys(max(1, nbytes // block) * block for nbytes in sizes))


def spread_note(rounds: Any) -> str:
    """Return what to say of rounds that differ much, nothing of others.

    Args:
        rounds: Seconds, of shape (rounds, things measured).

    Example:
        >>> spread_note(np.array([[1.0, 2.0], [3.0, 4.0], [3.0, 5.0]]))
        'the machine was busy: half of the rounds took at least 2.5 times as long as the shortest; measure again'
        >>> spread_note(np.array([[1.0], [1.2]]))
        ''
    """
    spread = float(np.median(np.median(rounds, axis=0) / rounds.min(axis=0)))
    if spread <= BUSY_SPREAD:
        return ""
    return (
        f"the machine was busy: half of the rounds took at least {spread:.1f} times as long as the shortest;"
        " measure again"
    )


class Arrays:
    """Arrays of float32 zeros, made once: they stay what they are however often they are added.

    Each is one of its own, as in a program. A part of a larger array would lie in larger pages, where the same call
    takes up to half as long.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Any] = {}

    def given(self, size: int) -> Any:
        """Return the array of `size` elements that calls read."""
        return self._array("given", size)

    def taken(self, size: int) -> Any:
        """Return the array of `size` elements that calls write."""
        return self._array("taken", size)

    def _array(self, use: str, size: int) -> Any:
        array = self._made.get((use, size))
        if array is None:
            array = self._made[use, size] = np.empty(size, np.float32)
            array.fill(0)  # written, so that its pages are there
        return array


class Call(NamedTuple):
    """What the model calls a collective, and how it is called with `size` elements on the larger side."""

    name: str
    prepare: Callable[[ProcessGroup, Arrays, int], Callable[[], Any]]


def _all_reduce(group: ProcessGroup, arrays: Arrays, size: int) -> Callable[[], Any]:
    array = arrays.taken(size)
    return lambda: group.all_reduce(array)


def _broadcast(group: ProcessGroup, arrays: Arrays, size: int) -> Callable[[], Any]:
    array = arrays.taken(size)
    return lambda: group.broadcast(array, 0)


def _all_gather(group: ProcessGroup, arrays: Arrays, size: int) -> Callable[[], Any]:
    whole, part = arrays.taken(size), arrays.given(size // group.size())
    return lambda: group.all_gather_into_tensor(whole, part)


def _reduce_scatter(group: ProcessGroup, arrays: Arrays, size: int) -> Callable[[], Any]:
    whole, part = arrays.given(size), arrays.taken(size // group.size())
    return lambda: group.reduce_scatter_tensor(part, whole)


def _all_to_all(group: ProcessGroup, arrays: Arrays, size: int) -> Callable[[], Any]:
    given, taken = arrays.given(size), arrays.taken(size)
    return lambda: group.all_to_all_single(taken, given)


CALLS: Mapping[str, Call] = {
    "all_reduce": Call("all_reduce", _all_reduce),
    "all_gather_into_tensor": Call("all_gather", _all_gather),
    "all_to_all_single": Call("all_to_all", _all_to_all),
    "reduce_scatter_tensor": Call("reduce_scatter", _reduce_scatter),
    "broadcast": Call("broadcast", _broadcast),
}


class _Stopwatch:
    """Time cells in rounds, all ranks together.

    Args:
        everyone: The group of all ranks.
        mine: The groups of this rank, by their ranks.
        cells: What to measure, all of a group together.
    """

    def __init__(
        self, everyone: ProcessGroup, mine: Mapping[tuple[int, ...], ProcessGroup], cells: Sequence[Cell]
    ) -> None:
        self._everyone = everyone
        self._mine = mine
        self._cells = cells
        self._arrays = Arrays()

    def run(self, seconds: float) -> tuple[dict[Cell, float], str]:
        """Return the time of one call of each cell, measured for about so long, and what is to be said of it."""
        end = monotonic() + seconds
        shortest = self._round(np.ones(len(self._cells), dtype=np.int64))
        rounds: list[Any] = []
        begin = monotonic()
        while not rounds or self._time_for_more(end, (monotonic() - begin) / len(rounds)):
            # The first calls of a cell are slow, before its arrays are in the caches: by them it would get too few.
            rounds.append(self._round(np.clip(TURN_S / shortest, 2, MOST_CALLS).astype(np.int64)))
            shortest = np.minimum(shortest, rounds[-1])
        # What a busy machine adds is not the model's to know, and a single lucky round is not the rule.
        times = np.quantile(np.array(rounds), 0.25, axis=0).tolist()
        return dict(zip(self._cells, times, strict=True)), spread_note(np.array(rounds))

    def _time_for_more(self, end: float, round_s: float) -> bool:
        """Return whether there is time for one more round; as the first rank sees it."""
        decision = np.array(monotonic() + round_s < end)
        self._everyone.broadcast(decision, 0)
        return bool(decision)

    def _round(self, num_calls: Any) -> Any:
        """Return the seconds of one call of each cell: those of its slowest rank."""
        spent = np.zeros(len(self._cells))
        ahead: tuple[int, ...] = ()
        for number, cell in enumerate(self._cells):
            if cell.group != ahead:
                # Ranks that are not in the group wait for it here: nobody else calls meanwhile.
                self._everyone.barrier()
                ahead = cell.group
            if cell.group in self._mine:
                spent[number] = self._time(self._mine[cell.group], cell, int(num_calls[number]))
        self._everyone.all_reduce(spent, "max")
        return spent

    def _time(self, group: ProcessGroup, cell: Cell, num_calls: int) -> float:
        call = CALLS[cell.collective].prepare(group, self._arrays, cell.nbytes // 4)
        for _ in range(1 + num_calls // 10):
            call()
        group.barrier()
        begin = perf_counter()
        for _ in range(num_calls):
            call()
        return (perf_counter() - begin) / num_calls
