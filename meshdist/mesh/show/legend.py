"""What the legends of all drawings of a mesh have in common."""

from __future__ import annotations

from string import ascii_lowercase

from meshdist.mesh.show.colours import NUM_COLOURS
from meshdist.mesh.show.grid import Grid

# Stands where rows or columns are left out.
CUT = "…"
MOST_NAMED = 12


def mark(number: int) -> str:
    """Return the letters of a host: a to z, then aa, ab and on.

    Example:
        >>> mark(0), mark(25), mark(26), mark(701), mark(702)
        ('a', 'z', 'aa', 'zz', 'aaa')
    """
    before, last = divmod(number, len(ascii_lowercase))
    return (mark(before - 1) if before else "") + ascii_lowercase[last]


def has_letters(grid: Grid) -> bool:
    """Return whether coloured drawings have the letters of hosts as well: where there are more than colours."""
    return grid.axis is None and len(grid.hosts) > NUM_COLOURS


def legend_of_hosts(grid: Grid) -> tuple[list[str], str]:
    """Return the first of the hosts that are seen, each with its number of ranks, and how many more the mesh has."""
    named = [f"{name} ({count})" for name, count in grid.hosts[:MOST_NAMED]]
    left = grid.num_hosts - len(named)
    return named, f"and {left:,} more" if left else ""
