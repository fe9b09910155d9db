"""Describe who waits for whom: what each rank does, since when, at which line, and the cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from pathlib import PurePath
from typing import NamedTuple

from meshdist.debug.blocked_rank import advice_on_sends
from meshdist.debug.dump import MOST_OLD_S
from meshdist.debug.states import CallSeen, RankSnapshot
from meshdist.debug.wait_graph import Waits, awaited, begins_a_call, first_difference
from meshdist.runtime.rank_text import ranks_text
from meshdist.system.plurals import counted

_MOST_LINES = 8
_MOST_RANKS = 8
_MOST_STACKS, _MOST_FRAMES = 2, 5
# How many of the calls of a wait_any are named.
_MOST_AWAITED = 4
# By whether it is of one rank.
_FAILED = {True: ", and its call failed", False: ", and their calls failed"}


def hang_report(
    waits: Waits,
    world_size: int,
    *,
    now_s: float | None = None,
    are_files: bool = False,
    tells_differences: bool = True,
) -> list[str]:
    """Return lines that describe the cause of a hang, what the ranks do, and what they wait for.

    Ages are those at `now_s`, in seconds since 1970, or at the time of each rank's state where it is None. The clocks
    of hosts differ and may jump: a state is taken to be at most 10 s old. With `are_files`, the states are those of
    files: nothing is known of a rank without one, and the job has ended, or will have when the report is read. Without
    `tells_differences`, the lines leave out where the calls of ranks begin to differ, which is told elsewhere.
    """
    parts: dict[_Doing, list[RankSnapshot]] = {}
    for _, state in sorted(waits.states.items()):
        if state.rank not in waits.gone or state.outlasts:
            parts.setdefault(_doing(state, _awaited_by(waits, state), are_files=are_files), []).append(state)
    alike = sorted(parts.items(), key=lambda part: part[1][0].rank)
    shown = {state.rank for _, states in alike[:_MOST_LINES] for state in states}
    lines = causes(waits, shown, are_files=are_files, tells_differences=tells_differences)
    for doing, states in alike[:_MOST_LINES]:
        ranks = ranks_text(sorted(state.rank for state in states))
        lines.append(_sentence(ranks, doing, _age(states, now_s), is_one=len(states) == 1))
    if len(alike) > _MOST_LINES:
        rest = sum(len(states) for _, states in alike[_MOST_LINES:])
        lines.append(f"{rest} more {'rank is in another place' if rest == 1 else 'ranks are in other places'}")
    lines += [
        f"stack of rank {rank}: {' > '.join(_short(line) for line in waits.states[rank].stack[-_MOST_FRAMES:])}"
        for rank in waits.absent[:_MOST_STACKS]
        if rank in waits.states and waits.states[rank].stack
    ]
    lines += [f"rank {rank} {state}" for rank, state in sorted(waits.gone.items())][:_MOST_LINES]
    silent = [rank for rank in range(world_size) if rank not in waits.states and rank not in waits.gone]
    if silent:
        lines.append(f"{ranks_text(silent)} {'left no file' if are_files else 'did not respond'}")
    return lines


def causes(
    waits: Waits, shown: Container[int] = (), *, are_files: bool = False, tells_differences: bool = True
) -> list[str]:
    """Return the sentences that name the cause of the wait, as far as the graph shows it; for the options see above.

    They leave out the calls in which the ranks `shown` wait, which are told elsewhere.
    """
    found = []
    if waits.cycle:
        found.append(_describe_cycle(waits, shown, tells_differences=tells_differences))
    found += _describe_absences(waits, are_files=are_files, tells_differences=tells_differences)
    if found:
        return found
    unfinished = [state for state in waits.states.values() if state.open_calls]
    if unfinished and all(call.state == "failed" for state in unfinished for call in state.open_calls):
        return ["no rank waits any more: these calls have failed"]
    if unfinished:
        return ["all ranks have reached the calls that others wait for; these calls are in progress"]
    return ["no rank waits for another"]


def _describe_cycle(waits: Waits, shown: Container[int], *, tells_differences: bool) -> str:
    if len(waits.cycle) == 1:
        (rank,) = waits.cycle
        return f"rank {rank} waits for itself in {waits.graph.edges[rank, rank]['call'].words}"
    told = [waits.states[rank] for rank in waits.cycle if rank in shown]
    known = [call for state in told for call in _named(state)]
    steps = []
    for number, rank in enumerate(waits.cycle[:_MOST_RANKS]):
        following = waits.cycle[(number + 1) % len(waits.cycle)]
        call = waits.graph.edges[rank, following]["call"]
        whom = "any rank" if call.is_message and call.peer is None else f"rank {following}"
        steps.append(f"rank {rank} waits for {whom}{'' if call in known else f' in {call.words}'}")
    others = sorted(waits.deadlocked - {*waits.cycle})
    if others:
        steps.append(f"{ranks_text(others)} wait{'s' if len(others) == 1 else ''} with them")
    differing = _differing(waits, *waits.cycle[:2], known=known) if tells_differences else ""
    advice = "" if differing else _advice(waits)
    return f"the ranks wait for each other: {'; '.join(steps)}{differing}{advice}"


def _advice(waits: Waits) -> str:
    """Return what to change where all ranks of the cycle wait in their sends; else an empty string."""
    edges = zip(waits.cycle, [*waits.cycle[1:], waits.cycle[0]], strict=True)
    names = {waits.graph.edges[edge]["call"].text.partition("(")[0] for edge in edges}
    advice = advice_on_sends(names)
    return f"; {advice}" if advice else ""


def _describe_absences(waits: Waits, *, are_files: bool, tells_differences: bool) -> list[str]:
    """Return a sentence for each call with missing ranks; a rank is in the first one that others wait for it in.

    A call that lacks a waiting rank as well comes after the one in which that rank waits. Among calls that lack only
    ranks that wait for nobody, the one with the most waiting ranks counts.
    """
    missing: dict[str, list[int]] = {}
    for rank in waits.absent:
        edges = sorted(waits.graph.in_edges(rank, data="call"), key=_first)
        first = [edge for edge in edges if _lacks_only_absent(waits, edge[0], edge[2])] or edges
        calls = Counter(_left_out(call, waiting) for waiting, _, call in first)
        missing.setdefault(calls.most_common(1)[0][0], []).append(rank)
    sentences = [
        _not_done(
            waits,
            sorted(ranks),
            deed,
            is_known=not are_files or any(rank in waits.states or rank in waits.gone for rank in ranks),
        )
        + (_differing(waits, min(waits.graph.predecessors(ranks[0])), ranks[0]) if tells_differences else "")
        for deed, ranks in missing.items()
    ]
    if len(sentences) > _MOST_LINES:
        sentences[_MOST_LINES:] = [f"and so on, {ranks_text(sorted(waits.absent))} in all"]
    return sentences


def _lacks_only_absent(waits: Waits, waiting: int, call: CallSeen) -> bool:
    """Return whether all ranks that a rank waits for in `call` wait for nobody."""
    return all(rank in waits.absent for _, rank, other in waits.graph.out_edges([waiting], "call") if other == call)


def _not_done(waits: Waits, ranks: Sequence[int], deed: str, *, is_known: bool) -> str:
    if is_known:
        return f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} not {deed}"
    waiting = sorted({waiting for rank in ranks for waiting in waits.graph.predecessors(rank)})
    they, files = ("this rank", "its file is") if len(ranks) == 1 else ("these ranks", "their files are")
    return (
        f"{ranks_text(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {ranks_text(ranks)}: whether {they} had"
        f" {deed} is unknown, as {files} missing"
    )


def _first(edge: tuple[int, int, CallSeen]) -> int:
    return edge[0]


def _left_out(call: CallSeen, waiting: int) -> str:
    """Return what a missing rank has not done that the rank `waiting` waits for."""
    if not call.is_message:
        return f"reached {call.words}"
    if call.is_receipt:
        return f"sent the message that rank {waiting} is waiting for in {call.words}"
    return f"received the message that rank {waiting} is sending in {call.words}"


def _differing(waits: Waits, mine: int, theirs: int, *, known: Sequence[CallSeen] = ()) -> str:
    """Return where the calls of two ranks begin to differ; the calls `known` are told elsewhere."""
    one, other = waits.states.get(mine), waits.states.get(theirs)
    if one is None or other is None:
        return ""
    difference = first_difference(one, other)
    if difference is None or difference.mine is None or difference.theirs is None:
        return ""  # one has only got further than the other, which is reported already
    is_told = difference.mine in known and difference.theirs in known
    if difference.before is None:
        if is_told:
            return "; already their oldest recorded calls differ"
        begin = "in their oldest recorded calls"
    else:
        begin = f"after {difference.before.words}"
        if is_told:
            return f"; {begin}, their calls differ"
    return f"; {begin}, rank {mine} calls {difference.mine.words} and rank {theirs} calls {difference.theirs.words}"


def in_words(state: RankSnapshot, subject: str = "it", missing: str = "") -> list[str]:
    """Describe one rank, as lines: its call or place, and its stack. Without a `subject`, its verb is left out too.

    `missing` names the ranks that a collective waits for, if that is its only call in progress. By default, these are
    all ranks of the group, as the state of one rank does not tell which of them have made the call.
    """
    alone, calls = {state.rank: state}, state.open_calls
    ranks = sorted({rank for call in calls for rank in awaited(call, state, alone, {})})
    is_told = missing and len(calls) == 1 and not calls[0].is_message
    whom = missing if is_told else ranks_text(ranks) if ranks else ""
    doing = _doing(state, whom)._replace(ended="", is_over=False)
    return [_sentence(subject, doing, _age([state]), is_one=True), *state.stack]


def _awaited_by(waits: Waits, state: RankSnapshot) -> str:
    """Return the ranks that a rank waits for, in words; empty if it waits for none."""
    ranks = sorted(waits.graph.successors(state.rank)) if state.rank in waits.graph else []
    return ranks_text(ranks) if ranks else ""


class Activity(NamedTuple):
    """What one rank does: in words, for how long, and its call, or its last one where it is in none."""

    words: str
    seconds: float
    call: CallSeen | None


def activity(waits: Waits, state: RankSnapshot, now_s: float) -> Activity:
    """Return what a rank of `waits` does, for a table; `now_s` is in seconds since 1970."""
    seconds = max(0.0, now_s - _since_s(state))
    call = _waiting(state)
    if call is None:
        place = f"running, at {_short(state.place).removesuffix(' in <module>')}" if state.place else "running"
        return Activity(place, seconds, state.calls[-1] if state.calls else None)
    whom = _awaited_by(waits, state)
    return Activity(f"waiting for {whom}" if whom else "in a call", seconds, call)


class _Doing(NamedTuple):
    """What a rank does, in words: `call` is the one in which it waits, or its last one where it is at a `place`."""

    call: str
    place: str = ""
    others: str = ""  # the calls that are in progress elsewhere, or the ranks that `call` waits for
    ended: str = ""  # how the rank's last wait has ended: "timed out" or "failed"; empty while it goes on
    is_over: bool = False  # the rank has ended, or may have
    raised: str = ""  # the exception that has ended it
    begins: bool = False  # it is in a call without a record, such as a first one that still sets up its group
    awaited: str = ""  # the calls of which it waits for any, if `call` is a wait_any


def _doing(state: RankSnapshot, awaited_ranks: str, *, are_files: bool = False) -> _Doing:
    is_over = are_files or state.is_last
    call = _waiting(state)
    if call is not None:
        whom = f", waiting for {awaited_ranks}" if awaited_ranks else ""
        how = "" if call.state != "failed" else " (timed out)" if call.has_timed_out else " (failed)"
        ended = _how_it_ended(state, call) if is_over and (state.is_last or how) else ""
        if len(_awaited(state)) > 1:
            return _Doing(_wait_any(state), "", whom, ended, is_over, awaited=_awaited_words(state))
        return _Doing(f"{call.words}{'' if is_over else how}", "", whom, ended, is_over)
    place = f"at {_short(state.place)}" if state.place else "at an unknown line"
    last = next((call for call in reversed(state.calls) if call.state in ("completed", "failed")), None)
    ending = ", which timed out" if last is not None and last.has_timed_out else ", which failed"
    words = "" if last is None else f"{last.words}{ending if last.state == 'failed' else ''}"
    num_open = len(state.open_calls)
    are = ("was" if num_open == 1 else "were") if are_files else "is" if num_open == 1 else "are"
    is_open = f"; {counted(num_open, 'async call')} {are} in progress" if num_open else ""
    if state.raised is not None:
        return _Doing(words, place, raised=state.raised.error)
    ended = _how_it_ended(state, last) if state.is_last else ""
    return _Doing(words, place, is_open, ended, is_over, begins=begins_a_call(state))


def _how_it_ended(state: RankSnapshot, call: CallSeen | None) -> str:
    return "timed out" if state.has_timed_out or (call is not None and call.has_timed_out) else "failed"


def _sentence(ranks: str, doing: _Doing, age: str, *, is_one: bool) -> str:
    """Say what `ranks` do, and for how long; where `ranks` is empty, without subject and verb."""
    they, their, have = ("it", "its", "has") if is_one else ("they", "their", "have")
    are = ("was" if is_one else "were") if doing.is_over else "is" if is_one else "are"
    if not doing.place:
        ending = "" if not doing.ended else ", and timed out" if doing.ended == "timed out" else _FAILED[is_one]
        begin = f"{ranks} {are if doing.is_over else f'{have} been'} " if ranks else ""
        return f"{begin}in {doing.call}, {age}{doing.others}{ending}{doing.awaited}"
    had = "had" if doing.is_over or doing.raised else have
    last = f"; {their} last call was {doing.call}" if doing.call else f" and {had} not completed any call yet"
    if doing.raised:
        return f"{ranks} raised {doing.raised}, {doing.place}{'' if doing.call else ','}{last}{doing.others}"
    begin = f"{ranks} {are} " if ranks else ""
    if doing.begins:
        last = last if doing.call else ""
        return f"{begin}in a meshdist call {doing.place} {age}, of which there is no record{last}{doing.others}"
    return f"{begin}not in a meshdist call; {they} {had} been {doing.place} {age}{last}{doing.others}"


def _waiting(state: RankSnapshot) -> CallSeen | None:
    """Return the call that a rank waits in: of several in progress, one that it awaits, or else the last begun."""
    begun = [call for call in state.open_calls if call.state != "queued"]
    if not begun or not state.in_call:
        return None
    return next((call for call in _awaited(state) if call.state != "queued"), begun[-1])


def _awaited(state: RankSnapshot) -> list[CallSeen]:
    """Return the async calls of which a rank waits for any; none if it waits in a sync call."""
    return [call for call in state.awaits.calls if call.is_open] if state.in_call and state.awaits is not None else []


def _named(state: RankSnapshot) -> list[CallSeen]:
    """Return the calls that the sentence about a rank names as those in which it waits."""
    if len(some := _awaited(state)) > 1:
        return some[:_MOST_AWAITED]
    call = _waiting(state)
    return [] if call is None else [call]


def _wait_any(state: RankSnapshot) -> str:
    site = f", at {_short(state.place).rpartition(' in ')[0]}" if state.place else ""
    return f"wait_any of {counted(len(_awaited(state)), 'call')}{site}"


def _awaited_words(state: RankSnapshot) -> str:
    some = _awaited(state)
    more = f"; and {len(some) - _MOST_AWAITED} more" if len(some) > _MOST_AWAITED else ""
    return f": {'; '.join(call.words for call in some[:_MOST_AWAITED])}{more}"


def waited_s(state: RankSnapshot, now_s: float | None = None) -> float:
    """Return how long a rank has been in the call in which it waits, until `now_s`; 0 if it is in none."""
    return 0.0 if _waiting(state) is None else max(0.0, until_s(state, now_s) - _since_s(state))


def _short(line: str) -> str:
    return PurePath(line).name if not line.startswith("<") else line


def _since_s(state: RankSnapshot) -> float:
    call = _waiting(state)
    if state.awaits is not None and len(_awaited(state)) > 1:
        return state.awaits.since_s
    if call is not None:
        return call.created_s
    done = (call.completed_s for call in state.calls if call.completed_s is not None)
    return max(done, default=state.time_s if state.began_s is None else state.began_s)


def until_s(state: RankSnapshot, now_s: float | None) -> float:
    """Return until when a rank has done what it does, by its own clock: until `now_s`, or the time of its state."""
    if now_s is None or state.is_last:
        return state.time_s
    return state.time_s + min(max(0.0, now_s - state.time_s), MOST_OLD_S)


def _age(states: Sequence[RankSnapshot], now_s: float | None = None) -> str:
    """Return how long ranks have done what they do, until `now_s`, or until the time of their states."""
    ages_s = [until_s(state, now_s) - _since_s(state) for state in states]
    least, most = max(0.0, min(ages_s)), max(0.0, max(ages_s))
    if most - least < 0.1 * most + 0.1:
        return f"for {most:.1f} s"
    return f"for {least:.1f} to {most:.1f} s"
