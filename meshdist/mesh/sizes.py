"""The sizes of axes, as users give them."""

from __future__ import annotations

import operator
from collections.abc import Sequence


def checked_sizes(what: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return `sizes` as integers.

    Args:
        what: The parameter, for messages.
        sizes: As the user gave them.

    Raises:
        ValueError: There are none, or one is below 1.
        TypeError: They are no sequence of integers.

    Example:
        >>> checked_sizes("mesh_shape", [2, 4])
        (2, 4)
    """
    if isinstance(sizes, (str, bytes)) or not hasattr(sizes, "__iter__"):
        raise TypeError(f"{what}: expected a tuple of sizes, such as (2, 4), got {sizes!r}")
    listed = tuple(sizes)
    if not listed:
        raise ValueError(f"{what}: expected at least one axis, got ()")
    for size in listed:
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"{what}: expected integers, got {size!r} ({type(size).__name__}) in {listed}")
        if operator.index(size) < 1:
            raise ValueError(f"{what}: every size must be at least 1, got {size} in {listed}")
    return tuple(operator.index(size) for size in listed)


def part_sizes(what: str, parts: int | Sequence[int], extent: int) -> tuple[int, ...]:
    """Return the sizes of the parts of an axis.

    Args:
        what: What is parted, for messages.
        parts: How many of equal size, or the size of each.
        extent: The size of the axis.

    Raises:
        ValueError: They do not make up the axis, or one is below 1.
        TypeError: They are no integers.

    Example:
        >>> part_sizes("split", 2, 6), part_sizes("split", (1, 5), 6)
        ((3, 3), (1, 5))
    """
    if isinstance(parts, bool) or not hasattr(parts, "__index__"):
        sizes = checked_sizes(what, parts)  # type: ignore[arg-type]
        if sum(sizes) != extent:
            raise ValueError(
                f"{what} has {extent} ranks, and parts of {' + '.join(map(str, sizes))} are {sum(sizes)}; give parts"
                f" whose sum is {extent}"
            )
        return sizes
    count = operator.index(parts)
    if count < 1 or extent % count:
        raise ValueError(
            f"{what} has {extent} ranks, which cannot be parted into {count} of equal size; give a divisor of {extent},"
            " or the size of each part"
        )
    return (extent // count,) * count
