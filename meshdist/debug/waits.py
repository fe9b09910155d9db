"""Who waits for whom: the states of ranks as a graph, and what in it is the cause of a hang.

A rank that is in call number s on a group waits for each rank of the group that has not made call s on it; one that
receives waits for the sender, one that sends for the receiver. Ranks that are waited for and wait for nobody are the
cause: they are in their own code, or gone. Where there are none, the ranks wait for each other in a circle. Whose time
is over first, and gives up, has been part of it: it still counts for those who have waited together with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshdist.debug.states import CallSeen, RankSeen

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Waits:
    """Who waits for whom.

    Attributes:
        graph: A networkx.DiGraph of global ranks; the edge from a waiting rank to an awaited one has the attribute
            `call`, a CallSeen.
        states: What is known of the ranks that said something.
        gone: What became of those that are gone. Of one that gave up before, there is a last state as well.
        cycle: Ranks that wait for each other, each for the next and the last for the first; empty where none do.
        absent: The ranks that are waited for and wait for nobody: they are in code of their own, or gone.
    """

    graph: nx.DiGraph[int]
    states: Mapping[int, RankSeen]
    gone: Mapping[int, str]
    cycle: tuple[int, ...] = ()
    absent: tuple[int, ...] = field(default=())


def who_waits(states: Mapping[int, RankSeen], gone: Mapping[int, str] | None = None) -> Waits:
    """Return who waits for whom.

    Args:
        states: By rank; ranks that said nothing are left out.
        gone: What became of ranks that are known to be gone, by rank.
    """
    import networkx as nx

    gone = gone or {}
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(sorted({*states, *gone}))
    for rank, state in states.items():
        if rank in gone and not state.outlasts:
            continue
        for call in state.open_calls:
            for other in awaited(call, state, states, gone):
                # The oldest call that it waits for this rank in: the later ones cannot come before.
                if not graph.has_edge(rank, other):
                    graph.add_edge(rank, other, call=call)
    # A rank that waits for its async calls alone, in code of its own, is at liberty.
    free = {rank for rank in graph if not _waits(rank, graph, states)}
    idle = sorted(rank for rank in graph if graph.in_degree(rank) and (rank in free or not graph.out_degree(rank)))
    # Ranks that said nothing may be waiting as well; where others are known to be absent, it is these.
    absent = tuple(rank for rank in idle if rank in states or rank in gone) or tuple(idle)
    return Waits(graph, states, gone, _cycle(graph.subgraph(set(graph) - free)), absent)


def awaited(call: CallSeen, state: RankSeen, states: Mapping[int, RankSeen], gone: Mapping[int, str]) -> list[int]:
    """Return the global ranks that have to do something for an open call of one rank to end."""
    group = state.groups.get(call.group)
    if group is None:
        return []
    others = [rank for rank in group.ranks if rank != state.rank]
    if call.is_message:
        return others if call.peer is None else [group.ranks[call.peer]]
    absent = []
    for rank in others:
        other = states.get(rank)
        if other is None or (rank in gone and not other.outlasts) or not _has_come(other, call):
            absent.append(rank)
    return absent


def _waits(rank: int, graph: nx.DiGraph[int], states: Mapping[int, RankSeen]) -> bool:
    state = states.get(rank)
    if state is None:
        return False
    gave_up_s = state.gave_up_s
    if gave_up_s is None:
        return state.in_call and not state.is_last
    # Others may have begun to wait for it only when it was in its own code again.
    return any(call.created_s <= gave_up_s for _, _, call in graph.in_edges(rank, data="call"))


def _has_come(other: RankSeen, call: CallSeen) -> bool:
    if other.calls_on(call.group) < call.sequence:
        return False
    # An async call that stands behind others has been made, but has not come.
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
    """Where two ranks stopped doing the same.

    Attributes:
        before: The last call that both made; None where they agree in none.
        mine, theirs: The first ones that differ; None where a rank has made no further call.
    """

    before: CallSeen | None
    mine: CallSeen | None
    theirs: CallSeen | None


def first_difference(one: RankSeen, other: RankSeen) -> Difference | None:
    """Return where the collectives of two ranks, on the groups that both are in, differ for the first time.

    Records are of the last calls only, so calls that one of them cannot show are left out.

    Returns:
        None where they do not differ.
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


def _common(state: RankSeen, other: RankSeen) -> list[CallSeen]:
    """Return the collectives of a rank on groups of both, without those that the other made and cannot show."""
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
