"""Backend and Plan: what carries out the calls of one group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from meshdist.arrays import Array
from meshdist.call import Buffers, Call, Signature
from meshdist.deadline import Deadline
from meshdist.errors import DistBackendError
from meshdist.overlap import KnownApart
from meshdist.rank_words import call_process, call_rank
from meshdist.waiting import Doorbells, Waitable, wait_until

if TYPE_CHECKING:
    from types import CodeType

    from meshdist.debug.flight_recorder import CallFacts
    from meshdist.debug.vigil import Vigil
    from meshdist.device_calls import DeviceCalls
    from meshdist.peers import Peers
    from meshdist.store import Store


# A short way of messages: it sends or receives a plain array, and returns False, having done nothing, where `send` or
# `recv` has to.
Express: TypeAlias = "Callable[[Array], bool]"


@dataclass(frozen=True)
class BackendOptions:
    """What a backend is made from.

    Attributes:
        name: The group's name, the same on all its ranks and of no other group.
        label: What messages call it.
        store: Store of this group alone; its keys are seen by the group's ranks only. `withdrawn/<rank>` says how a
            rank of the group went away before it made a backend for it.
        world_store: Store of the world, where ranks of different groups leave word for each other.
        rank: This rank in the group.
        ranks: The global ranks of the group, in group order.
        timeout_s: How long a call may wait, in seconds.
        bells: The doorbells of this rank's threads.
        peers: What is known of the processes of the world.
        leftovers: What this rank's groups cannot give back before a peer has done something: functions that try, and
            return whether they did. Whoever takes more of the same has them try first.
        premises: Functions that say how something that the group rests on is broken, None where it is not; such as
            that the ranks made the same mesh. Asked while ranks are waited for that may never come.
        vigil: Looks after waits that last long, where there is anybody to wait for.
        pg_options: What the user of the group gave for the backend.
        commons: What the engines of this rank's groups have in common, by name. Whoever needs something first puts it
            there; it is closed, by its method `close`, when the world ends.
        device_id: The device that the user gave the group, or else the world; None where it is that of the first array.
    """

    name: str
    label: str
    store: Store
    world_store: Store
    rank: int
    ranks: tuple[int, ...]
    timeout_s: float
    bells: Doorbells
    peers: Peers
    leftovers: list[Callable[[], bool]]
    premises: Sequence[Callable[[], str | None]] = ()
    vigil: Vigil | None = None
    pg_options: Any = None
    commons: dict[str, Any] = field(default_factory=dict)
    device_id: Any = None

    def check_premises(self) -> None:
        """Raise DistBackendError if something that the group rests on is broken."""
        for broken in filter(None, (premise() for premise in self.premises)):
            raise DistBackendError(broken, peer_failed=True)

    def number(self, rank: int) -> int:
        """Return the number of a rank in messages: that in the group, unless this is a part of one."""
        return rank

    @property
    def ranks_in_messages(self) -> tuple[int, ...]:
        """The global ranks that `number` is of."""
        return self.ranks

    def call(self, rank: int) -> str:
        """Return what messages call a rank of the group."""
        return call_rank(self.number(rank), self.ranks_in_messages)

    def describe(self, rank: int) -> str:
        """Return what messages call a rank of the group that is a process."""
        return call_process(self.number(rank), self.ranks_in_messages, self.peers.process(self.ranks[rank]))

    def gone(self, rank: int) -> str | None:
        """Return how a rank of the group went away without taking part in it; None where it did not."""
        key = withdrawn_key(rank)
        if self.store.check([key]):
            return self.store.get(key).decode()
        return self.peers.farewell_of(self.ranks[rank])


def withdrawn_key(rank: int) -> str:
    """Return the key of a group's store under which a rank says that it will not take part."""
    return f"withdrawn/{rank}"


class Plan(ABC):
    """A call prepared: all that does not change from call to call is done.

    It is made once per signature and group and kept, so it must not hold the arrays it was made from.

    Attributes:
        signature: What the peers compare.
        where: How messages about the call begin.
        copies: Whether all that is sent is copied before anything is received.
        apart: Whether what is sent must not share memory with what is received.
        known_apart: Looks whether the arrays of a call share memory that must not.
        facts: What the flight recorder tells of its calls.
        caller: The code that ran it last.
    """

    copies = False
    facts: CallFacts
    caller: CodeType | None = None

    def __init__(self, backend: Backend, call: Call) -> None:
        self.backend = backend
        self.signature = call.signature()
        self.where = call.where
        self.apart = not (self.copies or call.collective.in_place)
        self.known_apart = KnownApart(self.apart)

    @abstractmethod
    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        """Carry out the call, yielding what has to be waited for whenever there is something."""

    def run(self, send: Buffers, recv: Buffers) -> None:
        """Carry out the call and return when it is done."""
        for waitable in self.steps(send, recv):
            self.wait(waitable)

    def wait(self, waitable: Waitable) -> None:
        """Block until `waitable` is ready, at most for the group's timeout."""
        self.backend.wait(waitable, self.where)


class Incoming(Waitable):
    """A message that is asked for.

    Attributes:
        source: The rank in the group that sent it, once it is ready.
    """

    source: int


class Backend:
    """The engine of a group: carries out its calls, for one rank.

    A collective that it can do natively is a method of the collective's name that takes a `Call` and returns a `Plan`;
    for the others, the collective's default algorithm runs over `send` and `recv`. So an engine that has these two has
    every collective; one that has not has those that it has methods for. Ranks are those in the group.

    Args:
        options: What the group is. An engine that its function made without them is given them before its first call.

    Attributes:
        options: What the group is.
        rank: This rank in the group.
        size: The number of ranks.
        device_calls: Carries out the calls on arrays in the memory of a GPU; None for an engine of those on the CPU.
        bucket_bytes: Of lists of arrays, so many bytes are put together for one call; longer arrays go by themselves.
    """

    device_calls: DeviceCalls | None = None
    bucket_bytes: int = 512 << 10

    def __init__(self, options: BackendOptions | None = None) -> None:
        if options is not None:
            self.attach(options)

    def attach(self, options: BackendOptions) -> None:
        """Learn what group this is the engine of."""
        self.options = options
        self.rank = options.rank
        self.size = len(options.ranks)

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        """Post a message; never block. It is ready when `array` may be changed."""
        raise DistBackendError(f"{type(self).__name__} sends no messages")

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        """Post the receipt of a message into `array`, from one rank or, where `src` is None, from any; never block.

        Messages from one rank with one tag keep their order, and go to the receipts in the order of these.
        """
        raise DistBackendError(f"{type(self).__name__} receives no messages")

    def express_to(self, dst: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Express | None:
        """Return a short way for messages of a kind to a rank that has been sent something; None where there is none.

        What it sends may be changed again at once, and is behind all that was sent before.
        """
        return None

    def express_from(self, src: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Express | None:
        """Return a short way for messages of a kind from a rank that has sent something; None where there is none.

        It receives what is there, or comes in a moment.
        """
        return None

    @classmethod
    def has_own(cls, native: str) -> bool:
        """Return whether the engine has a form of its own of the collective whose native form has this name."""
        return hasattr(cls, native)

    def staged_calls(self) -> DeviceCalls:
        """Return what carries out calls on arrays in the memory of a GPU by way of the CPU; see `device_calls`."""
        from meshdist.backends.staged_devices import StagedCalls

        return StagedCalls()

    def check_in(self, signature: Signature) -> Iterator[Waitable]:
        """Begin a collective that runs over send and recv: compare the ranks' signatures, by messages unless it can
        do better.
        """
        from meshdist.backends.meeting import compare_calls

        return compare_calls(self, signature)

    def connect(self) -> Iterator[Waitable]:
        """Get ready for collectives; the first step of every one, and nothing but the first time.

        All ranks of the group do this together, so it may take until the last of them comes.
        """
        return iter(())

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array of the kind that collectives are fastest on; where all are alike, an ordinary one.

        Collectives take it as any other array.
        """
        return np.empty(shape, dtype)

    def close(self) -> None:
        """Give back what this backend holds. The group is at rest."""

    def abort(self, reason: str) -> None:
        """Tell the peers that this rank cannot go on, and why, so that none of them waits for it."""

    def wait(self, waitable: Waitable, where: str, deadline: Deadline | None = None) -> None:
        """Block until `waitable` is ready, at most until the deadline, or for the group's timeout."""
        if waitable.ready():
            return
        options = self.options
        wait_until(waitable, options.bells.mine(), deadline or Deadline(options.timeout_s), where, options.vigil)

    def require(self, call: Call) -> None:
        """Raise where `call` can never be carried out; asked before anything of it has begun.

        Raises:
            DistBackendError: There is neither a method for the collective nor messages.
        """
        collective = call.collective
        while collective.staging is not None:
            collective = collective.staging.inner
        has_messages = type(self).send is not Backend.send and type(self).recv is not Backend.recv
        if not has_messages and not hasattr(self, collective.native):
            raise DistBackendError(
                f"{call.where}: {type(self).__name__} does not carry it out: it has neither a method"
                f" {collective.native}(call) nor send and recv to run the default algorithm over"
            )

    def prepare(self, call: Call) -> Plan:
        """Return the plan of `call`: this backend's own, else one of the default algorithm."""
        if call.collective.staging is not None:
            from meshdist.backends.staged_plan import plan_staged

            return plan_staged(self, call, call.collective.staging)
        native: Callable[[Call], Plan] | None = getattr(self, call.collective.native, None)
        return native(call) if native is not None else DefaultPlan(self, call)


class DefaultPlan(Plan):
    """Runs a collective's default algorithm over the backend's send and recv."""

    def __init__(self, backend: Backend, call: Call) -> None:
        super().__init__(backend, call)
        self._call = call.without_buffers()

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        yield from self.backend.check_in(self.signature)
        yield from self._call.collective.default(self.backend, self._call, send, recv)
