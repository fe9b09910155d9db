"""When two outcomes agree."""

from __future__ import annotations

from typing import Any

from both_sides import Close, Outcomes, Raised

_ARGUMENT = {"ValueError", "TypeError"}
# Classes with which torch says anything, arguments that Gloo does not take among it.
_UNSPECIFIC = {"RuntimeError", "AssertionError", "IndexError", "NotImplementedError"}
_OURS = {*_ARGUMENT, "DistError"}


def agree(ours: Any, theirs: Any) -> bool:
    """Return whether an outcome of meshdist is that of torch: the same value, or an error of the same class.

    An error of meshdist may be of a class that derives from torch's. ValueError and TypeError count as one class: an
    argument is wrong. Where torch raises a class that says nothing, any error of meshdist's own agrees.
    """
    if isinstance(ours, Raised) and isinstance(theirs, Raised):
        expected = {theirs.kind} | (_ARGUMENT if theirs.kind in _ARGUMENT else set())
        return bool(set(ours.kinds) & (_OURS | expected if theirs.kind in _UNSPECIFIC else expected))
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, Close):
        return ours.agrees(theirs)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(agree, ours, theirs))
    return bool(ours == theirs)


def disagreements(ours: list[Outcomes], theirs: list[Outcomes]) -> dict[str, str]:
    """Return, for each label whose outcome differs on some rank, the two outcomes of the first such rank."""
    found: dict[str, str] = {}
    for rank, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        for label in dict.fromkeys((*its, *mine)):
            here, there = mine.get(label, "no such case"), its.get(label, "no such case")
            if _is_missing(here) or _is_missing(there):
                continue  # only what both have is compared
            if not agree(here, there):
                words = f"rank {rank} of {len(ours)}\n    meshdist: {here!r:.300}\n    torch:    {there!r:.300}"
                found.setdefault(label, words)
    return found


def _is_missing(outcome: Any) -> bool:
    return isinstance(outcome, Raised) and outcome.kind == "NotHereError"
