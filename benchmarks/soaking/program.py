"""A random program, the same on every rank: who talks, and what they do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from soaking.values import DTYPES, ops_of

T = TypeVar("T")

# More than once: more often.
KINDS = (
    *["all_reduce"] * 3,
    *["broadcast"] * 2,
    *["message"] * 3,
    *["ring"] * 2,
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce_coalesced",
    "all_to_all",
    *["all_to_all_single"] * 2,
    "barrier",
    "broadcast_object_list",
    "coalescing_manager",
    "gather",
    "premul_sum",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    *["scan"] * 2,
    "scatter",
)
# They return no Work.
SYNC_ONLY = ("all_gather_object", "broadcast_object_list", "coalescing_manager")
MESSAGES = ("message", "ring")
# Counts of elements: in one step, a few chunks, many; those that divide by nothing.
_COUNTS = ((0, 1, 2, 3, 7), (17, 255, 1024, 1025), (3_001, 8_192, 20_011), (65_536, 100_003), (262_147, 400_000))
_SHARES = (0.3, 0.3, 0.2, 0.14, 0.06)
_TAGS = 3


@dataclass(frozen=True)
class Step:
    """One call of all members of a communicator.

    Attributes:
        number: Its place in the program.
        kind: One of KINDS.
        where: Index into the communicators of the program.
        dtype: Of all arrays.
        shape: Of a rank's block.
        op: The reduction.
        root: Rank in the group; of a message, the sender.
        peer: Of a message: how many places further the receiver is, from 1.
        tag: Of a message.
        from_any: The message is received from whoever sends it.
        rows: Row i: how many rows of an all_to_all_single rank i sends to each; none are even ones.
        num_arrays: Of the coalesced forms and rings.
        stacked: The whole array has a dim more than its blocks; a scan excludes the rank itself.
        async_op: Wait for it later.
        rounds: How often it is done, with the same arrays and new contents.
    """

    number: int
    kind: str
    where: int
    dtype: str
    shape: tuple[int, ...]
    op: str
    root: int
    peer: int
    tag: int
    from_any: bool
    rows: tuple[tuple[int, ...], ...]
    num_arrays: int
    stacked: bool
    async_op: bool
    rounds: int


@dataclass(frozen=True)
class Program:
    """What all ranks do.

    Attributes:
        mesh: Shape of a mesh of all ranks.
        groups: Ranks of further groups, in group order.
        begins_anew: The world is destroyed and made again before it.
        steps: In order.
    """

    mesh: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    begins_anew: bool
    steps: tuple[Step, ...]

    def communicators(self, size: int) -> list[list[tuple[int, ...]]]:
        """Return, for each, the groups of ranks that it consists of: the world, the axes of the mesh, the groups."""
        ranks = np.arange(size).reshape(self.mesh)
        axes = [np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis]) for axis in range(ranks.ndim)]
        lines = [[tuple(map(int, line)) for line in axis] for axis in axes]
        return [[tuple(range(size))], *lines, *([group] for group in self.groups)]


def pick(rng: np.random.Generator, things: Sequence[T]) -> T:
    """Return one of `things`. NumPy's own `choice` catches a Ctrl-C, and goes on."""
    return things[int(rng.integers(len(things)))]


def make(seed: int, number: int, size: int, num_steps: int = 40) -> Program:
    """Return the program of a number."""
    rng = np.random.default_rng([seed, number])
    shapes = [shape for shape in itertools.product(range(1, size + 1), repeat=2) if np.prod(shape) == size]
    mesh = tuple(map(int, shapes[rng.integers(len(shapes))]))
    groups = tuple(_some_ranks(rng, size) for _ in range(rng.integers(3))) if size > 1 else ()
    program = Program(mesh, groups, bool(rng.random() < 0.03), ())
    sizes = [len(lines[0]) for lines in program.communicators(size)]
    steps = tuple(_step(rng, place, sizes) for place in range(num_steps))
    return Program(mesh, groups, program.begins_anew, steps)


def _some_ranks(rng: np.random.Generator, size: int) -> tuple[int, ...]:
    return tuple(map(int, rng.permutation(size)[: rng.integers(2, size + 1)]))


def _step(rng: np.random.Generator, number: int, sizes: list[int]) -> Step:
    where = int(rng.integers(len(sizes)))
    size = sizes[where]
    kind = pick(rng, KINDS if size > 1 else [kind for kind in KINDS if kind not in MESSAGES])
    dtype = pick(rng, DTYPES if kind != "premul_sum" else ("float32", "float64"))
    largeness = min(int(np.searchsorted(np.cumsum(_SHARES), rng.random(), side="right")), len(_COUNTS) - 1)
    shape = _shape(rng, pick(rng, _COUNTS[largeness]), kind)
    splits = kind == "all_to_all_single" and rng.random() < 0.5
    rows = np.array([0, 1, 2, 300])[rng.integers(4, size=(size, size))] if splits else ()
    return Step(
        number,
        kind,
        where,
        dtype,
        (7,) if splits else shape,
        pick(rng, ops_of(dtype)),
        int(rng.integers(size)),
        int(rng.integers(1, max(size, 2))),
        int(rng.integers(_TAGS)),
        bool(rng.random() < 0.2),
        tuple(tuple(map(int, row)) for row in rows),
        int(rng.integers(1, 4)),
        bool(rng.random() < 0.5),
        kind not in SYNC_ONLY and bool(rng.random() < 0.4),
        pick(rng, [1, 1, 2, 4]) if largeness < 4 else 1,
    )


def _shape(rng: np.random.Generator, count: int, kind: str) -> tuple[int, ...]:
    if count == 1 and rng.random() < 0.5 and kind != "all_to_all_single":
        return ()
    return (count // 2, 2) if count % 2 == 0 and rng.random() < 0.5 else (count,)
