"""Rendezvous of the launchers of several hosts: they meet at a store that one of them keeps, and agree on a plan."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from meshdist._version import __version__
from meshdist.errors import DistError, DistNetworkError, DistStoreError, DistTimeoutError
from meshdist.launch.arrivals_of_nodes import Arrivals
from meshdist.launch.interrupts import Interrupts
from meshdist.launch.launchers_store import (
    JobEndedError,
    SignalledError,
    arrived,
    await_key,
    await_sign_offs,
    last_will,
    seat_key,
    sign_off,
)
from meshdist.launch.node_numbering import NodeCard, Plan, check_card, number_nodes
from meshdist.security.credentials import secret_from_environment
from meshdist.security.handshake import HANDSHAKE_TIMEOUT_S, HandshakeUnanswered
from meshdist.store import Store, TCPStore
from meshdist.store.address import PortTakenError, endpoint, resolve
from meshdist.store.connect import NotReachedError
from meshdist.system.deadline import Deadline

_SLICE_S = 0.25
_PAUSE_S = 0.02
_SIGN_OFF_S = 2.0
_STORE_TIMEOUT_S = 60.0


class NodeRendezvous(NamedTuple):
    """Where the launchers meet, and the options of this one."""

    host: str  # of the store, as all launchers know it
    port: int
    num_nodes: int
    node: int | None = None  # the number of this host, None for any
    run_id: str | None = None  # the name of the job, None for any
    timeout_s: float = 600.0  # how long to wait for the others
    least_nodes: int | None = None  # an elastic job has that many hosts up to `num_nodes`; None for another job
    last_call_s: float = 0.0  # how long to wait for more once `least_nodes` are there


class Met(NamedTuple):
    """A launcher that has met the others."""

    rendezvous: NodeRendezvous
    plan: Plan
    number: int  # how many launchers came before this one
    store: TCPStore  # the store of the launchers; it runs in the launcher that leads
    lifeline: TCPStore  # a connection whose end shows the others that this launcher is gone
    secret: bytes  # that of the launchers' store
    leads: bool  # True for the launcher that keeps the store
    start: int = 0  # the start of the ranks with which this launcher begins
    arrivals: Arrivals | None = None  # in the launcher that leads an elastic job


def meet(
    rendezvous: NodeRendezvous,
    num_ranks: int,
    max_restarts: int,
    interrupts: Interrupts,
    report: Callable[[str], None] = lambda text: None,
) -> Met:
    """Meet the launchers on the other hosts, and agree with them on a plan; `report` shows why this takes long.

    Raises:
        SignalledError: A signal came.
        JobEndedError: An elastic job had no place for this host up to its end.
        DistError: The store cannot be reached or refuses this launcher, or some launchers did not come.
        ValueError: The launchers' options contradict each other.
    """
    secret = secret_from_environment()
    deadline = Deadline(rendezvous.timeout_s)
    mine = NodeCard(
        socket.gethostname(),
        num_ranks,
        rendezvous.num_nodes,
        rendezvous.node,
        rendezvous.run_id,
        f"meshdist {__version__}",
        rendezvous.least_nodes,
    )
    arrivals, start = None, 0
    with contextlib.ExitStack() as on_failure:
        store, lifeline, number = _enter(rendezvous, mine, secret, interrupts, deadline)
        on_failure.callback(store.close)
        on_failure.callback(lifeline.close)
        store.set(f"card/{number}", mine.encode())
        if store.is_master:
            if rendezvous.least_nodes is not None:
                arrivals = Arrivals(store, mine, number, rendezvous.last_call_s)
            plan = _lead(store, mine, number, arrivals, max_restarts, interrupts, deadline)
        else:
            if rendezvous.least_nodes is not None and store.check(["plan/0"]):
                report("the job runs already: waiting for a place in it")
            try:
                # An elastic job that runs may have a place only later; the launcher that leads tells when it has ended.
                is_elastic = rendezvous.least_nodes is not None
                wait_s = math.inf if is_elastic else deadline.remaining_s() + _SIGN_OFF_S
                await_key(store, seat_key(number), interrupts, Deadline(wait_s))
                start, problem = _seat(store.get(seat_key(number)))
            except JobEndedError:
                sign_off(store, number)
                raise
            plan = Plan(problem=problem) if problem else Plan.decode(store.get(f"plan/{start}"))
        if plan.problem:
            sign_off(store, number)
            raise DistError(plan.problem)
        on_failure.pop_all()
    return Met(rendezvous, plan, number, store, lifeline, secret, store.is_master, start, arrivals)


def _seat(text: bytes) -> tuple[int, str]:
    """Return the start with which a launcher begins, and the problem if it is refused."""
    seat = json.loads(text)
    if "ended" in seat:
        raise JobEndedError(seat["ended"])
    return seat.get("start", 0), seat.get("problem", "")


def _enter(
    rendezvous: NodeRendezvous, mine: NodeCard, secret: bytes, interrupts: Interrupts, deadline: Deadline
) -> tuple[TCPStore, TCPStore, int]:
    """Return the store, hosted here or by another launcher, the lifeline, and how many launchers came before."""
    is_elastic = rendezvous.least_nodes is not None
    # An elastic job goes on without it.
    gone = {} if is_elastic else {"lost": f"the launcher on {mine.host} left before the job began"}
    while True:
        store = _open(rendezvous, secret, deadline)
        if store is not None:
            lifeline = TCPStore(rendezvous.host, store.port, timeout=_STORE_TIMEOUT_S, secret=secret)
            lifeline.set_last_will(gone)
            number = store.add("num_launchers", 1) - 1
            if number < rendezvous.num_nodes or (is_elastic and not store.check(["over"])):
                lifeline.set_last_will({**gone, **last_will(number)})
                return store, lifeline, number
            lifeline.set_last_will({})
            lifeline.close()
            # An earlier run with the same secret and address may still be ending: wait for its end.
            is_over = store.check(["over"])
            hosts = [card.host for card in _present(store)[: rendezvous.num_nodes]]
            store.close()
            if not is_over:
                raise DistError(_too_many(rendezvous, hosts))
            threading.Event().wait(deadline.slice_s(_PAUSE_S))
        if interrupts.pending():
            raise SignalledError


def _too_many(rendezvous: NodeRendezvous, hosts: Sequence[str]) -> str:
    return (
        f"at {endpoint(rendezvous.host, rendezvous.port)}, the {len(hosts)} launchers of this job (--nnodes) have "
        f"already joined, on {', '.join(hosts)}; is this one too many, or does the port belong to another job?"
    )


def _open(rendezvous: NodeRendezvous, secret: bytes, deadline: Deadline) -> TCPStore | None:
    """Return the store; None if it cannot be reached at the moment.

    Node 0 keeps it; where no launcher was given a number, the one that can be reached at the store's address does.
    """
    address = endpoint(rendezvous.host, rendezvous.port)
    if rendezvous.node == 0 or (rendezvous.node is None and _is_this_host(rendezvous.host)):
        try:
            return TCPStore(
                rendezvous.host,
                rendezvous.port,
                is_master=True,
                timeout=_STORE_TIMEOUT_S,
                wait_for_workers=False,
                secret=secret,
            )
        except PortTakenError:
            if rendezvous.node == 0:
                raise
    try:
        store = _connect(rendezvous, secret, deadline)
    except NotReachedError as error:
        if not deadline.expired():
            return None
        raise DistTimeoutError(
            f"no launcher opened a store at {address} within {deadline.timeout_s:g} s ({error.reason}); the meshrun"
            " with --node-rank 0, or the one on that host, hosts it: is it running, and can this host reach it?"
        ) from error
    store.set_timeout(_STORE_TIMEOUT_S)
    return store


def _connect(rendezvous: NodeRendezvous, secret: bytes, deadline: Deadline) -> TCPStore:
    try:
        return TCPStore(rendezvous.host, rendezvous.port, timeout=deadline.slice_s(_SLICE_S), secret=secret)
    except HandshakeUnanswered:  # by a stranger, or by a store on a busy host
        return TCPStore(rendezvous.host, rendezvous.port, timeout=deadline.slice_s(HANDSHAKE_TIMEOUT_S), secret=secret)


def _is_this_host(host: str) -> bool:
    """Return True if an address of `host` is one of this host's."""
    try:
        addresses = resolve(host, 0)
    except OSError:
        return False
    for address in addresses:
        with socket.socket(address.family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(address.sockaddr)
            return True
    return False


def _lead(
    store: TCPStore,
    mine: NodeCard,
    number: int,
    arrivals: Arrivals | None,
    max_restarts: int,
    interrupts: Interrupts,
    deadline: Deadline,
) -> Plan:
    """Wait for all launchers, or for the fewest of an elastic job; send them the plan, or why there is none."""
    try:
        if arrivals is not None:
            launchers = arrivals.gather((), interrupts, deadline)
            cards = arrivals.cards
        else:
            cards = dict(enumerate(_gather(store, mine, interrupts, deadline)))
            nodes = number_nodes(list(cards.values()), number)
            launchers = sorted(cards, key=lambda launcher: nodes[launcher])
    except SignalledError:
        _refuse_all(store, f"the launcher on {mine.host} was stopped", number)
        raise
    except (DistError, ValueError) as error:
        _refuse_all(store, str(error), number)
        return Plan(problem=str(error))
    plan = Plan(
        launchers=launchers,
        num_ranks=[cards[launcher].num_ranks for launcher in launchers],
        hosts=[cards[launcher].host for launcher in launchers],
        run_id=mine.run_id or secrets.token_hex(8),
        nonce=secrets.token_hex(16),
        max_restarts=max_restarts,
        leader=number,
    )
    publish(store, 0, plan, launchers)
    return plan


def publish(store: Store, start: int, plan: Plan, newcomers: Iterable[int]) -> None:
    """Send the plan of a start to the launchers; `newcomers` begin with it."""
    store.set(f"plan/{start}", plan.encode())
    for launcher in newcomers:
        store.set(seat_key(launcher), json.dumps({"start": start}))


def _refuse_all(store: Store, problem: str, leader: int) -> None:
    others = [launcher for launcher in arrived(store) if launcher != leader]
    for launcher in others:
        store.set(seat_key(launcher), json.dumps({"problem": problem}))
    await_sign_offs(store, others, _SIGN_OFF_S)


def _present(store: Store) -> list[NodeCard]:
    return [NodeCard.decode(store.get(f"card/{number}")) for number in arrived(store)]


def _gather(store: TCPStore, mine: NodeCard, interrupts: Interrupts, deadline: Deadline) -> list[NodeCard]:
    """Return the cards of all launchers, in order of arrival."""
    cards: list[NodeCard] = []
    while len(cards) < mine.num_nodes:
        try:
            await_key(store, f"card/{len(cards)}", interrupts, Deadline(deadline.slice_s(_SLICE_S)))
        except DistStoreError:
            if store.check(["lost"]):
                raise DistNetworkError(store.get("lost").decode()) from None
            if deadline.expired():
                there = ", ".join(card.host for card in _present(store))
                raise DistTimeoutError(
                    f"{len(cards)} of {mine.num_nodes} hosts (--nnodes) joined within {deadline.timeout_s:g} s: {there}"
                    "; start meshrun on the others too, with the same --rdzv-endpoint"
                ) from None
        else:
            cards.append(NodeCard.decode(store.get(f"card/{len(cards)}")))
            check_card(cards[-1], mine)
    return cards
