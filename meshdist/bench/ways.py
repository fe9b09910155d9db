"""`python -m meshdist.bench --tune`: have the plans measure their ways, and show what was chosen."""

from __future__ import annotations

from collections.abc import Iterator

import meshdist as dist
from meshdist.backends.base import Choice
from meshdist.bench.operations import OPERATIONS, Setting, arrays
from meshdist.bench.results import show_digits, show_size
from meshdist.groups.world import current_world

# More calls than any kind of call has trials.
_CALLS = 32


def tune(name: str, num_bytes: int, setting: Setting) -> list[Choice]:
    """Call one operation at one size until its way is chosen; return the choices that are new. All ranks call it."""
    backend = current_world().default_group.usable_backend("bench")
    before = {(choice.kind, choice.most_bytes) for choice in backend.choices() if choice.chosen is not None}
    give, take = arrays(OPERATIONS[name], num_bytes, setting)
    call = OPERATIONS[name].prepare(setting, give, take)
    give.fill(0)
    take.fill(0)
    for _ in range(_CALLS):
        call()
    dist.barrier()
    return [
        choice
        for choice in backend.choices()
        if choice.chosen is not None and len(choice.ways) > 1 and (choice.kind, choice.most_bytes) not in before
    ]


def lines(choice: Choice) -> Iterator[str]:
    """Return the rows of the table for one kind of call: its ways, the fastest first, and which was chosen."""
    chosen = None if choice.chosen is None else choice.ways[choice.chosen]
    size = show_size(choice.most_bytes)
    if not choice.seconds:
        yield _row(size, "", f"{chosen} (remembered)")
    for way, seconds in sorted(choice.seconds.items(), key=lambda item: item[1]):
        remarks = ["chosen"] * (way == chosen) + ["first guess"] * (way == choice.ways[0])
        yield _row(size, show_digits(1e6 * seconds), f"{way} ({', '.join(remarks)})" if remarks else way)
        size = ""


def head(kind: str) -> str:
    """Return the head of the table of one kind of call."""
    return f"{kind}\n{_row('up to', 'us', 'way')}"


def _row(size: str, micros: str, way: str) -> str:
    return f"{size:>10}  {micros:>9}  {way}"
