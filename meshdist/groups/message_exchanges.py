"""Calls that consist of messages, and fail as one: sendrecv, and the exchanges of shift and halo_exchange."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from meshdist import core
from meshdist.arrays.device_types import device_type_of
from meshdist.arrays.host import Array, as_array, check_dtype, check_writable, label_of, pack
from meshdist.arrays.interchange import hint_of_input, hint_of_output
from meshdist.arrays.overlap import can_be_filled, share_memory
from meshdist.collectives.definition import known_to_core
from meshdist.errors import DistError
from meshdist.groups.tags_and_probes import MessageGroup, Probes
from meshdist.groups.unposted_messages import PersistentRequest
from meshdist.runtime.departure import failure_of, name_call_instead
from meshdist.runtime.device_calls import DeviceCalls
from meshdist.runtime.plan_cache import remember
from meshdist.runtime.waiting import Waitable
from meshdist.runtime.work import Work

_Message: TypeAlias = "tuple[Any, Any, int]"  # an array, the rank it comes from or goes to, and the tag
# How long a message of a broken group may take to fail.
_FAILING_S = 1.0
# As many messages as an exchange in the core may send.
_MOST_SENDS = 8
# How many calls of sendrecv are looked at again, as the core may be able to carry them out later: the first receive
# from a rank is often posted before that rank has a channel.
_MOST_LOOKS = 16
_NO_BATCH = nullcontext()


class Terms:
    """What the ranks of an exchange must agree on, besides dtypes; one for each kind of arrays and neighbours.

    Attributes:
        words: All of it, for errors other than deadlocks, whose report says what to call.
        own_words: What this rank has of it, for all errors; an empty string where that is not told.
        label: That of the messages; an empty string where nothing is compared.
        periodic: The argument of the user's call.
        other_label: The label for the other value of `periodic`.
    """

    __slots__ = ("label", "other_label", "own_words", "periodic", "words")

    def __init__(
        self, words: str, label: str = "", periodic: bool = False, other_label: str = "", own_words: str = ""
    ) -> None:
        self.words = words
        self.own_words = own_words
        self.label = label
        self.periodic = periodic
        self.other_label = other_label

    def difference(self, sent: str) -> str:
        """Return, in words, what is different where a message was sent with the label `sent`."""
        if not sent or not self.label:
            return ""
        if sent == self.other_label:
            return f": periodic={not self.periodic} there, and periodic={self.periodic} here"
        return ": the array has a different shape, or an argument a different value"

    def told_with(self, error: DistError) -> str:
        """Return what is added to the error of an exchange."""
        return "".join(f"; {words}" for words in ("" if error.hang_report else self.words, self.own_words) if words)


_NO_TERMS = Terms("")


def terms_of(array: Any, values: tuple[Any, ...], periodic: bool, words: str) -> Terms:
    """Return the terms of an exchange of arrays like this one: its shape, `values` and `periodic`; on the CPU alone."""
    if type(array) is not np.ndarray:
        return Terms(words)
    label, other_label = (label_of(array.shape, (*values, flag)) for flag in (periodic, not periodic))
    return Terms(words, label, periodic, other_label)


class Exchanges(Probes):
    """Sends and receives in one call, whose errors and records name the function that the user called."""

    def __init__(self, group: MessageGroup) -> None:
        super().__init__(group)
        # What `exchange` and `sendrecv` call: the core begins again what it knows, unless the group has observers.
        self._begin_send = known_to_core(self._observed_isend)
        self._begin_receive = known_to_core(self._observed_irecv)
        # By the user's function: requests whose arguments have been checked, by peer, tag, dtype, shape and label.
        self._isends: defaultdict[str, dict[Any, PersistentRequest]] = defaultdict(dict)
        self._ireceives: defaultdict[str, dict[Any, PersistentRequest]] = defaultdict(dict)
        # What carries exchanges out in the core, by terms and tag, or by arguments; emptied when the group ends.
        self._exchanges: dict[tuple[Any, ...], core.Exchange] = {}
        self._num_looks = 0
        # The DeviceCalls that hold back messages until the end of a block; None outside of a block.
        self._batches: list[DeviceCalls] | None = None

    @abstractmethod
    def isend(self, tensor: Any, dst: int, tag: int, of: str = "isend", label: str = "") -> Work: ...
    @abstractmethod
    def irecv(self, tensor: Any, src: int | None, tag: int, of: str = "irecv", label: str = "") -> Work: ...

    def sendrecv(self, send: Any, recv: Any, dst: int, src: int | None, tags: tuple[int, int]) -> int:
        """Send a message and receive one; return the sender."""
        of = "sendrecv"
        error_prefix = self._group.error_prefix(of)
        # Arrays of kinds that were sent and received before are plain but for their strides, and recv can be written.
        is_known = (
            known_send(self._isends[of], send, dst, tags[0]) is not None
            and known_receive(self._ireceives[of], recv, src, tags[1]) is not None
            and not share_memory(send, recv)
        )
        on_cpu = is_known or self._check_exchange(error_prefix, send, recv, tags)
        if is_known and src is not None:
            exchange = self._by_core(of, [(recv, src, tags[1])], [(send, dst, tags[0])], _NO_TERMS)
            if exchange is not None or self._num_looks == _MOST_LOOKS:
                run = exchange or partial(self._sendrecv, dst, src, tags)
                self.note_exchange(run, error_prefix, send, recv)
            else:
                self._num_looks += 1
        return self._sendrecv(dst, src, tags, send, recv, _NO_BATCH if on_cpu else self.batched(of))

    def _sendrecv(
        self, dst: int, src: int | None, tags: tuple[int, int], send: Any, recv: Any, batch: Any = _NO_BATCH
    ) -> int:
        taken, _ = self._exchange("sendrecv", [(recv, src, tags[1])], [(send, dst, tags[0])], _NO_TERMS, batch)
        return self._group.ranks.index(taken.source_rank()) if src is None else src

    def exchange(
        self, of: str, receives: Sequence[tuple[Any, int]], sends: Sequence[tuple[Any, int]], tag: int, terms: Terms
    ) -> None:
        """Receive and send arrays, each from or to a rank, and wait for all; the user called the function `of`.

        Both sides of a message must have equal terms.
        """
        known = self.known_exchange(of, receives, sends, tag, terms)
        if known is not None:
            known(tuple([array for array, _ in sends]), tuple([array for array, _ in receives]))
            return
        on_cpu = terms.label != "" or all(device_type_of(array) == "cpu" for array, _ in (*receives, *sends))
        batch = _NO_BATCH if on_cpu else self.batched(of)
        takes, gives = ([(array, peer, tag) for array, peer in messages] for messages in (receives, sends))
        self._exchange(of, takes, gives, terms, batch)

    def exchange_of(self, terms: Terms, tag: int) -> core.Exchange | None:
        """Return what carried out the last exchange with these terms in the core, if it can, and nobody observes."""
        return self._exchanges.get((terms, tag)) if type(tag) is int and self._group.calls.is_open else None

    def known_exchange(
        self, of: str, receives: Sequence[tuple[Any, int]], sends: Sequence[tuple[Any, int]], tag: int, terms: Terms
    ) -> core.Exchange | None:
        """Return what carries such an exchange out in the core, if it can; it is called with the arrays."""
        known = self.exchange_of(terms, tag)
        if known is None and terms.label and self._group.calls.is_open:
            takes, gives = ([(array, peer, tag) for array, peer in messages] for messages in (receives, sends))
            known = self._by_core(of, takes, gives, terms)
            if known is not None:
                remember(self._exchanges, (terms, tag), known)
        return known

    def _exchange(
        self, of: str, receives: Sequence[_Message], sends: Sequence[_Message], terms: Terms, batch: Any = _NO_BATCH
    ) -> list[Work]:
        """Begin messages of arrays, each with a peer and a tag, and wait for all; return their works."""
        works: list[Work] = []
        try:
            with batch:
                # The receives come first, so that a message to this rank itself finds them.
                for array, src, tag in receives:
                    works.append(self._begin_receive(array, src, tag, of, terms.label))
                for array, dst, tag in sends:
                    works.append(self._begin_send(array, dst, tag, of, terms.label))
            for work in reversed(works):
                work.wait()
        except DistError as error:
            first = _first_error(works, error)
            if terms.words and (first.is_misfit or _makes_other_calls(first)):
                name_call_instead(first)
                first.add(f"{terms.difference(first.sent_label)}{terms.told_with(first)}")
            raise first from None
        return works

    def _by_core(
        self, of: str, receives: Sequence[_Message], sends: Sequence[_Message], terms: Terms
    ) -> core.Exchange | None:
        if core.module is None:
            return None
        takes = [known_receive(self._ireceives[of], *message, terms.label) for message in receives]
        gives = [known_send(self._isends[of], *message, terms.label) for message in sends]
        legs = [
            (request.fast_path, request.facts)
            for request in (*gives, *takes)
            if request is not None and isinstance(request.fast_path, core.Ring)
        ]
        if len(legs) < len(takes) + len(gives) or len(gives) > _MOST_SENDS:
            return None
        places = [message[1:] for message in receives], [message[1:] for message in sends]

        def rest(sent: int, received: int, given: Any, taken: Any) -> None:
            arrays = [(value if type(value) is tuple else (value,)) for value in (taken, given)]
            takes, gives = (
                [(array, *place) for array, place in zip(values, where, strict=False)]  # an end may have no neighbour
                for values, where in zip(arrays, places, strict=True)
            )
            self._exchange(of, takes[received:], gives[sent:], terms)

        prefix, given, taken = self._group.error_prefix(of), tuple(legs[: len(gives)]), tuple(legs[len(gives) :])

        def follow(leg: int, number: int, array: Array) -> None:
            self._follow(legs[leg][0].follow(array, number), prefix)

        return core.Exchange(self._group.calls, prefix, given, taken, rest, follow)

    def _follow(self, request: Waitable, error_prefix: str) -> None:
        """Wait until a message is taken that the core has announced."""
        backend = self._group.usable_backend(error_prefix)
        try:
            backend.wait(request, error_prefix)
        except BaseException as error:
            raise self._group.fail(error, error_prefix) from None

    def note_exchange(self, run: Callable[[Any, Any], Any], error_prefix: str, send: Any, recv: Any) -> None:
        """Let the core call `run(send, recv)` when the user calls again what is in progress, with such arrays."""
        note = self._group.calls.note
        if note is not None:
            note(run, None, error_prefix, send, recv, True)

    @contextmanager
    def batched(self, of: str) -> Iterator[None]:
        """Post the messages on GPUs that are begun in the block together at its end; `of` is the user's function."""
        batches: list[DeviceCalls] = []
        self._batches = batches
        try:
            yield
        except BaseException:
            for calls in batches:
                calls.end_batch(self._group, None)
            raise
        finally:
            self._batches = None
        for calls in batches:
            calls.end_batch(self._group, self._group.error_prefix(of))

    # `isend` and `irecv`, which observers replace.
    def _observed_isend(self, tensor: Any, dst: int, tag: int, of: str, label: str = "") -> Work:
        return self.isend(tensor, dst, tag, of, label)

    def _observed_irecv(self, tensor: Any, src: int | None, tag: int, of: str, label: str = "") -> Work:
        return self.irecv(tensor, src, tag, of, label)

    def _in_batch(self, calls: DeviceCalls) -> DeviceCalls:
        if self._batches is not None and calls not in self._batches:
            calls.begin_batch()
            self._batches.append(calls)
        return calls

    def _check_exchange(self, error_prefix: str, send: Any, recv: Any, tags: tuple[int, int]) -> bool:
        """Check the arguments of sendrecv; return whether the arrays are on the CPU."""
        self._group.usable_backend(error_prefix, send, recv)
        for array in (send, recv):
            if type(array) is not np.ndarray and device_type_of(array) != "cpu":
                return False
        given = self._array(error_prefix, send, tags[0], name="send")
        taken, _ = self._output(error_prefix, recv, tags[1], "recv")
        if share_memory(given, taken):
            raise ValueError(f"{error_prefix}: send and recv share memory, and recv is written; pass send.copy()")
        return True

    def _array(
        self,
        error_prefix: str,
        tensor: Any,
        tag: int,
        hint: Callable[[Any, str], str] = hint_of_input,
        name: str = "tensor",
    ) -> Array:
        self._check_tag(error_prefix, tag)
        array = self._group.named(error_prefix, as_array, tensor, name, hint)
        self._group.named(error_prefix, check_dtype, array, name)
        return array

    def _output(self, error_prefix: str, tensor: Any, tag: int, name: str = "tensor") -> tuple[Array, Array]:
        array = self._array(error_prefix, tensor, tag, hint_of_output, name)
        self._group.named(error_prefix, check_writable, array, name)
        return array, pack(array, keep=False)


def known_send(
    requests: dict[Any, PersistentRequest], tensor: Any, peer: int | None, tag: Any, label: str = ""
) -> PersistentRequest | None:
    """Return the request of messages like this one, if their arguments were checked before."""
    if type(tensor) is np.ndarray and type(tag) is int:
        return requests.get((peer, tag, tensor.dtype, tensor.shape, label))
    return None


def known_receive(
    requests: dict[Any, PersistentRequest], tensor: Any, peer: int | None, tag: Any, label: str = ""
) -> PersistentRequest | None:
    """Return the request of messages like this one; see `known_send`."""
    request = known_send(requests, tensor, peer, tag, label)
    return request if request is not None and can_be_filled(tensor) else None


def _makes_other_calls(error: DistError) -> bool:
    """Return whether a peer waits in another call, or has finished, without its part of the exchange."""
    failure = failure_of(error)
    return bool(error.hang_report) if failure is None else failure.departure.exit.is_orderly


def _first_error(works: Sequence[Work], error: DistError) -> DistError:
    """Return the error of the message that failed first of one call, if another one made `error` by that."""
    if error.is_earlier:  # the progress thread, which broke the group, may be about to complete the work that failed
        for work in works:
            with suppress(DistError):
                work.wait(_FAILING_S)
    errors = [failed for work in works if isinstance(failed := work.exception(), DistError)]
    return next((failed for failed in errors if not failed.is_earlier), error)
