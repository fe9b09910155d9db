"""Backend and Plan: they carry out the calls of one group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from meshdist.arrays.host import Array
from meshdist.arrays.overlap import KnownApart
from meshdist.collectives.algorithms.blocks import exchange, flat
from meshdist.errors import DistBackendError, DistError, DistTimeoutError
from meshdist.runtime.call import Buffers, Call, Signature, each
from meshdist.runtime.call_mismatch import CallCheck
from meshdist.runtime.departure import Departure
from meshdist.runtime.waiting import Incoming, Probe, Waitable, wait_until
from meshdist.system.deadline import Deadline

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import CodeType

    from meshdist.backends.backend_options import BackendOptions
    from meshdist.core import Step
    from meshdist.runtime.call import CompositionSpec
    from meshdist.runtime.device_calls import DeviceCalls
    from meshdist.runtime.flight_recorder import CallFacts
    from meshdist.runtime.interfaces import OwnMessages


# Bytes of a call's text that are sent with its fingerprint.
_TEXT_BYTES = 248

# A fast path for small messages: it sends or receives a plain array, or returns False without effect if the caller
# has to use `send` or `recv`.
FastPath: TypeAlias = "Callable[[Array], bool]"
# A context with plain arrays in the place of those that the user passed.
Plain: TypeAlias = "Callable[[], AbstractContextManager[tuple[Buffers, Buffers]]]"


class Choice(NamedTuple):
    """Which way of several carries out a kind of call.

    Attributes:
        kind: The collective, the reduction and the dtype.
        most_bytes: For calls of up to this many bytes, and more than half of it.
        ways: The ways by name; the first one is the default.
        chosen: The number of the chosen way; None while they are tried.
        seconds: The shortest time measured of each way, on the slowest rank; empty while a choice is only
            remembered.
        worthwhile: Another way than the default is chosen if the default takes more than so many times as long.
        is_far: It is for calls between processors without a common cache.
    """

    kind: str
    most_bytes: int
    ways: tuple[str, ...]
    chosen: int | None
    seconds: Mapping[str, float]
    worthwhile: float = 1.0
    is_far: bool = False

    @property
    def title(self) -> str:
        """The kind of call, and between which processors."""
        return f"{self.kind}, between processors without a common cache" if self.is_far else self.kind


class Plan(ABC):
    """A prepared call: everything that does not change between calls is computed.

    Plans are created once per signature and group and cached, so they must not hold the arrays of the first call.

    Attributes:
        signature: What the ranks compare.
        error_prefix: Prefix of error messages about the call.
        copies: Whether everything sent is copied before anything is received.
        apart: Whether what is sent must not share memory with what is received.
        known_apart: Checks whether the arrays of a call share memory.
        facts: What the flight recorder keeps of its calls.
        caller: The code that ran it last.
        go_on: Goes on after the first step of a call, in which the `runner` found that the ranks' sizes are not those
            agreed, or that arrays are shared; None for plans in which it looks for neither.
    """

    copies = False
    go_on: Callable[[Any, Any], object] | None = None
    facts: CallFacts
    caller: CodeType | None = None

    def __init__(self, backend: Backend, call: Call) -> None:
        self.backend = backend
        self.signature = call.signature()
        self.error_prefix = call.error_prefix
        self.apart = not (self.copies or call.collective.in_place)
        self.known_apart = KnownApart(self.apart)

    @property
    def runner(self) -> Callable[[Any, Any], object]:
        """What carries out a call with arrays of this signature, contiguous and apart: `run`, or faster.

        It returns True if the next call has another one.
        """
        return self.run

    @property
    def template(self) -> Step | None:
        """The Step of the core from which that makes those of calls like this one, on arrays of other sizes; or None.

        It is asked for after the first call.
        """
        return None

    @abstractmethod
    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        """Carry out the call, yielding everything that has to be waited for."""

    def run(self, send: Buffers, recv: Buffers) -> None:
        """Carry out the call and return when it is complete."""
        for waitable in self.steps(send, recv):
            self.wait(waitable)

    def run_strided(self, send: Buffers, recv: Buffers, plain: Plain) -> None:
        """Carry out a call with arrays of any strides, in native byte order; `plain` gives plain ones instead."""
        with plain() as (sent, received):
            self.run(sent, received)

    def rest(self, send: Buffers, recv: Buffers, word: int, phase: int) -> Iterator[Waitable]:
        """Go on with a call that the core has begun: it has signalled `word`, and uses the slots of `phase`."""
        raise NotImplementedError  # the core begins calls of one step only

    def wait(self, waitable: Waitable) -> None:
        """Block until `waitable` is ready, at most for the group's timeout."""
        self.backend.wait(waitable, self.error_prefix)


class Backend:
    """The backend of one group on one rank.

    A collective that it implements is a method of the collective's name that takes a `Call` and returns a `Plan`; all
    others run the collective's default algorithm over `send` and `recv`. So a backend with these two has every
    collective; one without them has those that it implements. Ranks are those in the group.

    Args:
        options: The group. A backend that a registered function created without options is attached before its first
            call.

    Attributes:
        options: The group.
        rank: This rank in the group.
        size: The number of ranks.
        device_calls: Carries out calls on GPU arrays; None for a backend for CPU arrays.
        bucket_bytes: Arrays of a list are combined into one call up to this size; longer arrays are calls of their own.
        least_strided_bytes: From this size on, the blocks of an array are faster as a list of its parts, with strides,
            than copied to one array; equal on all ranks.
        least_apart_bytes: From this size on, an all_reduce may read one array and write to another; None: never. Equal
            on all ranks.
    """

    device_calls: DeviceCalls | None = None
    bucket_bytes: int = 512 << 10
    least_strided_bytes: int = 256 << 10
    least_apart_bytes: int | None = None
    _num_met = 0

    def __init__(self, options: BackendOptions | None = None) -> None:
        if options is not None:
            self.attach(options)

    def attach(self, options: BackendOptions) -> None:
        """Set the group of this backend."""
        self.options = options
        self.rank = options.rank
        self.size = len(options.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group, in group order."""
        return self.options.ranks

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        """Post a message without blocking. The result is ready when `array` may be changed."""
        raise DistBackendError(f"{type(self).__name__} sends no messages")

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        """Post a receive into `array`, from rank `src` or, if None, from any rank, without blocking.

        Messages from one rank with one tag keep their order, and match the receives in the order in which these were
        posted.
        """
        raise DistBackendError(f"{type(self).__name__} receives no messages")

    def probe(self, src: int | None, tag: int | None) -> Probe:
        """Return the wait for a message from rank `src`, None for any, with `tag`, None for any, which is not received.

        A receive of the same source and tag takes the message that is found.
        """
        raise DistBackendError(f"{type(self).__name__} cannot look for a message without receiving it")

    def own_messages(self) -> OwnMessages | None:
        """Return the messages of this rank to itself, if they share a queue with those of other ranks; else None."""
        return None

    def left_over(self) -> list[tuple[int, int]]:
        """Return the source and the tag of messages that have arrived and were not received, as far as this rank knows.

        Negative tags are those of collectives.
        """
        return []

    def disagreement(self) -> str:
        """Return which calls of the ranks disagree, in words, as far as no call has raised that so far; else ""."""
        return ""

    def fast_send(self, dst: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> FastPath | None:
        """Return a fast path for messages of a kind to a rank that messages were sent to before; None if there is none.

        The array may be changed as soon as it returns, and the message keeps its order.
        """
        return None

    def fast_isend(self, dst: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> FastPath | None:
        """Return a fast path for messages that may be buffered although they are longer than a `send` buffers."""
        return self.fast_send(dst, tag, dtype, shape)

    def fast_recv(self, src: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> FastPath | None:
        """Return a fast path for messages of a kind from a rank that has sent messages before; None if there is none.

        It receives a message that has arrived or arrives within moments.
        """
        return None

    @classmethod
    def has_own(cls, native: str) -> bool:
        """Return whether the backend implements the collective with this native name."""
        return hasattr(cls, native)

    def staged_calls(self) -> DeviceCalls:
        """Return the carrier of calls on GPU arrays through the CPU; see `device_calls`."""
        from meshdist.backends.host_staging import HostStagedCalls

        return HostStagedCalls()

    def check_in(self, signature: Signature) -> Iterator[Waitable]:
        """Begin a collective over send and recv by comparing the ranks' signatures, by default in messages."""
        return _compare_calls(self, signature)

    def meet(self, error_prefix: str, timeout_s: float, is_first: bool) -> None:
        """Wait until all ranks of the group have called this; after a timeout, it is as if this rank had not.

        The ranks meet in the store, which takes longer than a collective. `is_first` says that this rank has made no
        call on the group before.

        Raises:
            DistTimeoutError: Some ranks did not call; names them.
            DistError: A rank is gone.
        """
        from meshdist.backends.arrivals import Arrivals  # only monitored barriers need it

        arrivals = Arrivals(self, self._num_met, is_first)
        try:
            bell, observer = self.options.bells.mine(), self.options.observer
            wait_until(arrivals, bell, Deadline(timeout_s), error_prefix, observer)
        except DistTimeoutError:
            if arrivals.withdraw():
                raise
        self._num_met += 1
        arrivals.forget_last()

    def check_open(self) -> None:
        """Raise the error that the backend has given up with, if it has."""

    def is_behind(self) -> bool:
        """Return True if another rank has begun a collective that this one has yet to call, as far as is known."""
        return False

    def describe(self, rank: int) -> str:
        """Return a rank of the group as messages name it."""
        return self.options.describe(rank)

    def departure_of(self, rank: int) -> Departure | None:
        """Return how a rank of the group has left it; None if it has not."""
        return self.options.gone(rank)

    def connect(self) -> Iterator[Waitable]:
        """Prepare for collectives: the first step of each one, without effect after the first.

        All ranks of the group do this together, so it may wait for the last of them.
        """
        return iter(())

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array in the memory that collectives are fastest on; by default, an ordinary array."""
        return np.empty(shape, dtype)

    def choices(self) -> list[Choice]:
        """Return how the calls are carried out of which there are several ways; by default there is one of each."""
        return []

    def begin_close(self) -> None:
        """Let what is in progress end, and tell the peers that this rank leaves.

        A world calls it on the backends of all groups before it closes the first one: `close` may wait for peers.
        """

    def close(self) -> None:
        """Release the resources of this backend. No call of the group is in progress."""

    def give_up(self, error: DistError) -> None:
        """Notify the peers that this rank gives up because of `error`, so that none waits for it.

        Backends of this package override it; those of users override `abort`, which is called with the message.
        """
        self.abort(str(error))

    def abort(self, reason: str) -> None:
        """Notify the peers that this rank gives up, and why, so that none of them waits for it."""
        if type(self).give_up is not Backend.give_up:
            self.give_up(DistBackendError(reason))

    def wait(self, waitable: Waitable, error_prefix: str, deadline: Deadline | None = None) -> None:
        """Block until `waitable` is ready, at most until the deadline, or for the group's timeout if None."""
        if waitable.ready():
            return
        options = self.options
        wait_until(
            waitable, options.bells.mine(), deadline or Deadline(options.timeout_s), error_prefix, options.observer
        )

    def require(self, call: Call) -> None:
        """Raise if the backend has no way to carry out `call`, before any part of it has begun.

        Raises:
            DistBackendError: It neither implements the collective nor sends messages.
        """
        collective = call.collective
        while collective.composition is not None:
            collective = collective.composition.inner
        has_messages = type(self).send is not Backend.send and type(self).recv is not Backend.recv
        if not has_messages and not hasattr(self, collective.native):
            raise DistBackendError(
                f"{call.error_prefix}: {type(self).__name__} cannot carry out this call: it has neither a method"
                f" {collective.native}(call) nor send and recv, which the default algorithm needs"
            )

    def prepare(self, call: Call) -> Plan:
        """Return the plan of `call`: one of this backend, else of the default algorithm."""
        if call.collective.composition is not None:
            return plan_composed(self, call, call.collective.composition)
        native: Callable[[Call], Plan] | None = getattr(self, call.collective.native, None)
        return native(call) if native is not None else DefaultPlan(self, call)


class DefaultPlan(Plan):
    """Runs a collective's default algorithm over the backend's messages."""

    def __init__(self, backend: Backend, call: Call) -> None:
        super().__init__(backend, call)
        self._call = call.without_buffers()

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        yield from self.backend.check_in(self.signature)
        yield from self._call.collective.default(self.backend, self._call, send, recv)


class LonePlan(Plan):
    """The plan of a group of one rank: what is sent is received, as no reduction changes the arrays of one rank."""

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        self.run(send, recv)
        return iter(())

    def run(self, send: Buffers, recv: Buffers) -> None:
        if send is not recv:
            for given, taken in zip(each(send), each(recv), strict=True):
                flat(taken)[...] = flat(given)


def plan_alone(backend: Backend, call: Call) -> Plan:
    """Return the plan of a call in a group of one rank."""
    # The exscan of the first rank is the identity of the reduction.
    return (DefaultPlan if call.collective.native == "exscan" else LonePlan)(backend, call)


def _compare_calls(backend: Backend, signature: Signature) -> Iterator[Waitable]:
    """Compare this rank's call with those of others; raise DistBackendError if another rank makes another call."""
    text = signature.text.encode()[:_TEXT_BYTES]
    mine = np.frombuffer(signature.fingerprint.to_bytes(8, "little") + text.ljust(_TEXT_BYTES, b"\0"), np.uint8)
    other = np.empty_like(mine)
    # Dissemination: in round k, compare with the rank at distance 2 ** k. If all comparisons succeed, all calls are
    # equal, since a chain of comparisons connects any two ranks.
    distance = 1
    while distance < backend.size:
        dst, src = (backend.rank + distance) % backend.size, (backend.rank - distance) % backend.size
        yield from exchange(backend, mine, dst, other, src)
        if not np.array_equal(mine, other):
            theirs = bytes(other[8:]).rstrip(b"\0").decode(errors="replace")
            check = CallCheck(backend.rank, backend.options.ranks)
            raise check.error({backend.rank: signature.text, src: theirs})
        distance *= 2


def plan_composed(backend: Backend, call: Call, composition: CompositionSpec) -> Plan:
    """Return the plan of a collective of lists, which a collective of flat arrays carries out.

    If each array could be a call of its own, long arrays are. Short ones are combined into buckets no longer than a
    long array, so that little memory is needed and the caches hold it.
    """
    if composition.by_element:
        pairs = zip(each(call.send), each(call.recv), strict=True)
        parts = cut([max(give.nbytes, take.nbytes) for give, take in pairs], backend.bucket_bytes)
        if len(parts) > 1:
            return BucketPlan(backend, call, composition, parts)
    return ComposedPlan(backend, call, composition)


def cut(sizes: Sequence[int], most: int) -> list[slice]:
    """Cut a list of arrays, in order, into parts of at most `most` bytes; a longer array is a part of its own."""
    begins, total = [0], 0
    for place, size in enumerate(sizes):
        if total + size > most and place > begins[-1]:
            begins.append(place)
            total = 0
        total += size
    return [slice(begin, end) for begin, end in zip(begins, [*begins[1:], len(sizes)], strict=True)]


class ComposedPlan(Plan):
    """Runs a collective of lists as one call on a flat array."""

    copies = True

    def __init__(self, backend: Backend, call: Call, composition: CompositionSpec) -> None:
        super().__init__(backend, call)
        self._call = call.without_buffers()
        self._composition = composition
        self._writes = call.collective.writes(call)
        self._inner = backend.prepare(composition.inner_call(call))

    def run(self, send: Buffers, recv: Buffers) -> None:
        flat = self._composition.put(self._call, send)
        result = self._composition.room(self._call, flat)
        self._inner.run(flat, result)
        if self._writes:
            self._composition.take(self._call, result, recv)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        flat = self._composition.put(self._call, send)
        result = self._composition.room(self._call, flat)
        yield from self._inner.steps(flat, result)
        if self._writes:
            self._composition.take(self._call, result, recv)


class BucketPlan(Plan):
    """Runs a collective of lists in parts: one array as a call of its own, several as one flat array."""

    def __init__(self, backend: Backend, call: Call, composition: CompositionSpec, parts: list[slice]) -> None:
        super().__init__(backend, call)
        words = call.collective.agreed(call)
        # Errors and the comparison of calls refer to the whole lists.
        outer = call._replace(collective=call.collective.under(call.collective.name, lambda _: words))
        inner = call._replace(collective=composition.inner.under(call.collective.name, lambda _: words))
        self._parts: list[tuple[int | slice, Plan]] = []
        for part in parts:
            if part.stop - part.start == 1:
                place: int | slice = part.start
                plan = backend.prepare(_pick(inner, place))
            else:
                place, plan = part, ComposedPlan(backend, _pick(outer, part), composition)
            self._parts.append((place, plan))

    def run(self, send: Buffers, recv: Buffers) -> None:
        gives, takes = each(send), each(recv)
        for place, plan in self._parts:
            plan.run(gives[place], takes[place])

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        gives, takes = each(send), each(recv)
        for place, plan in self._parts:
            yield from plan.steps(gives[place], takes[place])


def _pick(call: Call, place: int | slice) -> Call:
    send, recv = each(call.send)[place], each(call.recv)[place]
    return call._replace(send=recv if call.collective.in_place else send, recv=recv)
