"""Numbers with their nouns, for messages."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number and its noun; the plural is the noun with an s if it is not given.

    Example:
        >>> counted(1, "rank"), counted(0, "rank"), counted(2, "axis", "axes")
        ('1 rank', '0 ranks', '2 axes')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
