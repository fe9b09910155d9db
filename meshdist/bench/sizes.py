"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_WRITTEN = re.compile(r"(\d+) *([KMGT]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return a size in bytes: `8`, `64K`, `64KiB` and `64kb` are known spellings, of powers of 1024 all.

    Raises:
        ValueError: It is none, or 0.

    Example:
        >>> parse_size("64K"), parse_size("1GiB"), parse_size("8 B")
        (65536, 1073741824, 8)
    """
    match = _WRITTEN.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"expected a size above 0, such as 8, 64K, 16M or 1G, got {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]


def series(begin: int, end: int, factor: float) -> list[int]:
    """Return sizes from `begin` to `end`, each `factor` times the one before; `end` is the last.

    Example:
        >>> series(8, 100, 2)
        [8, 16, 32, 64, 100]
    """
    sizes, size = [], float(begin)
    while round(size) < end:
        sizes.append(round(size))
        size *= factor
    return [*dict.fromkeys(sizes), end]


def show_size(num_bytes: int) -> str:
    """Return a size in the largest unit that divides it.

    Example:
        >>> show_size(65536), show_size(1536), show_size(12)
        ('64 KiB', '1536 B', '12 B')
    """
    for unit, unit_bytes in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes and num_bytes % unit_bytes == 0:
            return f"{num_bytes // unit_bytes} {unit}"
    return f"{num_bytes} B"
