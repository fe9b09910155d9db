"""Numbers with three significant digits, for tables."""

from __future__ import annotations


def three_digits(number: float) -> str:
    """Return a number with three significant digits, zeros at the end among them, and all digits before the point."""
    return f"{number:.0f}" if number >= 999.5 else f"{number:#.3g}".rstrip(".")
