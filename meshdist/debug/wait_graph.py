"""The graph of who waits for whom, from the states of ranks, and the cause of a hang in it.

A rank in call number s on a group waits for each rank of the group that has not made call s on it; a receiver waits for
its sender, and a sender for its receiver. Awaited ranks that wait for no rank are the cause: they are in their own
code, or gone. Without such ranks, there is a cycle of waiting ranks. A rank whose timeout came first has been part of
the cycle: its last state still counts for the ranks that waited together with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshdist.debug.states import CallSeen, RankSnapshot

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Waits:
    """Who waits for whom."""

    # Global ranks; the edge from a waiting rank to an awaited one has the attribute `call`, a CallSeen.
    graph: nx.DiGraph[int]
    states: Mapping[int, RankSnapshot]
    gone: Mapping[int, str]  # what became of ranks that are gone; those whose wait failed before also have a state
    cycle: tuple[int, ...] = ()  # ranks that each wait for the next, and the last for the first; empty without a cycle
    deadlocked: frozenset[int] = frozenset()  # those, and all that wait for them and are waited for by them
    # The awaited ranks that wait for no rank: they are in their own code, or gone.
    absent: tuple[int, ...] = field(default=())


def who_waits(states: Mapping[int, RankSnapshot], gone: Mapping[int, str] | None = None) -> Waits:
    """Build the graph from the known states and from what became of the ranks that are gone."""
    import networkx as nx

    gone = gone or {}
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(sorted({*states, *gone}))
    for rank, state in states.items():
        if rank in gone and not state.outlasts:
            continue
        for call in state.open_calls:
            for other in awaited(call, state, states, gone):
                # Keep the oldest call in which it waits for this rank: the later ones come after it.
                if not graph.has_edge(rank, other):
                    graph.add_edge(rank, other, call=call)
    # A rank with open async calls that is in its own code is not waiting.
    free = {rank for rank in graph if not _waits(rank, graph, states)}
    idle = sorted(rank for rank in graph if graph.in_degree(rank) and (rank in free or not graph.out_degree(rank)))
    # Ranks without a state may be waiting too: prefer those that are known to be absent.
    absent = tuple(rank for rank in idle if rank in states or rank in gone) or tuple(idle)
    waiting = graph.subgraph(set(graph) - free)
    cycle = _cycle(waiting)
    deadlocked = next((found for found in nx.strongly_connected_components(waiting) if {*cycle} & found), ())
    return Waits(graph, states, gone, cycle, frozenset(deadlocked), absent)


def awaited(
    call: CallSeen, state: RankSnapshot, states: Mapping[int, RankSnapshot], gone: Mapping[int, str]
) -> list[int]:
    """Return the global ranks that an open call of one rank waits for."""
    group = state.groups.get(call.group)
    if group is None:
        return []
    others = [rank for rank in group.ranks if rank != state.rank]
    if call.is_message:
        peers = others if call.peer is None else [group.ranks[call.peer]]
        return [] if call.was_refused else [rank for rank in peers if not _has_refused(states.get(rank), call)]
    absent = []
    for rank in others:
        other = states.get(rank)
        if other is None or (rank in gone and not other.outlasts):
            has_started = rank in state.present
        else:
            has_started = _has_started(other, call)
        if not has_started:
            absent.append(rank)
    return absent


def _has_refused(other: RankSnapshot | None, call: CallSeen) -> bool:
    """Return whether the last call of a rank is the other side of a message, and failed for it."""
    last = other.calls[-1] if other is not None and other.calls else None
    return last is not None and last.was_refused and last.group == call.group and last.is_receipt != call.is_receipt


def _waits(rank: int, graph: nx.DiGraph[int], states: Mapping[int, RankSnapshot]) -> bool:
    state = states.get(rank)
    if state is None:
        return False
    gave_up_s = state.gave_up_s
    if gave_up_s is None:
        return state.in_call and not state.is_last
    # It counts as waiting only for ranks that began to wait before it gave up.
    return any(call.created_s <= gave_up_s for _, _, call in graph.in_edges(rank, data="call"))


def _has_started(other: RankSnapshot, call: CallSeen) -> bool:
    if other.calls_on(call.group) < call.sequence:
        return False
    # A queued async call has been made, but has not started.
    return not any(
        theirs.state == "queued" and theirs.group == call.group and theirs.sequence == call.sequence
        for theirs in other.calls
        if not theirs.is_message
    )


def _cycle(graph: nx.DiGraph[int]) -> tuple[int, ...]:
    import networkx as nx

    try:
        return tuple(edge[0] for edge in nx.find_cycle(graph))
    except nx.NetworkXNoCycle:
        return ()


@dataclass(frozen=True)
class Difference:
    """The first difference between the calls of two ranks."""

    before: CallSeen | None  # the last common call; None where there is none
    # The first calls that differ; None where a rank has made no further call.
    mine: CallSeen | None
    theirs: CallSeen | None


def first_difference(one: RankSnapshot, other: RankSnapshot) -> Difference | None:
    """Return where the collectives of two ranks on their common groups differ for the first time, or None.

    Records cover only the last calls, so calls that one of the ranks no longer shows are left out.
    """
    mine, theirs = _common(one, other), _common(other, one)
    before = None
    for number in range(max(len(mine), len(theirs))):
        left = mine[number] if number < len(mine) else None
        right = theirs[number] if number < len(theirs) else None
        if left is None or right is None or _key(left) != _key(right):
            return Difference(before, left, right)
        before = left
    return None


def _common(state: RankSnapshot, other: RankSnapshot) -> list[CallSeen]:
    """Return the collectives of a rank on common groups, without those that the other made and no longer shows."""
    shown = {(call.group, call.sequence) for call in other.calls if not call.is_message}
    return [
        call
        for call in state.calls
        if not call.is_message
        and (
            call.group in other.groups or (call.group in state.groups and other.rank in state.groups[call.group].ranks)
        )
        and ((call.group, call.sequence) in shown or call.sequence > other.calls_on(call.group))
    ]


def _key(call: CallSeen) -> tuple[str, int, str]:
    return call.group, call.sequence, call.text


def kind_of(waits: Waits, rank: int) -> str:
    """Return what a rank is doing, as one of the words that a drawing tells apart."""
    state = waits.states.get(rank)
    if state is not None and state.raised is not None:
        return "raised"
    if rank in waits.gone:
        return "gone"
    if rank in waits.absent:
        return "absent"
    if rank in waits.deadlocked:
        return "cycle"
    if rank in waits.graph and waits.graph.out_degree(rank):
        return "waits"
    if state is None:
        return "unknown"
    if failed_call(state) is not None:
        return "failed"
    return "begins" if begins_a_call(state) else "computes"


def begins_a_call(state: RankSnapshot) -> bool:
    """Return whether a rank is in a call without a record, such as a first one that still sets up its group."""
    return state.in_call and not state.is_last and not state.open_calls


def failed_call(state: RankSnapshot) -> CallSeen | None:
    """Return the last call of a rank if it has failed, and the rank has not gone on since."""
    calls = state.open_calls
    return None if not calls or any(call.is_open for call in calls) else calls[-1]
