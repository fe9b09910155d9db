"""attach: what the ranks of a running job do, asked from outside with the secret of the job, or of one of its ranks."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from meshdist.bootstrap.join import arrivals, worlds_in
from meshdist.debug.hang_report import hang_report, in_words, waited_s
from meshdist.debug.state_exchange import StoreStateExchange
from meshdist.debug.states import RankSnapshot
from meshdist.debug.wait_graph import who_waits
from meshdist.errors import DistError, DistNetworkError
from meshdist.runtime.host_identity import my_card
from meshdist.runtime.peer_monitor import Peers
from meshdist.runtime.rank_text import ranks_text
from meshdist.security.credentials import (
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    TLS_CA_VARIABLE,
    TLS_CERT_VARIABLE,
    TLS_KEY_VARIABLE,
    secret_from_environment,
)
from meshdist.security.handshake import OtherJobError
from meshdist.store import PrefixStore, Store, TCPStore
from meshdist.store.address import endpoint
from meshdist.system.deadline import Deadline
from meshdist.system.env_flags import INSECURE
from meshdist.system.platform import user_id

_CARD = re.compile(r"(?P<world>(?:.*/)?world/\d+)/card/\d+")
_CONNECT_S = 10.0
_ANSWER_S = 5.0  # enough for a busy machine; ranks that answer at once cost no more


class Found(NamedTuple):
    """What is known of the ranks of a job."""

    states: Mapping[int, RankSnapshot]  # of the ranks that answered, by rank
    gone: Mapping[int, str]  # what became of ranks that have ended or do not answer
    world_size: int
    # For a shrunk world, the numbers its ranks had when they joined, in the order of their present numbers; else empty.
    joined_as: Sequence[int] = ()
    # The ranks that wait in init_process_group for the others; None once the world has begun.
    waiting: Sequence[int] | None = None

    def note(self) -> str:
        """Return a note on a world that has not begun, or on the numbers of the ranks of a shrunk one; else empty."""
        if self.waiting is not None:
            absent = sorted({*range(self.world_size)} - {*self.waiting})
            there = f"{ranks_text(self.waiting)} {'wait' if len(self.waiting) > 1 else 'waits'} in init_process_group"
            return f"{there}, which {ranks_text(absent)} {'have' if len(absent) > 1 else 'has'} not called.\n"
        if not self.joined_as:
            return ""
        numbers = ", ".join(map(str, self.joined_as))
        return f"The world was shrunk: its ranks 0 to {self.world_size - 1} joined as ranks {numbers}.\n"


def attach(
    address: str, budget_s: float = _ANSWER_S, *, secret: bytes | None = None, connect_s: float = _CONNECT_S
) -> Found:
    """Return what the ranks of a job do, without disturbing it.

    For a shrunk world, the remaining ranks are shown under their present numbers. Remaining ranks that have not called
    `shrink_group` yet are listed as gone, with what they do.

    Ranks in a long wait have put their state into the store. Computing ranks are asked by a signal, so they must be on
    this host, and in Python code: a rank blocked in native code cannot answer.

    Args:
        address: Of the job's store, "host:port"; MASTER_ADDR and MASTER_PORT of the ranks.
        budget_s: How long to wait for answers.
        secret: The job's; that of the environment, as for the ranks, if None.
        connect_s: How long to wait for the store.

    Raises:
        ValueError: `address` is malformed.
        DistNetworkError: There is no store, or the job has a different secret.
        DistError: No world has begun there.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"the store's address must be host:port, as in 127.0.0.1:29500, got {address!r}")
    try:
        store = TCPStore(
            host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=connect_s, secret=secret
        )
    except OtherJobError:
        raise _no_secret(address) from None
    with store:
        return found_in(store, address, budget_s)


def found_in(store: Store, address: str, budget_s: float = _ANSWER_S) -> Found:
    """Return what the ranks do whose store this is, as `attach` does, which has the arguments."""
    world = _latest_world(store, address)
    came, world_size = arrivals(world)
    if len(came) < world_size:  # no rank is beyond init_process_group, where it cannot be asked
        return Found({}, {}, world_size, waiting=came)
    worlds = worlds_in(world, my_card(""))
    try:
        *before, (last, peers) = worlds
        states, gone = StoreStateExchange(last, peers, None).gather(budget_s)
        joined_as = [peers.joined_as(rank) for rank in range(peers.num_ranks)] if before else []
        known = [
            rank for rank in range(peers.num_ranks) if rank in states or peers.departure_of(rank) or peers.ended(rank)
        ]
        if before and len(known) < peers.num_ranks:
            late = sorted({*range(peers.num_ranks)} - {*known})
            gone = {**gone, **_not_yet_there(before[-1], peers, late, budget_s)}
        return Found(states, gone, peers.num_ranks, joined_as)
    finally:
        for _, peers in worlds:
            peers.close()


# A wait that counts as a hang when the job is interrupted.
_LONG_S = 0.5
# A rank whose first answer this is imports what it needs for it.
_AT_THE_END_S = 2.0
REPORT_S = 5.0
"""How long a user who interrupts a job waits for the answer."""
# How soon a further signal ends that, and the part of the time that the ranks have.
_REPORT_SLICE_S, _OF_RANKS = 0.05, 0.8


def hang_of_interrupted(
    store: Store, address: str, is_in_haste: Callable[[], object] = lambda: False, within_s: float = REPORT_S
) -> list[str]:
    """Return what `hang_at_the_end` does if it comes in time, and before `is_in_haste` is true: the user asks again.

    In time is `within_s` after what the report needs is loaded, and REPORT_S in all.
    """
    lines: list[str] = []
    answer_s = min(_AT_THE_END_S, _OF_RANKS * within_s)
    # The report needs networkx. On a busy host, loading it may take longer than the answers, which come meanwhile.
    loading = threading.Thread(target=import_module, args=("networkx",), daemon=True)
    asking = threading.Thread(target=lambda: lines.extend(hang_at_the_end(store, address, answer_s)), daemon=True)
    in_all = Deadline(REPORT_S)
    asking.start()
    asking.join(_REPORT_SLICE_S)
    if asking.is_alive():  # there are ranks to ask
        loading.start()
    for thread, longest_s in ((loading, REPORT_S), (asking, within_s)):
        deadline = Deadline(in_all.slice_s(longest_s))
        while thread.is_alive() and asking.is_alive() and not deadline.expired() and not is_in_haste():
            thread.join(_REPORT_SLICE_S)
    return list(lines)


def hang_at_the_end(store: Store, address: str, answer_s: float = _AT_THE_END_S) -> list[str]:
    """Return who waits for whom in a job that is being interrupted; empty unless a rank has waited.

    `store` is that of the ranks, to which the caller is connected: on a busy host a new connection may take longer than
    the user wants to wait.
    """
    try:
        found = found_in(store, address, answer_s)
    except DistError:  # no rank has come, or the store is gone
        return []
    if found.waiting is not None:
        return [found.note().rstrip(".\n")]
    return long_waits(found.states, found.gone, found.world_size, time.time())


def long_waits(
    states: Mapping[int, RankSnapshot], gone: Mapping[int, str], world_size: int, now_s: float | None = None
) -> list[str]:
    """Return who waits for whom at `now_s`, as in `hang_report`; empty if no rank has waited for half a second."""
    waits = who_waits(states, gone)
    waiting = [state for state in states.values() if waits.graph.out_degree(state.rank)]
    if any(waited_s(state, now_s) >= _LONG_S for state in waiting):
        return hang_report(waits, world_size, now_s=now_s)
    return []


def _no_secret(address: str) -> DistNetworkError:
    given = (
        f"{SECRET_VARIABLE} here is not that of" if secret_from_environment() else f"{SECRET_VARIABLE} is missing for"
    )
    return DistNetworkError(
        f"the store at {address} requires the job's secret, and {given} the job: pass --pid PID of one of"
        f" its ranks on this host, or set {SECRET_VARIABLE} or {SECRET_FILE_VARIABLE} as its ranks have it"
    )


def _not_yet_there(before: tuple[Store, Peers], peers: Peers, late: Sequence[int], budget_s: float) -> dict[int, str]:
    """Describe ranks of a shrunk world that are still in the world before."""
    store, all_peers = before
    joined_as = {peers.joined_as(rank): rank for rank in late}
    rank_now = {
        rank: joined_as[all_peers.joined_as(rank)]
        for rank in range(all_peers.num_ranks)
        if all_peers.joined_as(rank) in joined_as
    }
    found, _ = StoreStateExchange(store, all_peers, None).gather(budget_s, list(rank_now))
    return {
        rank_now[rank]: f"has not called shrink_group: as rank {rank}, {in_words(state)[0]}"
        for rank, state in found.items()
    }


def _latest_world(store: Store, address: str) -> Store:
    found = [match for key in store.list_keys() if (match := _CARD.fullmatch(key))]
    # Restarts and later worlds come after earlier ones, and have higher numbers.
    names = sorted(
        {match["world"] for match in found}, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]
    )
    if not names:
        raise DistError(f"the store at {address} has no world: no rank has called init_process_group there yet")
    return PrefixStore(names[-1], store)


class JobHere(NamedTuple):
    """A job with ranks on this host."""

    address: str  # of the ranks' store
    run_id: str  # its name; empty if no launcher gave one
    access: Mapping[str, str]  # the variables that give access to the store

    def has_store(self) -> bool:
        """Return whether there is a store at its address: a process that a job has left behind still names its own."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        except OSError:
            return False
        return True


def jobs_here() -> list[JobHere]:
    """Return the jobs of this user with ranks on this host, or with processes that their ranks have left behind.

    Only its own user, and root, may read the environment of a process.
    """
    found: dict[str, JobHere] = {}
    for place in sorted(Path("/proc").glob("[0-9]*"), key=lambda place: int(place.name)):
        try:
            variables = _parsed((place / "environ").read_bytes()) if place.stat().st_uid == user_id() else {}
            directory = os.readlink(place / "cwd")
        except OSError:
            continue  # it has just ended
        host, port = variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")
        if variables.get("RANK") and host and port.isdecimal():
            address = endpoint(host, int(port))
            run_id = variables.get("TORCHELASTIC_RUN_ID", "")
            found.setdefault(address, JobHere(address, run_id, access_of(variables, directory)))
    return list(found.values())


def only_job_here() -> JobHere:
    """Return the only job of this user with ranks on this host.

    Raises:
        ValueError: There is none, or several.
    """
    jobs = [job for job in jobs_here() if job.has_store()]
    if len(jobs) == 1:
        return jobs[0]
    if not jobs:
        raise ValueError(f"{NONE_HERE}; pass --store HOST:PORT for a job elsewhere")
    known = ", ".join(f"{job.address} (job {job.run_id})" if job.run_id else job.address for job in jobs)
    raise ValueError(f"you have {len(jobs)} jobs on this host: pass --store with one of {known}")


NONE_HERE = "none of your jobs is running on this host"
_CONNECT_S = 2.0
_NAMED = 8
_PATHS = (SECRET_FILE_VARIABLE, TLS_CERT_VARIABLE, TLS_KEY_VARIABLE, TLS_CA_VARIABLE)
_TAKEN = (SECRET_VARIABLE, INSECURE, *_PATHS)


def store_of(pid: int) -> tuple[str, dict[str, str]]:
    """Return the address of the store of the job of the rank `pid`, and the variables that give access to it.

    Only its own user, and root, may read the environment of a process.

    Raises:
        ValueError: There is no such process, its environment cannot be read, or it names no store.
    """
    place = Path("/proc", str(pid))
    try:
        found = _parsed((place / "environ").read_bytes())
        directory = os.readlink(place / "cwd")
    except FileNotFoundError:
        raise ValueError(f"there is no process {pid} on this host") from None
    except OSError as error:
        raise ValueError(f"the environment of process {pid} cannot be read: {error.strerror}") from error
    host, port = found.get("MASTER_ADDR", ""), found.get("MASTER_PORT", "")
    if not host or not port:
        raise ValueError(
            f"process {pid} is not a rank: it has no MASTER_ADDR and MASTER_PORT in its environment;"
            f" {_ranks_below(pid) or 'pass the pid of a rank that meshrun has started'},"
            f" or --store HOST:PORT and {SECRET_VARIABLE}"
        )
    return endpoint(host, int(port)) if port.isdecimal() else f"{host}:{port}", access_of(found, directory)


def access_of(variables: Mapping[str, str], directory: str) -> dict[str, str]:
    """Return the variables that give access to the store of a process, which runs in `directory`."""
    taken = {name: variables.get(name, "") for name in _TAKEN}
    # Relative paths refer to the directory of that process.
    taken.update({name: os.path.join(directory, taken[name]) for name in _PATHS if taken[name]})
    return taken


def _ranks_below(pid: int) -> str:
    """Return a hint at the ranks that a process, such as meshrun, has started; empty without any."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            variables = _parsed((place / "environ").read_bytes()) if parent == pid else {}
        except OSError:
            continue  # it has ended, or belongs to another user
        if "MASTER_ADDR" in variables and variables.get("RANK", "").isdecimal():
            found[int(variables["RANK"])] = int(place.name)
    ranks = [f"{process} (rank {rank})" for rank, process in sorted(found.items())]
    more = ", ..." if len(ranks) > _NAMED else ""
    return f"it has started ranks: pass --pid {', '.join(ranks[:_NAMED])}{more}" if ranks else ""


def _parsed(environment: bytes) -> Mapping[str, str]:
    pairs = (pair.partition(b"=") for pair in environment.split(b"\0") if pair)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
