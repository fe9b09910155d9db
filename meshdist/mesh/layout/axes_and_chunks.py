"""Check the names and sizes of mesh axes; the sizes of parts and of chunks."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from meshdist.errors import UnknownAxisError
from meshdist.system.plurals import counted


def unknown_axis(axis: int | str, described: str, known: Sequence[str]) -> UnknownAxisError:
    """Return the error about a name, or an index, of none of the `known` axes of a mesh, `described` in words."""
    meant: list[str] = []
    if isinstance(axis, str):
        from difflib import get_close_matches

        # Two letters that are swapped make no close match.
        swapped = [name for name in known if sorted(name.lower()) == sorted(axis.lower())]
        meant = swapped or get_close_matches(axis.lower(), known, n=1)
        names = [name.strip() for name in axis.split(",")]
        if len(names) > 1 and known and all(name in known for name in names):
            import json

            listed = ", ".join(map(json.dumps, names))
            return UnknownAxisError(f"unknown axis {axis!r}: write the names one by one: mesh[{listed}]")
    hint = f"; did you mean {meant[0]!r}?" if meant else ""
    return UnknownAxisError(f"unknown axis {axis!r}: {described_axes(described, known)}{hint}")


def described_axes(described: str, known: Sequence[str]) -> str:
    """Return a sentence about a mesh, `described` in words, and the names of its axes."""
    return f"this mesh is {described}, its {'axis is' if len(known) == 1 else 'axes are'} {', '.join(map(repr, known))}"


def checked_names(names: Sequence[str], shape: tuple[int, ...]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise TypeError(f"mesh_dim_names: expected a tuple of names, got the string {names!r}; write ({names!r},)")
    checked = tuple(names)
    for name in checked:
        if not isinstance(name, str):
            raise TypeError(f"mesh_dim_names: expected strings, got {name!r} ({type(name).__name__}) in {checked}")
        if not name:
            raise ValueError(f"mesh_dim_names: a name must not be empty, got {checked}")
    if len(checked) != len(shape):
        raise ValueError(
            f"mesh_dim_names: expected {counted(len(shape), 'name')}, one per axis of the mesh of shape {shape},"
            f" got {len(checked)}: {checked}"
        )
    repeated = sorted({name for name in checked if checked.count(name) > 1})
    if repeated:
        raise ValueError(f"mesh_dim_names: a name can be used only once, but {repeated[0]!r} is repeated in {checked}")
    return checked


def checked_sizes(what: str, sizes: Sequence[int], num_ranks: int | None = None) -> tuple[int, ...]:
    """Return sizes as a tuple of integers, each at least 1; of `num_ranks` ranks, the error infers a size of -1."""
    if isinstance(sizes, (str, bytes)) or not hasattr(sizes, "__iter__"):
        raise TypeError(f"{what}: expected a tuple of sizes, such as (2, 4), got {sizes!r}")
    if isinstance(sizes, Mapping):
        names = f"{tuple(sizes.values())}, and the names as mesh_dim_names={tuple(sizes)}"
        raise TypeError(f"{what}: expected a tuple of sizes, got a dict; pass the sizes, {names}")
    listed = tuple(sizes)
    if not listed:
        raise ValueError(f"{what}: expected at least one axis, got ()")
    for size in listed:
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"{what}: expected integers, got {size!r} ({type(size).__name__}) in {listed}")
        if operator.index(size) < 1:
            hint = _inferred(listed, num_ranks)
            raise ValueError(f"{what}: every size must be at least 1, got {size} in {listed}{hint}")
    return tuple(operator.index(size) for size in listed)


def _inferred(sizes: tuple[Any, ...], num_ranks: int | None) -> str:
    """Return what to write for the only -1 of `sizes`; empty if the other sizes do not divide the number of ranks."""
    others = [size for size in sizes if size != -1]
    if num_ranks is None or len(others) != len(sizes) - 1 or not all(hasattr(size, "__index__") for size in others):
        return ""
    known = math.prod(map(operator.index, others))
    if min(map(operator.index, others), default=1) < 1 or num_ranks % known:
        return ""
    shape = tuple(num_ranks // known if size == -1 else operator.index(size) for size in sizes)
    return f"; with {counted(num_ranks, 'rank')}, write {shape}"


def part_sizes(what: str, parts: int | Sequence[int], extent: int) -> tuple[int, ...]:
    """Return the sizes of the parts of an axis of `extent` ranks; `what` names the axis in messages.

    `parts` is the number of equal parts, or the size of each part.
    """
    if isinstance(parts, bool) or not hasattr(parts, "__index__"):
        sizes = checked_sizes(what, parts)  # type: ignore[arg-type]
        if sum(sizes) != extent:
            raise ValueError(
                f"{what} has {counted(extent, 'rank')}, and parts of {' + '.join(map(str, sizes))} are {sum(sizes)};"
                f" pass parts whose sum is {extent}"
            )
        return sizes
    count = operator.index(parts)
    if count < 1 or extent % count:
        raise ValueError(
            f"{what} has {counted(extent, 'rank')}, which cannot be parted into {count} of equal size; pass a divisor"
            f" of {extent}, or the size of each part"
        )
    return (extent // count,) * count


def chunk_sizes(rows: int, parts: int) -> tuple[int, ...]:
    """Return the rows of `parts` blocks as `torch.chunk` cuts them: ceil(rows / parts), the last ones fewer or none."""
    chunk = -(-rows // parts)
    return tuple(max(0, min(chunk, rows - at * chunk)) for at in range(parts))
