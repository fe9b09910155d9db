"""Look up collectives by name, register new ones, and compute the bytes that they send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from meshdist.collectives.dataflow import Dataflow
from meshdist.collectives.definition import Collective, GroupFunction, definition_of
from meshdist.collectives.methods import CollectiveMethods
from meshdist.collectives.tracing import Message, bytes_to_each, call_of, rounds_of, sampled_call
from meshdist.collectives.traffic import MESSAGE, NOTHING, Seat, Sent, nbytes_of

if TYPE_CHECKING:
    from meshdist.runtime.hooks import CallInfo

F = TypeVar("F", bound=GroupFunction[Any, Any])


def register(function: F) -> F:
    """Make a collective a method of groups and meshes, known by its name; also a decorator.

    The collectives of this package are listed in `meshdist.collectives.methods`; this adds one at run time, invisible
    to type checkers.

    Args:
        function: A function made by `@collective` or `@composed`.

    Raises:
        ValueError: A method of this name exists.

    Returns:
        The function.
    """
    if hasattr(CollectiveMethods, function.name):
        raise ValueError(f"register: groups have a method {function.name!r} already; give the collective another name")
    setattr(CollectiveMethods, function.name, function)
    return function


def unregister(name: str) -> None:
    """Undo `register`."""
    delattr(CollectiveMethods, name)


def functions() -> dict[str, GroupFunction[Any, Any]]:
    found = {name: value for name, value in vars(CollectiveMethods).items() if isinstance(value, GroupFunction)}
    return {name: function for name, function in found.items() if function.dataflow is not None}


def function_of(name: str) -> GroupFunction[Any, Any]:
    known = functions()
    if name not in known:
        from meshdist._spelling import spelt  # which an error alone needs

        meant = spelt(name, known)
        hint = "" if meant is None else f"; did you mean {meant!r}?"
        raise ValueError(f"unknown collective {name!r}; choose from {', '.join(sorted(known))}{hint}")
    return known[name]


def dataflow_of(name: str) -> Dataflow:
    found = function_of(name).dataflow
    assert found is not None
    return found


def sent_bytes(name: str, nbytes: int, size: int) -> float:
    """Return the bytes that the busiest rank of a group must send, or receive as the root of a gather.

    All-reduce 2 S (n - 1) / n; reduce-scatter, all-gather, all-to-all, gather and scatter S (n - 1) / n; broadcast and
    reduce S; a barrier none. Without declared traffic: what the default algorithm sends or receives on rank 0.

    Args:
        name: The name of a collective, or of a message: send, isend, recv or irecv.
        nbytes: S, the size of the call in bytes.
        size: n, the number of ranks.

    Raises:
        ValueError: The collective is unknown; the message lists the known ones.

    Example:
        >>> sent_bytes("all_reduce", 1000, 4)
        1500.0
    """
    traffic = dataflow_of(name).traffic
    if traffic is not None:
        return float(nbytes * traffic.share(size))
    rounds, sample_bytes = sampled_rounds(name, size)
    messages = [message for posted in rounds for message in posted]
    sent = sum(message.nbytes for message in messages if message.is_sent)
    received = sum(message.nbytes for message in messages if not message.is_sent)
    return nbytes * max(sent, received) / sample_bytes


def sent_by(name: str, nbytes: int, seat: Seat, root: int | None = None) -> Sent:
    """Return the bytes that one rank sends when as few as possible go between hosts.

    - Reduce-scatter: first inside the host, which leaves S / m on each of its m ranks, then the parts of other hosts:
      S (m - 1) / m inside, S (n - m) / (m n) between. All-gather: the reverse. All-reduce: both.
    - All-to-all, and scatter on its source: a block to each rank. Gather: S / n, to the root.
    - Broadcast: a chain from the source through its host and then from host to host; each rank sends S to the next.
      Reduce: the same chain in reverse.
    - A message: its bytes to the receiver.
    - A collective without declared traffic: what its default algorithm sends, from rank 0 if it has a root.

    Args:
        name: The name of the collective, as for `sent_bytes`.
        nbytes: S; of a gather, the bytes that this rank gives.
        seat: The rank, its group and their hosts.
        root: The source or destination, as a rank of the group; of a message the receiver.

    Raises:
        ValueError: The collective is unknown.

    Example:
        >>> sent_by("all_reduce", 1200, Seat(0, ["a", "a", "b", "b"]))
        Sent(inside=1200, between=600)
        >>> sent_by("broadcast", 1200, Seat(1, ["a", "a", "b", "b"]), root=0)
        Sent(inside=0, between=1200)
    """
    traffic = dataflow_of(name).traffic
    if seat.size == 1 or traffic is NOTHING:
        return Sent(0, 0)
    if traffic is not None:
        return traffic.sent(seat, nbytes, root)
    call, sample_bytes = sampled_call(_collective(name), seat.rank, seat.size)
    return seat.sends([round(sent * nbytes / sample_bytes) for sent in bytes_to_each(call)])


def sent_in_call(call: CallInfo, nbytes: int, seat: Seat) -> Sent:
    """Return the bytes that a rank sends in a call of `nbytes` bytes, as the user made it."""
    if call.messages:
        sent = [sent_in_call(message, nbytes_of(message.send), seat) for message in call.messages]
        return Sent(sum(each.inside for each in sent), sum(each.between for each in sent))
    if call.collective is None:  # a message
        return (NOTHING if call.send is None else MESSAGE).of_call(call, nbytes, seat)
    collective = definition_of(call.collective)
    if collective.dataflow.traffic is not None:
        return collective.dataflow.traffic.of_call(call, nbytes, seat)
    own = call_of(collective, seat.rank, seat.size, call.send, call.recv, root=call.root, splits=call.splits)
    return seat.sends(bytes_to_each(own))


def sampled_rounds(name: str, size: int) -> tuple[list[list[Message]], int]:
    """Return the messages that rank 0 posts between waits in the default algorithm, and the bytes of the call."""
    call, sample_bytes = sampled_call(_collective(name), 0, size)
    return list(rounds_of(call)), sample_bytes


def _collective(name: str) -> Collective[..., Any]:
    found = function_of(name)
    assert isinstance(found, Collective)
    return found
