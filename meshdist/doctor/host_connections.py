"""Check a whole cluster between its ranks: versions, clocks, and connections."""

from __future__ import annotations

import json
import platform
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from meshdist._version import __version__
from meshdist.doctor.finding import ERROR, OK, WARNING, Finding
from meshdist.doctor.network import addresses_elsewhere
from meshdist.errors import DistError
from meshdist.runtime.host_identity import host_id
from meshdist.runtime.rank_text import ranks_text
from meshdist.store import Store

_PINGS = 5
_LARGEST_SKEW_S = 0.1
_CONNECT_S = 2.0
_TIMEOUT_S = 60.0


class Listeners:
    """Listens so that other hosts can test whether they reach this one."""

    def __init__(self) -> None:
        self.ports: dict[str, tuple[str, int]] = {}  # by interface, its address and port
        self._sockets: list[socket.socket] = []
        for name, address in addresses_elsewhere().items():
            sock = socket.create_server((address, 0))
            self._sockets.append(sock)
            self.ports[name] = (address, sock.getsockname()[1])

    def __enter__(self) -> Listeners:
        return self

    def __exit__(self, *exc: object) -> None:
        # The kernel completes the connections; no accept is needed.
        for sock in self._sockets:
            sock.close()


def check_cluster(store: Store, rank: int, size: int, own: list[dict[str, Any]]) -> list[Finding]:
    """Check the cluster together, with each rank's `own` findings; return all findings on rank 0, none elsewhere."""
    store.set_timeout(_TIMEOUT_S)
    with Listeners() as listeners:
        mine = {
            "host": host_id(),
            "name": platform.node(),
            "ports": listeners.ports,
            "versions": {"meshdist": __version__, "numpy": np.__version__, "python": platform.python_version()},
            "findings": own,
        }
        store.set(f"doctor/card/{rank}", json.dumps(mine))
        answerer = None
        if rank == 0:
            answerer = threading.Thread(target=_answer_pings, args=(store, size), name="meshdist-doctor", daemon=True)
            answerer.start()
        cards = {other: json.loads(store.get(f"doctor/card/{other}")) for other in range(size)}
        report = {"skew": _skew(store, rank) if rank else (0.0, 0.0), "unreached": _unreached(rank, cards)}
        store.set(f"doctor/seen/{rank}", json.dumps(report))
        seen = {other: json.loads(store.get(f"doctor/seen/{other}")) for other in range(size)}
        if answerer is not None:
            answerer.join()
        # Keep the listeners and the store open until all ranks have finished.
        if store.add("doctor/done", 1) == size:
            store.set("doctor/over", "")
        store.wait(["doctor/over"])
    return list(_verdict(cards, seen)) if rank == 0 else []


def _answer_pings(store: Store, size: int) -> None:
    try:
        for rank in range(1, size):
            for number in range(_PINGS):
                store.wait([f"doctor/ping/{rank}/{number}"])
                store.set(f"doctor/pong/{rank}/{number}", str(time.time_ns()))
    except DistError:
        return  # a rank has ended; rank 0 notices in its own waits


def _skew(store: Store, rank: int) -> tuple[float, float]:
    """Return how far this rank's clock is ahead of rank 0's, and the uncertainty, in seconds.

    The shortest of several round trips counts; the answer is assumed to be from its middle (Cristian's algorithm,
    1989).
    """
    best = (float("inf"), 0.0)
    for number in range(_PINGS):
        began = time.time_ns()
        store.set(f"doctor/ping/{rank}/{number}", "")
        answer = int(store.get(f"doctor/pong/{rank}/{number}"))
        ended = time.time_ns()
        best = min(best, ((ended - began) / 1e9, ((began + ended) / 2 - answer) / 1e9))
    return best[1], best[0] / 2


def _unreached(rank: int, cards: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
    """Try to connect to each other host, once from each host; return the unreachable ones, and why."""
    first = _first_ranks(cards)
    mine = cards[rank]["host"]
    found = {}
    for host, other in first.items():
        if host == mine or first[mine] != rank:
            continue
        failures = [f"{address} ({name}): {why}" for name, address, why in _failures(cards[other]["ports"])]
        if len(failures) == len(cards[other]["ports"]):
            found[cards[other]["name"]] = "; ".join(failures) or "it has no address but loopback"
    return found


def _failures(ports: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, str, str]]:
    for name, (address, port) in ports.items():
        try:
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
        except OSError as error:
            yield name, address, str(error)


def _first_ranks(cards: Mapping[int, Mapping[str, Any]]) -> dict[str, int]:
    first: dict[str, int] = {}
    for rank, card in sorted(cards.items()):
        first.setdefault(card["host"], rank)
    return first


def _verdict(cards: Mapping[int, Mapping[str, Any]], seen: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    hosts = _first_ranks(cards)
    names = ", ".join(cards[rank]["name"] for rank in list(hosts.values())[:8])
    yield Finding("ranks", OK, f"{len(cards)} on {len(hosts)} host{'s' if len(hosts) > 1 else ''}: {names}")
    for name in ("meshdist", "numpy", "python"):
        yield _compare(name, {rank: card["versions"][name] for rank, card in cards.items()})
    skews = {rank: tuple(report["skew"]) for rank, report in seen.items()}
    worst = max(skews, key=lambda rank: abs(skews[rank][0]))
    text = f"at most {abs(skews[worst][0]) * 1e3:.1f} ms apart (rank {worst}, +-{skews[worst][1] * 1e3:.1f} ms)"
    if abs(skews[worst][0]) - skews[worst][1] > _LARGEST_SKEW_S:
        yield Finding(
            "clocks", WARNING, text, "run an NTP client on all hosts: times in logs and traces cannot be compared"
        )
    else:
        yield Finding("clocks", OK, text)
    yield from _routes(cards, seen, len(hosts))
    yield from _of_ranks(cards)


def _compare(name: str, versions: Mapping[int, str]) -> Finding:
    ranks_of: dict[str, list[int]] = {}
    for rank, version in versions.items():
        ranks_of.setdefault(version, []).append(rank)
    if len(ranks_of) == 1:
        return Finding(f"{name} of all ranks", OK, next(iter(ranks_of)))
    text = "; ".join(f"{version} on {ranks_text(sorted(ranks))}" for version, ranks in ranks_of.items())
    status = ERROR if name == "meshdist" else WARNING
    return Finding(f"{name} of all ranks", status, text, "install the same on all hosts")


def _routes(
    cards: Mapping[int, Mapping[str, Any]], seen: Mapping[int, Mapping[str, Any]], num_hosts: int
) -> Iterator[Finding]:
    lost = [
        f"{cards[rank]['name']} does not reach {name}: {why}"
        for rank, report in seen.items()
        for name, why in report["unreached"].items()
    ]
    for text in lost:
        remedy = (
            "open the ports that programs listen on between the hosts (firewall, security group, container network)"
        )
        yield Finding("routes", ERROR, text, remedy)
    if not lost and num_hosts > 1:
        yield Finding("routes", OK, f"each of the {num_hosts} hosts reaches all others")


def _of_ranks(cards: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield the warnings and errors of the hosts; equal ones once."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for rank in _first_ranks(cards).values():
        for found in cards[rank]["findings"]:
            if found["status"] in (WARNING, ERROR):
                key = (found["name"], found["status"], found["text"], found["remedy"])
                alike.setdefault(key, []).append(cards[rank]["name"])
    for (name, status, text, remedy), hosts in alike.items():
        yield Finding(
            f"{name} on {', '.join(hosts[:4])}{' and others' if len(hosts) > 4 else ''}", status, text, remedy
        )
