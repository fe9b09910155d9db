"""What each launcher knows of its ranks, kept in the ranks' store for `meshrun status` and the dashboard."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshdist.bootstrap.launched import PREFIX
from meshdist.errors import DistError
from meshdist.launch.outputs import STDERR, STDOUT, Routing
from meshdist.launch.worker_env import Job
from meshdist.launch.worker_set import Exit
from meshdist.store import PrefixStore, Store
from meshdist.system.processes import describe_status

_LOOK_S = 1.0
_END_TOGETHER_S = 0.2  # the ranks of most jobs end within that time


class RankEntry(NamedTuple):
    """One rank, as its launcher sees it."""

    rank: int
    pid: int
    ended: str = ""  # how its process ended, empty while it runs
    logs: Sequence[str] = ()  # the files of its output


class NodeEntry(NamedTuple):
    """One start of the ranks of one host."""

    node: int
    num_nodes: int
    host: str
    run_id: str
    command: str
    world_size: int
    num_restarts: int
    num_failed_starts: int  # those of them that count; the others are changes of hosts
    max_restarts: int
    started_s: float  # seconds since 1970
    endpoint: str  # where the launchers meet; empty for one host
    ranks: Mapping[int, RankEntry]

    def encode(self) -> str:
        return json.dumps({**self._asdict(), "ranks": [rank._asdict() for rank in self.ranks.values()]})

    @classmethod
    def decode(cls, text: bytes) -> NodeEntry:
        fields = json.loads(text)
        ranks = [RankEntry(**rank) for rank in fields["ranks"]]
        return cls(**{**fields, "ranks": {rank.rank: rank for rank in ranks}})


class RankBoard:
    """Shows one start of the ranks of this host in their store."""

    def __init__(self, store: Store, job: Job, host: str, command: Sequence[str], endpoint: str) -> None:
        self._store: Store | None = store
        # Why ranks that have ended well will not come to a world, by rank.
        self._succeeded: dict[int, str] = {}
        self._next_look_s = 0.0
        self._entry = NodeEntry(
            job.node,
            job.num_nodes,
            host,
            job.run_id,
            " ".join(command),
            job.world_size,
            job.num_restarts,
            job.num_failed_starts,
            job.max_restarts,
            time.time(),
            endpoint,
            {},
        )

    def start(self, pids: Mapping[int, int], routing: Routing, first_rank: int) -> None:
        """Show the ranks that have been started, with these pids."""
        ranks = {}
        for rank, pid in pids.items():
            streams = [stream for stream in (STDOUT, STDERR) if routing.is_in_file(rank - first_rank, stream)]
            paths = [os.path.abspath(routing.path(rank, each, self._entry.num_restarts)) for each in streams]
            ranks[rank] = RankEntry(rank, pid, logs=paths)
        self._show(ranks)

    def tell_waiting_ranks(self) -> None:
        """End the start of a world that waits for a rank which has ended; looks for that once a second at most.

        A rank that has failed ends the job anyway.
        """
        now_s = time.monotonic()
        if self._store is None or not self._succeeded or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_S
        from meshdist.bootstrap.join import object_for_absent

        part = PrefixStore(f"worker/attempt_{self._entry.num_restarts}", self._store)
        try:
            object_for_absent(part, self._entry.world_size, self._succeeded)
        except DistError:
            self._store = None

    def note_exit(self, exit: Exit, was_ended: bool) -> None:
        """Show that a rank has ended; `was_ended` by the launcher, as the job ends."""
        if exit.status == 0:
            who = f"rank {exit.rank} (pid {exit.pid} on {self._entry.host})"
            self._next_look_s = max(self._next_look_s, time.monotonic() + _END_TOGETHER_S)
            self._succeeded[exit.rank] = f"{who} has ended, with exit status 0, without calling init_process_group"
        ended = "succeeded" if exit.status == 0 else "terminated" if was_ended else describe_status(exit.status)
        self._show({**self._entry.ranks, exit.rank: self._entry.ranks[exit.rank]._replace(ended=ended)})

    def note_first_failure(self, rank: int) -> None:
        """Show which of several ranks that have failed, or were terminated, was the first."""
        entry = self._entry.ranks[rank]
        if len([one for one in self._entry.ranks.values() if one.ended not in ("", "succeeded")]) > 1:
            self._show({**self._entry.ranks, rank: entry._replace(ended=f"failed first: {entry.ended}")})

    def _show(self, ranks: Mapping[int, RankEntry]) -> None:
        self._entry = self._entry._replace(ranks=ranks)
        if self._store is None:
            return
        try:
            self._store.set(f"{PREFIX}{self._entry.node}", self._entry.encode())
        except DistError:
            self._store = None  # the store has ended, which ends the job as well


def entries(store: Store) -> list[NodeEntry]:
    """Return what the launchers show in a store, by host; empty for ranks without meshrun."""
    keys = [key for key in store.list_keys() if key.startswith(PREFIX)]
    found = [NodeEntry.decode(text) for text in (store.multi_get(keys) if keys else [])]
    return sorted(found, key=lambda entry: entry.node)
