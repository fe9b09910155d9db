"""States of ranks as their flight recorders would write them, made up for tests."""

from __future__ import annotations

from typing import Any

from meshdist.debug.states import RankSnapshot, parse_state

NOW_S = 1_700_000_000.0


def record(
    group: str, sequence: int, at_s: float, text: str = "barrier()", state: str = "completed", **more: Any
) -> dict[str, Any]:
    """Return the record of a call that was made `at_s` seconds before now."""
    name = text.partition("(")[0]
    return {
        "group": group,
        "label": group,
        "sequence": sequence,
        "call": name,
        "kind": "message" if name in ("send", "recv", "isend", "irecv") else "collective",
        "text": text,
        "sent": [],
        "received": [["float64", [4]]] if name in ("recv", "irecv") else [],
        "root": None,
        "created_s": NOW_S - at_s,
        "completed_s": NOW_S - at_s + 0.1 if state in ("completed", "failed") else None,
        "state": state,
        "site": f"/home/me/train.py:{10 * sequence}",
        "function": "main",
        **more,
    }


def waiting(group: str, sequence: int, at_s: float, text: str = "barrier()", **more: Any) -> dict[str, Any]:
    """Return the record of a call that is not done."""
    return record(group, sequence, at_s, text, "started", **more)


def data(
    rank: int, records: list[dict[str, Any]], groups: dict[str, list[int]], *, in_call: bool = True, size: int = 4
) -> dict[str, Any]:
    """Return the state of a rank that is in groups of these ranks."""
    calls = {
        name: [r["sequence"] for r in records if r["group"] == name and r["kind"] == "collective"] for name in groups
    }
    return {
        "format": 1,
        "rank": rank,
        "world_size": size,
        "host": "node1",
        "pid": 1000 + rank,
        "time_s": NOW_S,
        "reason": "a test",
        "groups": {
            name: {"label": name, "ranks": ranks, "calls": max(calls[name], default=0)}
            for name, ranks in groups.items()
        },
        "records": records,
        "stack": ["/home/me/train.py:3 in <module>", "/home/me/data.py:57 in load"],
        "place": "/home/me/data.py:57 in load",
        "in_call": in_call,
    }


def seen(*args: Any, **kwargs: Any) -> RankSnapshot:
    """Return `data(...)` as it is read back."""
    return parse_state(data(*args, **kwargs), "a test")


def by_rank(*states: RankSnapshot) -> dict[int, RankSnapshot]:
    return {state.rank: state for state in states}
