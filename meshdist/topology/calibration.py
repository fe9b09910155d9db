"""calibrate: measure collectives on the ranks of this world, and fit a cost model to the times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshdist.groups.world import current_world
from meshdist.system.name_hints import explaining
from meshdist.topology.cost_model import CostModel
from meshdist.topology.curve import Curve, monotone
from meshdist.topology.estimate import fitted
from meshdist.topology.topology import Topology

if TYPE_CHECKING:
    from meshdist.groups.process_group import ProcessGroup

MIB = 1 << 20
LEAST_BYTES, MOST_BYTES = 1 << 10, 64 * MIB
# From here on, caches and changes of algorithm put knees into the curves: measure every power of two; below, every
# other one.
KNEES_BYTES = 1 << 14
TURN_S = 0.008
MOST_CALLS = 200
# The largest median over cells of (median round / shortest round) of a quiet machine.
BUSY_SPREAD = 1.5


class Cell(NamedTuple):
    collective: str
    group: tuple[int, ...]
    nbytes: int


@explaining
def calibrate(seconds: float = 10.0, topology: Any = "auto", *, max_bytes: int = MOST_BYTES) -> CostModel:
    """Measure this world's collectives for some seconds and return a cost model that predicts them. All ranks call.

    It times all_reduce, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single and broadcast of NumPy arrays
    from 1 KiB on: on 2, 4, 8, ... and all ranks of the fullest host and, with several hosts, on one rank of two hosts,
    on one rank of each host, and on all ranks. Sizes and groups alternate for as many rounds as time allows, at least
    one. The time of a call is that of the slowest rank, at the first quartile of the rounds, which excludes most delays
    by other processes; if rounds differ much, the model's `note` says so. A curve never falls: if a larger size was
    faster, both are assigned the geometric mean. Links are fitted to the curves: the memory between ranks of a host to
    groups on one host, the network to groups of one rank per host.

    The curves hold for groups of these sizes that call alone, on hosts with the same ratio of ranks to cores.

    Args:
        seconds: How long to measure, excluding the creation of groups. At least one round is run.
        topology: Where the ranks run; anything that `Topology.of` accepts.
        max_bytes: The largest size; every rank needs four times as much memory, since each size has its own arrays.

    Returns:
        The model, with the same curves on every rank.

    Raises:
        ValueError: There is no world, or only one rank; the topology has a different number of ranks; `seconds` or
            `max_bytes` are too small.

    Example:
        >>> import meshdist
        >>> from meshdist import calibrate
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
    """Return the most informative groups of ranks, one of each kind."""
    fullest = max(hosts.values(), key=len)
    counts = [1 << power for power in range(1, len(fullest).bit_length()) if 1 << power <= len(fullest)]
    groups = [tuple(fullest[:count]) for count in [*counts, len(fullest)] if count > 1]
    heads = tuple(ranks[0] for ranks in hosts.values())
    if len(heads) > 1:
        groups += [heads[:2], heads, tuple(rank for ranks in hosts.values() for rank in ranks)]
    return list(dict.fromkeys(groups))


def sizes_for(num_ranks: int, max_bytes: int) -> list[int]:
    """Return the sizes to measure, rounded to multiples of the blocks of `num_ranks` ranks."""
    sizes = []
    nbytes = LEAST_BYTES
    while nbytes <= max_bytes:
        sizes.append(nbytes)
        nbytes *= 2 if nbytes >= KNEES_BYTES else 4
    block = 4 * num_ranks
    return list(dict.fromkeys(max(1, nbytes // block) * block for nbytes in sizes))


def spread_note(rounds: Any) -> str:
    """Return a note if the rounds, seconds of shape (rounds, cells), differ much; else an empty string."""
    spread = float(np.median(np.median(rounds, axis=0) / rounds.min(axis=0)))
    if spread <= BUSY_SPREAD:
        return ""
    return (
        f"the machine was busy: half of the rounds took at least {spread:.1f} times as long as the shortest;"
        " measure again"
    )


class Arrays:
    """Arrays of float32 zeros, made once: repeated reductions leave them unchanged.

    Each size has its own array, as in a program. A view of a larger array would lie in larger memory pages, where the
    same call takes up to half as long.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Any] = {}

    def given(self, size: int) -> Any:
        return self._array("given", size)

    def taken(self, size: int) -> Any:
        return self._array("taken", size)

    def _array(self, use: str, size: int) -> Any:
        array = self._made.get((use, size))
        if array is None:
            array = self._made[use, size] = np.empty(size, np.float32)
            array.fill(0)  # writes the memory pages, so that they are mapped
        return array


class Call(NamedTuple):
    """The model's name of a collective, and its arguments for `size` elements on the larger side."""

    name: str
    arguments: Callable[[Arrays, int, int], tuple[Any, ...]]  # from arrays, size and number of ranks


CALLS: Mapping[str, Call] = {
    "all_reduce": Call("all_reduce", lambda arrays, size, _: (arrays.taken(size),)),
    "all_gather_into_tensor": Call("all_gather", lambda arrays, size, n: (arrays.taken(size), arrays.given(size // n))),
    "all_to_all_single": Call("all_to_all", lambda arrays, size, _: (arrays.taken(size), arrays.given(size))),
    "reduce_scatter_tensor": Call(
        "reduce_scatter", lambda arrays, size, n: (arrays.taken(size // n), arrays.given(size))
    ),
    "broadcast": Call("broadcast", lambda arrays, size, _: (arrays.taken(size), 0)),
}


class _Stopwatch:
    """Measures `cells` (sorted by group) in rounds on all ranks; `mine` are the groups of this rank."""

    def __init__(
        self, everyone: ProcessGroup, mine: Mapping[tuple[int, ...], ProcessGroup], cells: Sequence[Cell]
    ) -> None:
        self._everyone = everyone
        self._mine = mine
        self._cells = cells
        self._arrays = Arrays()

    def run(self, seconds: float) -> tuple[dict[Cell, float], str]:
        """Measure for about `seconds`; return the time of one call of each cell, and a note."""
        end = monotonic() + seconds
        shortest = self._round(np.ones(len(self._cells), dtype=np.int64))
        rounds: list[Any] = []
        begin = monotonic()
        while not rounds or self._time_for_more(end, (monotonic() - begin) / len(rounds)):
            # Recompute the number of calls: the first calls of a cell are slow, before its arrays are in the caches.
            rounds.append(self._round(np.clip(TURN_S / shortest, 2, MOST_CALLS).astype(np.int64)))
            shortest = np.minimum(shortest, rounds[-1])
        # The quartile excludes most of the delays of a busy machine, and a single lucky round.
        times = np.quantile(np.array(rounds), 0.25, axis=0).tolist()
        return dict(zip(self._cells, times, strict=True)), spread_note(np.array(rounds))

    def _time_for_more(self, end: float, round_s: float) -> bool:
        """Return whether rank 0 has time for another round."""
        decision = np.array(monotonic() + round_s < end)
        self._everyone.broadcast(decision, 0)
        return bool(decision)

    def _round(self, num_calls: Any) -> Any:
        """Return the seconds of one call of each cell on its slowest rank."""
        spent = np.zeros(len(self._cells))
        ahead: tuple[int, ...] = ()
        for number, cell in enumerate(self._cells):
            if cell.group != ahead:
                # Ranks outside the group wait here, so that they do not disturb the measurement.
                self._everyone.barrier()
                ahead = cell.group
            if cell.group in self._mine:
                spent[number] = self._time(self._mine[cell.group], cell, int(num_calls[number]))
        self._everyone.all_reduce(spent, "max")
        return spent

    def _time(self, group: ProcessGroup, cell: Cell, num_calls: int) -> float:
        arguments = CALLS[cell.collective].arguments(self._arrays, cell.nbytes // 4, group.size())
        call = partial(getattr(group, cell.collective), *arguments)
        for _ in range(1 + num_calls // 10):
            call()
        group.barrier()
        begin = perf_counter()
        for _ in range(num_calls):
            call()
        return (perf_counter() - begin) / num_calls
