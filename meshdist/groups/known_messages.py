"""Messages that are repeated, besides arrays to and from one rank: receives from any rank, probes, lists of objects.

The compiled core repeats them by rings of the transport, one for each rank that has sent, or is sent to. Without the
core, or over another transport, a list of objects is sent and received like the last one if both have one size, padded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from meshdist import core
from meshdist.arrays.host import Array, is_of_objects
from meshdist.backends.base import Backend
from meshdist.backends.p2p.eager_messages import DEFAULT_EAGER_BYTES, dtype_named, eager_bytes
from meshdist.collectives.probe import MessageInfo
from meshdist.groups.unposted_messages import Facts, PersistentRequest
from meshdist.runtime.hooks import HookedGroup
from meshdist.runtime.object_messages import MOST_PADDED, ObjectMessage
from meshdist.runtime.plan_cache import remember
from meshdist.runtime.waiting import Found

# The array of the rings that look for messages, or carry objects; these are not of one kind.
_NOTHING = np.empty(0, np.uint8)
# A message of so many bytes is never buffered by a send.
_LONG = 128 << 10


class _Dtypes(dict[bytes, "np.dtype[Any] | None"]):
    """The dtypes by their names in headers."""

    def __missing__(self, name: bytes) -> np.dtype[Any] | None:
        dtype = self[name] = dtype_named(name)
        return dtype


_DTYPES = _Dtypes()


class KnownMessages:
    """The messages of one group that are repeated, by the user's function, peer, and kind or tag."""

    def __init__(self, group: HookedGroup) -> None:
        self._group = group
        self._inboxes: dict[Any, core.Inbox] = {}
        # Of lists of objects, by function, peer, tag, dtype and shape; those received were like the last list.
        self._objects: dict[Any, PersistentRequest] = {}

    def forget(self) -> None:
        self._inboxes, self._objects = {}, {}

    def received(self, facts: Facts, backend: Backend, array: Array, source: int) -> None:
        """Learn that an array has come from `source`, where it might have come from any rank."""
        self._admit(facts, backend, array, source)

    def received_objects(self, facts: Facts, backend: Backend, source: int, came: Array) -> None:
        """Learn that a list of objects has come from `source`."""
        if not self._admit(facts, backend, _NOTHING, source):
            self._keep(facts, came, backend.fast_recv)

    def note_receive(self, facts: Facts, received: Any, request: PersistentRequest | None = None) -> None:
        """Let the core repeat the receive that is being called, with a request if it is async."""
        inbox = self._inboxes.get(_key(facts))
        if inbox is not None and inbox.senders:
            self._note(inbox, facts[0], facts, None, received, *(() if request is None else (request,)))

    def probed(
        self, of: str, src: int | None, tag: int | None, backend: Backend, found: Found | None, facts: Facts | None
    ) -> None:
        """Let the core repeat a probe, or an `iprobe`, which has no facts; it looks where messages have come from."""
        if core.module is None:
            return
        key = of, src, tag
        inbox = self._inboxes.get(key)
        if inbox is None:
            any_tag = -1 if tag is None else tag
            inbox = core.Inbox(
                self._num_senders(src), info=MessageInfo, dtypes=_DTYPES, tag=any_tag, waits=of == "probe"
            )
            remember(self._inboxes, key, inbox)
        if found is not None:
            self._add(inbox, backend, found.source, found.tag, _NOTHING)
        if inbox.senders:
            self._note(inbox, of, facts, None, None)

    def sent_objects(
        self, facts: Facts, fast: Callable[..., Any], message: ObjectMessage, send: Callable[..., Any]
    ) -> None:
        """Let the core repeat the send of a list of objects that is being called; `send` does where it has no room."""
        of, dst, tag = facts[0], facts[5], facts[6]
        # A list that is not the user's is a part of another call, or was pickled by the core.
        if dst == self._group.rank() or (message.given is None and not message.is_single):
            return

        def rest(data: bytes, number: int) -> Any:
            return send(ObjectMessage.of_pickle(data, number), dst, tag, of)

        ring = None if core.module is None else fast(dst, tag, _NOTHING.dtype, (_LONG,))
        if ring is None or not isinstance(ring, core.Ring):
            self._keep(facts, message.array, fast)
        else:
            most_bytes = min(eager_bytes(), DEFAULT_EAGER_BYTES)
            sender = core.ObjectSender(ring, tag, most_bytes, rest, of.startswith("isend"), message.is_single)
            self._note(sender, of, facts, message.given, None)

    def objects_like(self, of: str, tensor: Any, peer: int | None, tag: Any) -> PersistentRequest | None:
        """Return the kind of a list of objects, or of the last one that was received so, if there is a fast path."""
        if type(tensor) is not ObjectMessage or type(tag) is not int:
            return None
        return self._objects.get((of, peer, tag, tensor.array.dtype, tensor.array.shape))

    def _keep(self, facts: Facts, array: Array, fast: Callable[..., Any]) -> None:
        of, group, label, dtype, shape, peer, tag, *rest = facts
        if peer is not None and peer != self._group.rank() and 0 < array.nbytes <= MOST_PADDED:
            fast_path = fast(peer, tag, array.dtype, array.shape)
            if fast_path is not None:
                kind = of, group, label, array.dtype, array.shape, peer, tag, *rest
                request = PersistentRequest(kind, fast_path, self._group.ranks[peer])
                remember(self._objects, (of, peer, tag, dtype, shape), request)

    def _admit(self, facts: Facts, backend: Backend, array: Array, source: int) -> bool:
        if core.module is None:
            return False
        of, src, tag = facts[0], facts[5], facts[6]
        inbox = self._inboxes.get(_key(facts))
        if inbox is None:
            size = self._num_senders(src)
            if array is _NOTHING:
                inbox = core.Inbox(size, tag=tag, of_objects=True, is_single=of == "recv_object")
            else:
                inbox = core.Inbox(size)
            remember(self._inboxes, _key(facts), inbox)
        self._add(inbox, backend, source, tag, array)
        return bool(inbox.senders)

    def _add(self, inbox: core.Inbox, backend: Backend, source: int, tag: int, like: Array) -> None:
        if source not in inbox.senders and source != self._group.rank():
            ring = backend.fast_recv(source, tag, like.dtype, like.shape)
            if isinstance(ring, core.Ring):
                inbox.add(ring, source, self._group.ranks[source])

    def _num_senders(self, src: int | None) -> int:
        return self._group.size() - 1 if src is None else 1

    def _note(self, run: Any, of: str, facts: Facts | None, sent: Any, received: Any, *kind: PersistentRequest) -> None:
        note = self._group.calls.note
        if note is not None:
            note(run, facts, self._group.error_prefix(of), sent, received, False, *kind)


def _key(facts: Facts) -> Any:
    # The number and the size of the objects of a message are not those of the next one.
    of, _, _, dtype, shape, src, tag, _, _ = facts
    return (of, src, tag) if is_of_objects(dtype) else (of, src, tag, dtype, shape)
