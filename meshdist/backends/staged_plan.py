"""The plans of collectives of lists, which a collective of single arrays carries out; see collectives/staging."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from meshdist.backends.base import Backend, Plan
from meshdist.call import Buffers, Call
from meshdist.collectives.staging import listed
from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.collectives.staging import Staging


def plan_staged(backend: Backend, call: Call, staging: Staging) -> Plan:
    """Return the plan of a collective of lists.

    Where each array, or pair of arrays, of the lists could be a call of its own, long ones are; only short ones are put
    together, and no more of them at a time than make a long one: so little memory is needed, and the caches hold it.
    """
    if staging.by_element:
        pairs = zip(listed(call.send), listed(call.recv), strict=True)
        parts = cut([max(give.nbytes, take.nbytes) for give, take in pairs], backend.bucket_bytes)
        if len(parts) > 1:
            return BucketPlan(backend, call, staging, parts)
    return StagedPlan(backend, call, staging)


def cut(sizes: Sequence[int], most: int) -> list[slice]:
    """Cut a list of arrays, in order, into parts of at most `most` bytes; what is longer is a part of its own.

    Example:
        >>> cut([3, 4, 5, 20, 1], most=10)
        [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    begins, total = [0], 0
    for place, size in enumerate(sizes):
        if total + size > most and place > begins[-1]:
            begins.append(place)
            total = 0
        total += size
    return [slice(begin, end) for begin, end in zip(begins, [*begins[1:], len(sizes)], strict=True)]


class StagedPlan(Plan):
    """Runs a collective of lists by the plan of one of flat arrays."""

    copies = True

    def __init__(self, backend: Backend, call: Call, staging: Staging) -> None:
        super().__init__(backend, call)
        self._call = call.without_buffers()
        self._staging = staging
        self._writes = call.collective.writes(call)
        self._inner = backend.prepare(staging.inner_call(call))

    def run(self, send: Buffers, recv: Buffers) -> None:
        flat = self._staging.put(self._call, send)
        result = self._staging.room(self._call, flat)
        self._inner.run(flat, result)
        if self._writes:
            self._staging.take(self._call, result, recv)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        flat = self._staging.put(self._call, send)
        result = self._staging.room(self._call, flat)
        yield from self._inner.steps(flat, result)
        if self._writes:
            self._staging.take(self._call, result, recv)


class BucketPlan(Plan):
    """Runs a collective of lists part by part: an array alone as what it is, several as one flat array."""

    def __init__(self, backend: Backend, call: Call, staging: Staging, parts: list[slice]) -> None:
        super().__init__(backend, call)
        words = call.collective.agreed(call)
        # Messages, and what the ranks compare, speak of the whole lists.
        outer = replace(call, collective=call.collective.under(call.collective.name, lambda _: words))
        inner = replace(call, collective=staging.inner.under(call.collective.name, lambda _: words))
        self._parts: list[tuple[int | slice, Plan]] = []
        for part in parts:
            if part.stop - part.start == 1:
                place: int | slice = part.start
                plan = backend.prepare(_pick(inner, place))
            else:
                place, plan = part, StagedPlan(backend, _pick(outer, part), staging)
            self._parts.append((place, plan))

    def run(self, send: Buffers, recv: Buffers) -> None:
        gives, takes = listed(send), listed(recv)
        for place, plan in self._parts:
            plan.run(gives[place], takes[place])

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        gives, takes = listed(send), listed(recv)
        for place, plan in self._parts:
            yield from plan.steps(gives[place], takes[place])


def _pick(call: Call, place: int | slice) -> Call:
    send, recv = listed(call.send)[place], listed(call.recv)[place]
    return replace(call, send=recv if call.collective.in_place else send, recv=recv)
