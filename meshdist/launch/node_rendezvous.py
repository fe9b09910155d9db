"""Rendezvous of the launchers of several hosts: they meet at a store that one of them keeps, and agree on a plan."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Sequence
from typing import NamedTuple

from meshdist._version import __version__
from meshdist.errors import DistError, DistNetworkError, DistStoreError, DistTimeoutError
from meshdist.launch.interrupts import Interrupts
from meshdist.launch.plan import NodeCard, Plan, check_card, number_nodes
from meshdist.security.credentials import secret_from_environment
from meshdist.security.handshake import HANDSHAKE_TIMEOUT_S, HandshakeUnanswered
from meshdist.store import Store, TCPStore
from meshdist.store.address import PortTakenError, endpoint, resolve
from meshdist.store.client import NotReachedError
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


class Met(NamedTuple):
    """A launcher that has met the others."""

    rendezvous: NodeRendezvous
    plan: Plan
    node: int  # the number of this host
    number: int  # how many launchers came before this one
    store: TCPStore  # the store of the launchers; it runs in the launcher that leads
    lifeline: TCPStore  # a connection whose end shows the others that this launcher is gone
    secret: bytes  # that of the launchers' store
    leads: bool  # True for the launcher that keeps the store


class SignalledError(Exception):
    """A signal to the launcher ended a wait."""


def meet(rendezvous: NodeRendezvous, num_ranks: int, max_restarts: int, interrupts: Interrupts) -> Met:
    """Meet the launchers on the other hosts, and agree with them on a plan.

    Raises:
        SignalledError: A signal came.
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
    )
    with contextlib.ExitStack() as on_failure:
        store, lifeline, number = _enter(rendezvous, mine, secret, interrupts, deadline)
        on_failure.callback(store.close)
        on_failure.callback(lifeline.close)
        store.set(f"card/{number}", mine.encode())
        if store.is_master:
            plan = _lead(store, mine, number, max_restarts, interrupts, deadline)
        else:
            await_key(store, "plan", interrupts, Deadline(deadline.remaining_s() + _SIGN_OFF_S))
            plan = Plan.decode(store.get("plan"))
        if plan.problem or number >= len(plan.nodes):
            sign_off(store, number)
            raise DistError(plan.problem or _too_many(rendezvous, plan.hosts))
        on_failure.pop_all()
    return Met(rendezvous, plan, plan.nodes[number], number, store, lifeline, secret, store.is_master)


def await_key(store: Store, key: str, interrupts: Interrupts, deadline: Deadline) -> None:
    await_all(store, [key], interrupts, deadline)


def await_all(store: Store, keys: Sequence[str], interrupts: Interrupts, deadline: Deadline) -> None:
    """Wait until all `keys` are in the store.

    Raises:
        SignalledError: A signal came.
        DistStoreError: Some keys were missing at the deadline.
        DistNetworkError: The store is gone.
    """
    while True:
        try:
            store.wait(keys, deadline.slice_s(_SLICE_S))
            return
        except DistStoreError:
            if interrupts.pending():
                raise SignalledError from None
            if deadline.expired():
                raise


def _enter(
    rendezvous: NodeRendezvous, mine: NodeCard, secret: bytes, interrupts: Interrupts, deadline: Deadline
) -> tuple[TCPStore, TCPStore, int]:
    """Return the store, hosted here or by another launcher, the lifeline, and how many launchers came before."""
    gone = f"the launcher on {mine.host} left before the job began"
    while True:
        store = _open(rendezvous, secret, deadline)
        if store is not None:
            lifeline = TCPStore(rendezvous.host, store.port, timeout=_STORE_TIMEOUT_S, secret=secret)
            lifeline.set_last_will({"lost": gone})
            number = store.add("num_launchers", 1) - 1
            if number < rendezvous.num_nodes:
                lifeline.set_last_will({"lost": gone, **last_will(number)})
                return store, lifeline, number
            lifeline.set_last_will({})
            lifeline.close()
            # An earlier run with the same secret and address may still be ending: wait for its end.
            is_over = store.check(["over"])
            hosts = [card.host for card in _present(store, rendezvous.num_nodes)]
            store.close()
            if not is_over:
                raise DistError(_too_many(rendezvous, hosts))
            threading.Event().wait(deadline.slice_s(_PAUSE_S))
        if interrupts.pending():
            raise SignalledError


def _too_many(rendezvous: NodeRendezvous, hosts: Sequence[str]) -> str:
    return (
        f"at {endpoint(rendezvous.host, rendezvous.port)}, the {len(hosts)} launchers of this job (--nnodes) have "
        f"already joined, on {', '.join(hosts)}; is this one too many, or the port another job's?"
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
            f"no launcher opened a store at {address} within {deadline.timeout_s:g} s; the meshrun with --node-rank 0, "
            f"or the one on that host, must host it: is it running, and can this host reach it? ({error.__cause__})"
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
    store: TCPStore, mine: NodeCard, number: int, max_restarts: int, interrupts: Interrupts, deadline: Deadline
) -> Plan:
    """Wait for all launchers, and send them the plan, or the reason why there is none."""
    try:
        cards = _gather(store, mine, interrupts, deadline)
        nodes = number_nodes(cards, number)
    except SignalledError:
        store.set("plan", Plan(problem=f"the launcher on {mine.host} was stopped").encode())
        raise
    except (DistError, ValueError) as error:
        plan = Plan(problem=str(error))
    else:
        by_node = sorted(zip(nodes, cards, strict=True), key=lambda pair: pair[0])
        plan = Plan(
            nodes=nodes,
            num_ranks=[card.num_ranks for _, card in by_node],
            hosts=[card.host for _, card in by_node],
            run_id=mine.run_id or secrets.token_hex(8),
            nonce=secrets.token_hex(16),
            max_restarts=max_restarts,
            leader=nodes[number],
        )
    store.set("plan", plan.encode())
    if plan.problem:
        await_sign_offs(store, [other for other in _numbers(store, mine.num_nodes) if other != number], _SIGN_OFF_S)
    return plan


def _present(store: Store, num_nodes: int) -> list[NodeCard]:
    return [NodeCard.decode(store.get(f"card/{number}")) for number in _numbers(store, num_nodes)]


def _numbers(store: Store, num_nodes: int) -> list[int]:
    return [number for number in range(num_nodes) if store.check([f"card/{number}"])]


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
                there = ", ".join(card.host for card in _present(store, mine.num_nodes))
                raise DistTimeoutError(
                    f"{len(cards)} of {mine.num_nodes} hosts (--nnodes) joined within {deadline.timeout_s:g} s: {there}"
                    "; start meshrun on the others too, with the same --rdzv-endpoint"
                ) from None
        else:
            cards.append(NodeCard.decode(store.get(f"card/{len(cards)}")))
            check_card(cards[-1], mine)
    return cards


def sign_off(store: Store, number: int) -> None:
    """Report that launcher `number` needs the store no longer."""
    store.set(_done_key(number), "")


def last_will(number: int) -> dict[str, str]:
    """Return the keys to set in the store if launcher `number` disconnects before `sign_off`."""
    return {_done_key(number): ""}


def await_sign_offs(store: Store, numbers: Sequence[int], timeout_s: float) -> None:
    """Keep the store until these launchers have signed off or disconnected, or until the deadline."""
    with contextlib.suppress(DistStoreError):
        store.wait([_done_key(number) for number in numbers], timeout_s)


def _done_key(number: int) -> str:
    return f"done/{number}"
