"""The rule of operations: how the placements of operands meet in the index space of an operation. Pure arithmetic.

Every dimension of an operand has a label, as in einsum: those of one label run together. For each label the operands'
cuts are compared: equal cuts stay, an operand that is cut less is cut further, which is free, and what fits neither is
a conflict. A pending reduction passes through what is linear in it, and is computed otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from meshdist.runtime.plan_cache import remember
from meshdist.tensor.array_layout import ArrayLayout, Cut

Labels: TypeAlias = "tuple[Hashable, ...]"
States: TypeAlias = "tuple[str | None, ...]"

# What becomes of pending reductions along one axis: from the operands' states (the name of the reduction, or None) to
# that of the result and the states in which the operands must be for it; None: they are computed before.
Passes: TypeAlias = "Callable[[States], tuple[str, States] | None]"


class Alignment(NamedTuple):
    """How operands have to lie for an operation to be local.

    Attributes:
        targets: The layout that each operand must have.
        cuts: The cut of each label that is cut.
        pending: The axes along which the result is a pending reduction.
        conflicts: The operands that reach their target only by moving what is cut.
    """

    targets: tuple[ArrayLayout, ...]
    cuts: dict[Hashable, Cut]
    pending: dict[int, str]
    conflicts: tuple[int, ...]

    def cuts_of(self, labels: Sequence[Hashable]) -> tuple[Cut | None, ...]:
        """Return the cuts of an array whose dimensions have these labels, all in full."""
        return tuple(self.cuts.get(label) for label in labels)


_alignments: dict[tuple[Any, ...], Alignment] = {}


def align(operands: Sequence[ArrayLayout], labels: Sequence[Labels], passes: Passes | None = None) -> Alignment:
    """Return how `operands`, whose dimensions have these labels, have to lie for an operation to be local.

    A dimension of one row runs with any of its label, as in broadcasting. The largest operand's cuts come first.
    """
    key = (tuple(operands), tuple(labels), passes)
    alignment = _alignments.get(key)
    if alignment is None:
        alignment = _align(operands, labels, passes)
        remember(_alignments, key, alignment)
    return alignment


def _align(operands: Sequence[ArrayLayout], labels: Sequence[Labels], passes: Passes | None) -> Alignment:
    rows: dict[Hashable, int] = {}
    for layout, names in zip(operands, labels, strict=True):
        for extent, label in zip(layout.shape, names, strict=True):
            if rows.get(label, 1) == 1:
                rows[label] = extent
    cuts: dict[Hashable, Cut] = {}
    conflicts = []
    for number in sorted(range(len(operands)), key=lambda number: -math.prod(operands[number].shape)):
        if not _take_cuts(operands[number], labels[number], rows, cuts):
            conflicts.append(number)
    cut_axes = {axis for cut in cuts.values() for axis in cut.axes}
    pending, states = _states(operands, cut_axes, passes)
    targets = tuple(
        ArrayLayout.of_cuts(
            layout.shape,
            layout.mesh_shape,
            tuple(
                cuts.get(label) if extent == rows[label] else None
                for extent, label in zip(layout.shape, names, strict=True)
            ),
            {axis: op for axis, ops in states.items() if (op := ops[number]) is not None},
        )
        for number, (layout, names) in enumerate(zip(operands, labels, strict=True))
    )
    return Alignment(targets, cuts, pending, tuple(conflicts))


def _take_cuts(layout: ArrayLayout, labels: Labels, rows: dict[Hashable, int], cuts: dict[Hashable, Cut]) -> bool:
    """Add the cuts of an operand to those of the labels; return whether all of them fit."""
    fits = True
    for extent, label, cut in zip(layout.shape, labels, layout.cuts, strict=True):
        if cut is None:
            continue
        known = cuts.get(label)
        others = {axis for name, other in cuts.items() if name != label for axis in other.axes}
        if extent != rows[label] or not others.isdisjoint(cut.axes):
            fits = False
        elif known is None or known.is_within(cut, layout.mesh_shape):
            cuts[label] = cut
        elif not cut.is_within(known, layout.mesh_shape):
            fits = False
    return fits


def _states(
    operands: Sequence[ArrayLayout], cut_axes: set[int], passes: Passes | None
) -> tuple[dict[int, str], dict[int, States]]:
    """Return the pending reductions of the result, and the states in which the operands must be, by axis."""
    pending: dict[int, str] = {}
    states: dict[int, States] = {}
    for axis in sorted({axis for layout in operands for axis in layout.pending} - cut_axes):
        passed = None if passes is None else passes(tuple(layout.pending.get(axis) for layout in operands))
        if passed is not None:
            pending[axis], states[axis] = passed
    if len({"sum" if op == "avg" else op for op in pending.values()}) > 1:  # the order of the two would matter
        return {}, {}
    return pending, states


def trailing(operand: Any) -> Labels:
    """Return the labels of an operand that is broadcast: its dimensions counted from the last."""
    return tuple(range(-np.ndim(operand), 0))


# ---- What is linear in its operands

_LINEAR = frozenset(("sum", "avg"))


def additive(states: States) -> tuple[str, States] | None:
    """Pass through sums of operands: what replicates is added by one rank alone."""
    found = set(states) - {None}
    if found == {"sum"}:
        return "sum", ("sum",) * len(states)
    return ("avg", states) if found == {"avg"} else None


def linear_in_each(states: States) -> tuple[str, States] | None:
    """Pass through products of operands: at most one factor may be a pending sum."""
    found = [op for op in states if op is not None]
    if len(found) == 1 and found[0] in _LINEAR:
        return found[0], states
    return ("product", states) if len(states) == len(found) and set(found) == {"product"} else None


def linear_in_first(states: States) -> tuple[str, States] | None:
    """Pass through what is linear in its first operand alone."""
    return (states[0], states) if states[0] in _LINEAR and set(states[1:]) <= {None} else None


def idempotent(op: str) -> Passes:
    """Return the rule of the ufunc that `op`, "max" or "min", reduces with."""
    return lambda states: (op, states) if set(states) <= {op, None} else None


def anything(states: States) -> tuple[str, States] | None:
    """Pass through what only moves elements of one operand."""
    (op,) = states
    return None if op is None else (op, states)


def together(states: States) -> tuple[str, States] | None:
    """Pass through what only moves elements of several operands into one array."""
    found = [op for op in dict.fromkeys(states) if op is not None]
    if len(found) != 1:
        return None
    op = found[0]
    # The average, maximum or minimum of what replicates is itself; of a sum or product, one rank has it alone.
    return (op, (op,) * len(states)) if op in ("sum", "product") else (op, states)


def moved_by_others(states: States) -> tuple[str, States] | None:
    """Pass through what only moves elements of its first operand, as the others say."""
    op = states[0]
    return (op, states) if op is not None and set(states[1:]) <= {None} else None
