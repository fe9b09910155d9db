"""The state of a job for `meshrun status`: what each rank does, from what ranks and launchers show in the store."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

from meshdist.debug.attach import Found, found_in
from meshdist.debug.hang_report import activity
from meshdist.debug.wait_graph import who_waits
from meshdist.errors import DistError
from meshdist.launch.rank_board import NodeEntry, entries
from meshdist.runtime.rank_text import ranks_text
from meshdist.store import Store
from meshdist.system.plurals import counted
from meshdist.system.terminal import fold

ANSWER_S = 1.0
_HEAD = ("rank", "host", "pid", "state", "for", "call, or the last one")
_RIGHT = (0, 2, 4)  # columns of numbers
_FOLDED = (3, 5)  # columns of words
_LEAST_FOLDED = 16
_GAP = "  "


class RankStatus(NamedTuple):
    """One rank."""

    rank: int
    host: str
    pid: str
    state: str
    seconds: float | None = None  # how long it has been in this state; None if unknown
    call: str = ""  # the call in which it waits, or its last one

    def cells(self) -> tuple[str, ...]:
        """Return the texts of the columns of a table."""
        lasts = "" if self.seconds is None else duration(self.seconds)
        return str(self.rank), self.host, self.pid, self.state, lasts, self.call


class JobStatus(NamedTuple):
    """One job."""

    nodes: Sequence[NodeEntry]  # by host; empty for ranks without meshrun
    ranks: Sequence[RankStatus]
    address: str  # of the ranks' store

    @property
    def run_id(self) -> str:
        return self.nodes[0].run_id if self.nodes else ""

    def names(self) -> set[str]:
        """Return by what the job can be asked for."""
        return {self.address, self.run_id, *(node.endpoint for node in self.nodes)} - {""}

    def headline(self) -> str:
        """Return the job in one line."""
        num_ranks = counted(len(self.ranks), "rank")
        if not self.nodes:
            return f"job at {self.address}: {num_ranks}, not started by meshrun"
        first = self.nodes[0]
        lasts = duration(time.time() - min(node.started_s for node in self.nodes))
        hosts = counted(first.num_nodes, "host")
        return f"job {first.run_id}: {num_ranks} on {hosts}, {_restarts(first)}, for {lasts}: {first.command}"

    def lines(self, width: int = 0) -> list[str]:
        """Return the job as lines of plain text: headline, table of ranks, files of output.

        Lines that are wider than `width` are folded; in the table, within its columns of words. 0 folds none.
        """
        rows = [_HEAD, *(rank.cells() for rank in self.ranks)]
        widths = _fitting([max(map(len, column)) for column in zip(*rows, strict=True)], width)
        table = [line for row in rows for line in _folded(row, widths)]
        headline, *logs = (fold(line, width).split("\n") for line in (self.headline(), *self.logs()))
        return [*headline, *table, *chain.from_iterable(logs)]

    def logs(self) -> list[str]:
        """Return where the output of the ranks is, in lines; N stands for the rank."""
        alike: dict[str, list[int]] = {}
        for entry in (entry for node in self.nodes for entry in node.ranks.values() if entry.logs):
            paths = [os.path.split(path) for path in entry.logs]
            names = (name.replace(f"rank{entry.rank}.", "rankN.", 1) for _, name in paths)
            alike.setdefault(f"{' and '.join(names)} in {paths[0][0]}", []).append(entry.rank)
        return [f"output of {ranks_text(sorted(ranks))}: {where}" for where, ranks in alike.items()]


def _restarts(node: NodeEntry) -> str:
    number, most = node.num_failed_starts, node.max_restarts
    restarts = f"restart {number} of at most {most}" if number else "no restarts"
    if most and not number:
        restarts += f" yet, at most {most}"
    changes = node.num_restarts - number
    return restarts + (f", hosts changed {counted(changes, 'time')}" if changes else "")


def _fitting(widths: list[int], width: int) -> list[int]:
    """Return the widths of columns with which a row fits into `width` characters, as far as those of words allow it."""
    fitting = list(widths)
    while width and sum(fitting) + len(_GAP) * (len(fitting) - 1) > width:
        widest = max(_FOLDED, key=lambda number: fitting[number])
        if fitting[widest] <= _LEAST_FOLDED:
            return widths  # the terminal's own folds read better
        fitting[widest] -= 1
    return fitting


def _folded(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a row of the table."""
    parts = [fold(cell, width, hanging=0).split("\n") for cell, width in zip(row, widths, strict=True)]
    for cells in zip_longest(*parts, fillvalue=""):
        aligned = (
            cell.rjust(width) if number in _RIGHT else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        yield _GAP.join(aligned).rstrip()


def status_of(store: Store, address: str, budget_s: float = ANSWER_S) -> JobStatus:
    """Return the state of the job whose ranks' store this is; wait at most `budget_s` for the answers of ranks.

    Raises:
        DistError: The store is gone, or no rank and no launcher has been there.
    """
    nodes = entries(store)
    try:
        found = found_in(store, address, budget_s)
    except DistError:
        if not nodes:
            raise
        found = Found({}, {}, 0)  # no rank has joined yet
    return JobStatus(nodes, _ranks(nodes, found), address)


def _ranks(nodes: Sequence[NodeEntry], found: Found) -> list[RankStatus]:
    now_s = time.time()
    waits = who_waits(found.states, found.gone)
    started = {} if found.joined_as else {rank: (node, entry) for node in nodes for rank, entry in node.ranks.items()}
    statuses = []
    for rank in sorted({*started, *range(found.world_size)}):
        state = found.states.get(rank)
        host = state.host if state is not None else started[rank][0].host if rank in started else "?"
        pid = str(state.pid if state is not None else started[rank][1].pid if rank in started else "?")
        ended = started[rank][1].ended if rank in started else ""
        call = state.calls[-1].words if state is not None and state.calls else ""
        if ended or (rank in found.gone):
            statuses.append(RankStatus(rank, host, pid, ended or found.gone[rank], None, call))
        elif state is not None:
            doing = activity(waits, state, now_s)
            call = doing.call.words if doing.call is not None else "none yet"
            statuses.append(RankStatus(rank, host, pid, doing.words, doing.seconds, call))
        else:
            # Ranks of other hosts are asked through the store alone, which knows long waits.
            words = "running"
            if found.waiting is not None and rank in found.waiting:
                words = "waiting in init_process_group"
            elif found.waiting is not None or not found.world_size:
                words = "running, before init_process_group"
            statuses.append(RankStatus(rank, host, pid, words))
    return statuses


def duration(seconds: float) -> str:
    """Return a time for people: 3.2 s, 12 min, 3.1 h."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
