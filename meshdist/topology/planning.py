"""plan: rank the shapes of a mesh by the predicted time of its communication."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np

from meshdist.errors import UnknownAxisError
from meshdist.mesh.layout.axes_and_chunks import checked_names
from meshdist.system.digits import three_digits
from meshdist.system.name_hints import explaining
from meshdist.system.plurals import counted
from meshdist.topology.algorithms import collective_name
from meshdist.topology.cost_model import CostModel, axis_rows
from meshdist.topology.topology import Topology

if TYPE_CHECKING:
    from meshdist.mesh.layout.rank_list import Ranks
    from meshdist.topology.estimate import Estimate

Calls: TypeAlias = "float | tuple[float, float]"
Traffic: TypeAlias = "Mapping[str, Calls]"
Volumes: TypeAlias = "Mapping[str, Traffic | Callable[[Mapping[str, int]], Traffic] | None]"


@dataclass(frozen=True)
class Candidate:
    """One shape of the mesh, and its time per step.

    Attributes:
        names: The names of the axes.
        shape: The number of ranks along each axis.
        axis_seconds: Seconds per step of each axis.
        ranks: The global ranks by axes, the argument `mesh` of `DeviceMesh`.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    axis_seconds: Mapping[str, float]
    ranks: Ranks

    @property
    def seconds(self) -> float:
        """Seconds per step, the sum over the axes."""
        return sum(self.axis_seconds.values())

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in zip(self.names, self.shape, strict=True))
        return f"Candidate({sizes}: {_duration(self.seconds)})"


class Plan(Sequence[Candidate]):
    """The candidates of `plan`, the fastest first; `print` shows a table of the best ones.

    Args:
        candidates: In this order.
    """

    MOST_SHOWN = 12

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = tuple(candidates)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> Plan: ...

    def __getitem__(self, index: int | slice) -> Candidate | Plan:
        found = self._candidates[index]
        return Plan(found) if isinstance(found, tuple) else found

    def __len__(self) -> int:
        return len(self._candidates)

    @property
    def best(self) -> Candidate:
        """The fastest."""
        return self._candidates[0]

    def __str__(self) -> str:
        names = self.best.names if self._candidates else ()
        head = ["", *names, "step", *(f"in {name}" for name in names)]
        rows = [
            [
                str(place),
                *map(str, each.shape),
                _duration(each.seconds),
                *(_duration(each.axis_seconds[name]) for name in names),
            ]
            for place, each in enumerate(self._candidates[: self.MOST_SHOWN], 1)
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
        if len(self) > self.MOST_SHOWN:
            lines.append(f"and {len(self) - self.MOST_SHOWN} slower ones")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


@explaining
def plan(
    volumes: Volumes,
    topology: Topology | CostModel | int | Any,
    *,
    sizes: Mapping[str, int | Iterable[int]] | None = None,
    inside: str | int | Sequence[str | int] | None = None,
) -> Plan:
    """Order the shapes that a mesh over all ranks can have by the predicted time of a step. Needs no world.

    It tries every factorization of the number of ranks over the axes, places it as `init_device_mesh` with this
    topology does, and predicts the calls of each axis, with all groups of an axis calling at once. The calls of a step
    are sequential in the model; arithmetic is not counted.

    Args:
        volumes: The axes in the order of the mesh, and the communication of each per step: a dict from the name of a
            collective to its bytes (as in `CostModel.predict`) or to (bytes, calls). If they depend on the shape, a
            function that takes the sizes of the axes, as a dict, and returns such a dict. None: no communication.
        topology: A Topology, a CostModel, anything that `Topology.of` accepts, or a number of ranks on hosts of 8 with
            default links (the last host may have fewer).
        sizes: For some axes, the size, or the allowed sizes.
        inside: Axes that must stay inside hosts; shapes that do not allow it are omitted. None: no such axes.

    Returns:
        The candidates, the fastest first; ties are sorted by shape.

    Raises:
        ValueError: No shape fits, a collective or an axis is unknown, or a number of bytes is negative.
        TypeError: Volumes that are neither dicts nor functions, or not numbers.

    Example:
        >>> from meshdist import Topology, plan
        >>> machine = Topology.uniform(2, 8, gpus=8)
        >>> gradients = lambda size: {"all_reduce": 16e9 / size["tp"]}
        >>> activations = lambda size: {"all_reduce": (256e6 / size["dp"], 64)}
        >>> print(plan({"dp": gradients, "tp": activations}, machine))  # doctest: +NORMALIZE_WHITESPACE
               dp  tp    step   in dp    in tp
            1   4   4  1.69 s  1.44 s   247 ms
            2   8   2  1.84 s  1.76 s  82.2 ms
            3   2   8  1.85 s  1.28 s   575 ms
            4  16   1  2.40 s  2.40 s        0
            5   1  16  2.46 s       0   2.46 s
    """
    cost = topology if isinstance(topology, CostModel) else CostModel(topology)
    if not isinstance(volumes, Mapping):
        raise TypeError(
            f"plan: volumes must be a dict of the traffic of each axis, such as {{'dp': {{'all_reduce': 1e9}}}},"
            f" got {volumes!r}"
        )
    if not volumes:
        raise ValueError("plan: volumes must name at least one axis, got none")
    names = checked_names(tuple(volumes), (1,) * len(volumes))
    choices = _choices(names, sizes)
    estimates: dict[tuple[str, bytes, int], Estimate] = {}
    candidates = []
    for shape in shapes(cost.topology.num_ranks, choices):
        try:
            ranks = cost.topology.place(shape, names, inside)
        except UnknownAxisError:
            raise
        except ValueError:
            continue  # these axes do not fit into the hosts
        carried = dict(zip(names, shape, strict=True))
        axis_seconds = {}
        for axis, name in enumerate(names):
            calls = _calls(name, volumes[name], carried)
            rows = axis_rows(ranks, axis)
            axis_seconds[name] = sum(
                count * _estimate(cost, estimates, collective, rows).seconds(nbytes)
                for collective, nbytes, count in calls
                if rows.shape[1] > 1
            )
        candidates.append(Candidate(names, shape, axis_seconds, ranks))
    if not candidates:
        raise ValueError(
            f"plan: no mesh over {counted(cost.topology.num_ranks, 'rank')} has the axes {', '.join(map(repr, names))}"
            f" with sizes {dict(sizes or {})}{f' and {inside!r} inside hosts' if inside else ''}; allow more sizes"
        )
    return Plan(sorted(candidates, key=lambda each: (each.seconds, each.shape)))


def _choices(names: tuple[str, ...], sizes: Mapping[str, int | Iterable[int]] | None) -> list[frozenset[int] | None]:
    given = dict(sizes or {})
    for name in given:
        if name not in names:
            raise UnknownAxisError(
                f"plan: sizes: there is no axis {name!r}; the axes are {', '.join(map(repr, names))}"
            )
    return [
        None if name not in given else frozenset([size] if isinstance(size := given[name], int) else size)
        for name in names
    ]


def shapes(num_ranks: int, choices: Sequence[frozenset[int] | None]) -> Iterator[tuple[int, ...]]:
    if len(choices) == 1:
        if choices[0] is None or num_ranks in choices[0]:
            yield (num_ranks,)
        return
    for size in _divisors(num_ranks):
        if choices[0] is None or size in choices[0]:
            for rest in shapes(num_ranks // size, choices[1:]):
                yield (size, *rest)


def _divisors(number: int) -> list[int]:
    low = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})


def _calls(axis: str, volume: Any, sizes: Mapping[str, int]) -> list[tuple[str, float, float]]:
    traffic = volume(sizes) if callable(volume) else volume
    if traffic is None:
        return []
    if not isinstance(traffic, Mapping):
        raise TypeError(
            f"plan: the volume of axis {axis!r} must be a dict such as {{'all_reduce': bytes}}, a function that returns"
            f" one, or None, got {traffic!r}"
        )
    calls = []
    for collective, given in traffic.items():
        pair = given if isinstance(given, tuple) else (given, 1)
        if len(pair) != 2 or not all(isinstance(number, (int, float, np.number)) for number in pair):
            raise TypeError(f"plan: axis {axis!r}: {collective}: expected bytes, or (bytes, calls), got {given!r}")
        nbytes, count = pair
        if not (nbytes >= 0 and count >= 0):
            raise ValueError(f"plan: axis {axis!r}: {collective}: bytes and calls must not be negative, got {given!r}")
        calls.append((collective_name(collective), nbytes, count))
    return calls


def _estimate(cost: CostModel, known: dict[tuple[str, bytes, int], Estimate], name: str, rows: Ranks) -> Estimate:
    """Return the estimate for these groups, cached: shapes that differ in other axes share it."""
    key = name, rows.tobytes(), rows.shape[1]
    if key not in known:
        known[key] = cost.estimate(name, rows)
    return known[key]


def _duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{three_digits(seconds / scale)} {unit}"
    return f"{three_digits(seconds * 1e6)} us" if seconds else "0"
