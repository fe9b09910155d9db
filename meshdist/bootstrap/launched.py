"""Whether meshrun started a rank, and as which process: read from what the launchers show in the ranks' store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress

from meshdist.errors import DistError
from meshdist.runtime.rank_text import ranks_text
from meshdist.store import PrefixStore, Store

PREFIX = "meshrun/node/"
"""Of the keys under which a launcher shows its ranks, as `launch.rank_board` describes."""

_MOST_NAMED = 4


def started_by_meshrun(store: Store, ranks: Sequence[int]) -> str:
    """Return that meshrun started these ranks, which have not joined, and where; empty if it did not start them all."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    processes: dict[int, str] = {}
    with suppress(DistError):  # the store may be about to end
        keys = [key for key in store.list_keys() if key.startswith(PREFIX)]
        for node in map(json.loads, store.multi_get(keys) if keys else []):
            processes.update({each["rank"]: f"pid {each['pid']} on {node['host']}" for each in node["ranks"]})
    if not processes.keys() >= {*ranks}:
        return ""
    named = [processes[rank] for rank in ranks[:_MOST_NAMED]] + ["..."] * (len(ranks) > _MOST_NAMED)
    is_one = len(ranks) == 1
    they, have = ("it", "has") if is_one else ("they", "have")
    return (
        f"{ranks_text(ranks)} {'is' if is_one else 'are'} missing: meshrun started {'it' if is_one else 'them'}"
        f" ({', '.join(named)}), but {they} {have} not called init_process_group"
    )
