"""The report on what went wrong, from the dumps of the ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from meshdist.debug.hang_report import hang_report, until_s
from meshdist.debug.states import CallSeen, RankSnapshot, read_states
from meshdist.debug.wait_graph import Waits, first_difference, who_waits
from meshdist.runtime.departure import PeerExit
from meshdist.runtime.rank_text import ranks_text, same_but_for_rank

_FILE = re.compile(r"rank_\d+\.json")
_MOST_SHOWN = 5
_LATE_S = 0.1  # less is no hang; a profile shows it
_SAME_S = 1.0  # within this time, files are of one moment


def read_dumps(directory: Path) -> dict[int, RankSnapshot]:
    """Return the states in a directory of flight recorder files.

    Raises:
        ValueError: There are no files, or a file has another format.
        OSError: The directory cannot be read.
    """
    if not directory.is_dir():
        problem = "not a directory" if directory.exists() else "no such directory"
        raise ValueError(f"{problem}: {directory}; pass the one to which MESHDIST_FLIGHT_RECORDER_DIR was set")
    paths = sorted(path for path in directory.iterdir() if _FILE.fullmatch(path.name))
    if not paths:
        raise ValueError(
            f"{directory} has no files of the flight recorder (rank_0.json and so on); they are written there by"
            f" ranks whose calls fail if MESHDIST_FLIGHT_RECORDER_DIR={directory} is set"
        )
    return read_states(paths)


def report_on(
    states: Mapping[int, RankSnapshot], gone: Mapping[int, str] | None = None, now_s: float | None = None
) -> str:
    """Return a report on what went wrong, from the states of some ranks and what became of others.

    None for `gone` if the states are those of files, and nothing is known of the other ranks. The durations are those
    at `now_s`, as in `hang_report`.
    """
    if not states:
        return "No rank answered, and there are no records.\n" + "".join(
            f"  rank {rank} {state}\n" for rank, state in sorted((gone or {}).items())
        )
    size = next(iter(states.values())).world_size
    are_files, ends = gone is None, ends_on_record(states) if gone is None else {}
    gone = ends if gone is None else gone
    silent = [rank for rank in range(size) if rank not in states and rank not in gone]
    counted = (
        f"{len(states)} of {size} ranks" if len(states) < size else f"all {size} ranks" if size > 1 else "the only rank"
    )
    shrunk = next(iter(states.values())).num_shrunk
    since = " since the world was shrunk" + (f" {shrunk} times" if shrunk > 1 else "") if shrunk else ""
    waits, faults = who_waits(states, gone), _faults(states)
    nothing_failed = "" if faults else "; no call in them failed"
    disagreement = _first_disagreement(states, waits)
    tells_differences = not (faults and disagreement)
    who_is_waiting = hang_report(waits, size, now_s=now_s, are_files=are_files, tells_differences=tells_differences)
    parts = [
        ["First call in which the ranks disagree", *disagreement],
        ["What went wrong", *faults],
        ["Who is waiting for whom", *who_is_waiting],
        ["Stragglers", *_latecomers(states, waits, now_s, are_files=are_files)],
    ]
    if not faults:  # the answer to why a job does not go on comes first
        parts[0], parts[2] = parts[2], parts[0]
    if are_files:
        parts.insert(0, ["Older files", *_older_files(states.values())])
        missing = [*_known_ends(ends), *(_what_is_missing(silent) if silent else ())]
        parts.insert(0, ["Missing files", *missing])
    elif silent:
        parts.insert(0, ["Ranks without a record", *_what_is_missing(silent)])
    head = f"Flight records of {counted}{since}, on {ranks_hosts(states.values())}{nothing_failed}."
    full = ["\n  ".join(part) for part in parts if len(part) > 1]
    return "\n\n".join([head, *full]) + "\n"


def ends_on_record(states: Mapping[int, RankSnapshot]) -> dict[int, str]:
    """Return how ranks without a file ended, as far as other ranks saw it in a call that failed for that."""
    ends = (call.peer_end for state in states.values() for call in state.calls if call.peer_end is not None)
    return {
        end.rank: end.how
        for end in ends
        if end.rank not in states and end.exit is not PeerExit.DESTROYED_GROUP  # that rank may have gone on
    }


def _known_ends(ends: Mapping[int, str]) -> list[str]:
    lines = [
        f"the file of rank {rank} (rank_{rank}.json) is missing; as the records of other ranks show, rank {rank} {how}"
        for rank, how in sorted(ends.items())
    ]
    return lines if len(lines) <= _MOST_SHOWN else [*lines[:_MOST_SHOWN], f"and {len(lines) - _MOST_SHOWN} more"]


def _what_is_missing(ranks: Sequence[int]) -> list[str]:
    is_one, names = len(ranks) == 1, ", ".join(f"rank_{rank}.json" for rank in ranks[:_MOST_SHOWN])
    they, were, their = ("it", "was", "its") if is_one else ("they", "were", "their")
    return [
        f"the file{'' if is_one else 's'} of {ranks_text(ranks)} ({names}{', ...' * (len(ranks) > _MOST_SHOWN)})"
        f" {'is' if is_one else 'are'} missing, so what {they} did is unknown. One of these is the cause:",
        f"- no call of {'this rank' if is_one else 'these ranks'} failed, and {they} finished, or {were} ended by"
        f" SIGTERM while {they} ran native code, or where the script has a SIGTERM handler of its own;",
        f"- {they} {were} ended by os._exit, or by a signal that a process cannot handle: the kernel sends SIGKILL when"
        " memory runs out;",
        f"- {they} {'runs' if is_one else 'run'} on another host, and {their} file{' was' if is_one else 's were'} not"
        " copied here.",
        "Before a job is ended, SIGUSR1 makes a rank write its file where MESHDIST_FLIGHT_RECORDER_DIR is set.",
    ]


def _older_files(states: Iterable[RankSnapshot]) -> list[str]:
    """Return of which ranks only an earlier state is known, as they had gone on when the last file was written."""
    last_s = max(state.time_s for state in states)
    return [
        f"the file of rank {state.rank} is {age_s:.1f} s older than the last one ({state.reason}): what this rank did"
        " later is unknown"
        for state in states
        if state.went_on and (age_s := last_s - state.time_s) > _SAME_S
    ]


def ranks_hosts(states: Iterable[RankSnapshot]) -> str:
    hosts = sorted({state.host for state in states})
    return f"host {hosts[0]}" if len(hosts) == 1 else f"{len(hosts)} hosts: {', '.join(hosts)}"


class _Fault(NamedTuple):
    """A call that failed, or the exception that ended a rank."""

    time_s: float
    state: RankSnapshot
    site: str
    error: str


def _faults_of(state: RankSnapshot) -> list[_Fault]:
    faults = [
        _Fault(call.completed_s or 0.0, state, call.site, call.error) for call in state.calls if call.error is not None
    ]
    if state.raised is not None:
        site = (state.place or "an unknown line").rpartition(" in ")
        faults.append(_Fault(state.raised.time_s, state, site[0] or site[2], state.raised.error))
    return faults


def _faults(states: Mapping[int, RankSnapshot]) -> list[str]:
    found: list[list[_Fault]] = []
    for state in states.values():
        for fault in _faults_of(state):
            same = next((faults for faults in found if _is_same(fault, faults[0])), None)
            found.append([fault]) if same is None else same.append(fault)
    if not found:
        return []
    ordered = sorted((sorted(faults, key=_time) for faults in found), key=lambda same: _time(same[0]))
    start_s = _time(ordered[0][0])
    lines = []
    for (failed_s, state, site, error), *others in ordered[:_MOST_SHOWN]:
        text = error.partition("\n")[0].removesuffix(":")
        lines.append(f"{failed_s - start_s:+.3f} s, {state.who} at {site}: {text}")
        alike = sorted({other.state.rank for other in others} - {state.rank})
        if alike:
            lines.append(f"  {ranks_text(alike)}: the same")
    if len(ordered) > _MOST_SHOWN:
        lines.append(f"and {len(ordered) - _MOST_SHOWN} more")
    return lines


def _is_same(one: _Fault, other: _Fault) -> bool:
    mine, theirs = (fault.error.partition("\n")[0] for fault in (one, other))  # further lines: who waits for whom
    return same_but_for_rank(mine, one.state.rank, theirs, other.state.rank)


def _time(fault: _Fault) -> float:
    return fault.time_s


def _first_disagreement(states: Mapping[int, RankSnapshot], waits: Waits) -> list[str]:
    made: dict[tuple[str, int], dict[int, CallSeen]] = {}
    for rank, state in states.items():
        for call in state.calls:
            if not call.is_message:
                made.setdefault((call.group, call.sequence), {})[rank] = call
    wrong = [calls for calls in made.values() if len({call.text for call in calls.values()}) > 1]
    if not wrong:
        return _order_of_groups(waits)
    calls = min(wrong, key=lambda calls: min(call.created_s for call in calls.values()))
    one = next(iter(calls.values()))
    by_words: dict[str, list[int]] = {}
    for rank, call in calls.items():
        by_words.setdefault(f"{call.text} at {call.site}", []).append(rank)
    return [
        f"call {one.sequence} on {one.label!r}:",
        *(f"  {ranks_text(sorted(ranks))}: {words}" for words, ranks in by_words.items()),
    ]


def _order_of_groups(waits: Waits) -> list[str]:
    """Describe where ranks that wait for each other begin to call different groups."""
    for one, other in zip(waits.cycle, waits.cycle[1:] + waits.cycle[:1], strict=True):
        difference = first_difference(waits.states[one], waits.states[other])
        if difference is not None and difference.mine is not None and difference.theirs is not None:
            after = f"after {difference.before.words}" if difference.before is not None else "in their first call"
            return [
                f"the ranks call their groups in different orders, {after}:",
                f"  rank {one}: {difference.mine.words}",
                f"  rank {other}: {difference.theirs.words}",
            ]
    return []


def _latecomers(states: Mapping[int, RankSnapshot], waits: Waits, now_s: float | None, *, are_files: bool) -> list[str]:
    missing = []
    for rank in waits.absent[:_MOST_SHOWN]:
        # Since the first rank has waited for it.
        edges = [(other, call) for other, _, call in waits.graph.in_edges(rank, data="call") if other in states]
        has_ended = rank in waits.gone or (rank in states and states[rank].raised)
        if edges and not has_ended:
            late_s = max(until_s(states[other], now_s) - call.created_s for other, call in edges)
            waiting = ranks_text(sorted(other for other, _ in edges))
            if late_s < _LATE_S:
                continue
            is_known = rank in states
            if are_files:
                is_late = "was late" if is_known else "may have been late"
                missing.append(f"rank {rank} {is_late}: {waiting} waited for it for {late_s:.1f} s")
                continue
            have = "has" if len(edges) == 1 else "have"
            is_late = "is late" if is_known else "may be late"
            missing.append(f"rank {rank} {is_late}: {waiting} {have} been waiting for it for {late_s:.1f} s")
    return missing + _last_of_calls(states)


def _last_of_calls(states: Mapping[int, RankSnapshot]) -> list[str]:
    made: dict[tuple[str, int], dict[int, float]] = {}
    for rank, state in states.items():
        for call in state.calls:
            if not call.is_message and call.state == "completed":
                made.setdefault((call.group, call.sequence), {})[rank] = call.created_s
    late: Counter[int] = Counter()
    lost_s: dict[int, float] = {}
    for times in made.values():
        if len(times) > 1:
            last = max(times, key=lambda rank: times[rank])
            late[last] += 1
            lost_s[last] = lost_s.get(last, 0.0) + times[last] - min(times.values())
    num_calls = sum(late.values())
    order = sorted(lost_s, key=lambda rank: -lost_s[rank])
    return [
        f"rank {rank} was the last to enter {late[rank]} of {num_calls} calls,"
        f" {1e3 * lost_s[rank] / late[rank]:.1f} ms after the first on average"
        for rank in order[:_MOST_SHOWN]
        if lost_s[rank] / late[rank] >= _LATE_S
    ]
