"""How the launchers of several hosts meet: at a store that one of them keeps, to agree on who is who."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Sequence
from typing import NamedTuple

from meshdist._version import __version__
from meshdist.deadline import Deadline
from meshdist.errors import DistError, DistNetworkError, DistStoreError, DistTimeoutError
from meshdist.handshake import secret_from_environment
from meshdist.launch.interrupts import Interrupts
from meshdist.launch.plan import NodeCard, Plan, check_card, number_nodes
from meshdist.store import Store, TCPStore
from meshdist.store.address import PortTakenError, endpoint, resolve
from meshdist.store.client import NotReachedError

_SLICE_S = 0.25
_PAUSE_S = 0.02
_LAST_WORDS_S = 2.0
_STORE_TIMEOUT_S = 60.0


class Meeting(NamedTuple):
    """Where the launchers meet, and what they were told.

    Attributes:
        host: The host of the store, as all of them know it.
        port: Its port.
        num_nodes: How many hosts there are.
        node: The number of this one, None for any.
        run_id: The name of the job, None for any.
        timeout_s: How long to wait for the others.

    Example:
        >>> Meeting("node1", 29400, num_nodes=2).node is None
        True
    """

    host: str
    port: int
    num_nodes: int
    node: int | None = None
    run_id: str | None = None
    timeout_s: float = 600.0


class Met(NamedTuple):
    """A launcher that has met the others.

    Attributes:
        meeting: What it was told.
        plan: What they agreed on.
        node: The number of this host.
        number: How many launchers came before this one.
        store: Where they talk; of this launcher's own where that leads.
        lifeline: A connection whose end tells the others that this launcher is gone.
        secret: What let them in.
        leads: True for the one that keeps the store.

    Example:
        >>> "plan" in Met._fields
        True
    """

    meeting: Meeting
    plan: Plan
    node: int
    number: int
    store: TCPStore
    lifeline: TCPStore
    secret: bytes
    leads: bool


class SignalledError(Exception):
    """Say that a signal to the launcher ended a wait.

    Example:
        >>> issubclass(SignalledError, Exception)
        True
    """


def meet(meeting: Meeting, num_ranks: int, max_restarts: int, interrupts: Interrupts) -> Met:
    """Meet the launchers on the other hosts, and agree with them on a plan.

    Raises:
        SignalledError: A signal came.
        DistError: The store cannot be had, or does not let this launcher in; or some launchers did not come.
        ValueError: They were told different things.
    """
    secret = secret_from_environment()
    deadline = Deadline(meeting.timeout_s)
    mine = NodeCard(
        socket.gethostname(), num_ranks, meeting.num_nodes, meeting.node, meeting.run_id, f"meshdist {__version__}"
    )
    with contextlib.ExitStack() as on_failure:
        store, lifeline, number = _enter(meeting, mine, secret, interrupts, deadline)
        on_failure.callback(store.close)
        on_failure.callback(lifeline.close)
        store.set(f"card/{number}", mine.encode())
        if store.is_master:
            plan = _lead(store, mine, number, max_restarts, interrupts, deadline)
        else:
            await_key(store, "plan", interrupts, Deadline(deadline.remaining_s() + _LAST_WORDS_S))
            plan = Plan.decode(store.get("plan"))
        if plan.problem or number >= len(plan.nodes):
            say_farewell(store, number)
            raise DistError(plan.problem or _too_many(meeting, plan.hosts))
        on_failure.pop_all()
    return Met(meeting, plan, plan.nodes[number], number, store, lifeline, secret, store.is_master)


def await_key(store: Store, key: str, interrupts: Interrupts, deadline: Deadline) -> None:
    """Wait until `key` is there; see `await_all`."""
    await_all(store, [key], interrupts, deadline)


def await_all(store: Store, keys: Sequence[str], interrupts: Interrupts, deadline: Deadline) -> None:
    """Wait until all `keys` are there.

    Raises:
        SignalledError: A signal came.
        DistStoreError: Some were not there at the deadline.
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
    meeting: Meeting, mine: NodeCard, secret: bytes, interrupts: Interrupts, deadline: Deadline
) -> tuple[TCPStore, TCPStore, int]:
    """Return the store, hosted here or by another launcher, the lifeline, and how many launchers came before."""
    gone = f"the launcher on {mine.host} has gone before the job began"
    while True:
        store = _open(meeting, secret, deadline)
        if store is not None:
            lifeline = TCPStore(meeting.host, store.port, timeout=_STORE_TIMEOUT_S, secret=secret)
            lifeline.bequeath({"early": gone})
            number = store.add("num_launchers", 1) - 1
            if number < meeting.num_nodes:
                lifeline.bequeath({"early": gone, **last_words(number)})
                return store, lifeline, number
            lifeline.bequeath({})
            lifeline.close()
            # An earlier run with the same secret and place may be on its way out; this one comes after it.
            is_over = store.check(["over"])
            hosts = [card.host for card in _present(store, meeting.num_nodes)]
            store.close()
            if not is_over:
                raise DistError(_too_many(meeting, hosts))
            threading.Event().wait(deadline.slice_s(_PAUSE_S))
        if interrupts.pending():
            raise SignalledError


def _too_many(meeting: Meeting, hosts: Sequence[str]) -> str:
    return (
        f"at {endpoint(meeting.host, meeting.port)}, the {len(hosts)} launchers of this job (--nnodes) are there "
        f"already, on {', '.join(hosts)}; is this one too many, or the port another job's?"
    )


def _open(meeting: Meeting, secret: bytes, deadline: Deadline) -> TCPStore | None:
    """Return the store, None if it was not there for a moment.

    Who was told to be the first host keeps it; where no one was told, who can be reached at its address.
    """
    where = endpoint(meeting.host, meeting.port)
    if meeting.node == 0 or (meeting.node is None and _is_this_host(meeting.host)):
        try:
            return TCPStore(
                meeting.host,
                meeting.port,
                is_master=True,
                timeout=_STORE_TIMEOUT_S,
                wait_for_workers=False,
                secret=secret,
            )
        except PortTakenError:
            if meeting.node == 0:
                raise
    try:
        store = TCPStore(meeting.host, meeting.port, timeout=deadline.slice_s(_SLICE_S), secret=secret)
    except NotReachedError as error:
        if not deadline.expired():
            return None
        raise DistTimeoutError(
            f"no launcher keeps a store at {where} for {deadline.timeout_s:g} s: the first host (--node-rank 0), or "
            f"the one with that address, does; does meshrun run there, and can this host reach it? ({error.__cause__})"
        ) from error
    store.set_timeout(_STORE_TIMEOUT_S)
    return store


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
    """Wait for all launchers, and tell them the plan, or why there is none."""
    try:
        cards = _gather(store, mine, interrupts, deadline)
        nodes = number_nodes(cards, number)
    except SignalledError:
        store.set("plan", Plan(problem=f"the launcher on {mine.host} was ended").encode())
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
        await_farewells(store, [other for other in _numbers(store, mine.num_nodes) if other != number], _LAST_WORDS_S)
    return plan


def _present(store: Store, num_nodes: int) -> list[NodeCard]:
    return [NodeCard.decode(store.get(f"card/{number}")) for number in _numbers(store, num_nodes)]


def _numbers(store: Store, num_nodes: int) -> list[int]:
    return [number for number in range(num_nodes) if store.check([f"card/{number}"])]


def _gather(store: TCPStore, mine: NodeCard, interrupts: Interrupts, deadline: Deadline) -> list[NodeCard]:
    """Return the cards of all launchers, in the order in which they came."""
    cards: list[NodeCard] = []
    while len(cards) < mine.num_nodes:
        try:
            await_key(store, f"card/{len(cards)}", interrupts, Deadline(deadline.slice_s(_SLICE_S)))
        except DistStoreError:
            if store.check(["early"]):
                raise DistNetworkError(store.get("early").decode()) from None
            if deadline.expired():
                there = ", ".join(card.host for card in _present(store, mine.num_nodes))
                raise DistTimeoutError(
                    f"{len(cards)} of {mine.num_nodes} hosts (--nnodes) came within {deadline.timeout_s:g} s: {there}; "
                    "start meshrun on the others too, with the same --rdzv-endpoint"
                ) from None
        else:
            cards.append(NodeCard.decode(store.get(f"card/{len(cards)}")))
            check_card(cards[-1], mine)
    return cards


def say_farewell(store: Store, number: int) -> None:
    """Say that the launcher that came as `number` needs the store no longer."""
    store.set(_farewell(number), "")


def last_words(number: int) -> dict[str, str]:
    """Return what the store is to set for the launcher that came as `number`, if that is gone without a farewell."""
    return {_farewell(number): ""}


def await_farewells(store: Store, numbers: Sequence[int], timeout_s: float) -> None:
    """Keep the store until the launchers that came as `numbers` have said farewell or are gone, or the deadline."""
    with contextlib.suppress(DistStoreError):
        store.wait([_farewell(number) for number in numbers], timeout_s)


def _farewell(number: int) -> str:
    return f"farewell/{number}"
