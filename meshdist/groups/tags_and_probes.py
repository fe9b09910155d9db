"""Probes of one group, the limit of tags, the messages of a rank to itself, and what all messages are recorded as."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np

from meshdist.arrays.host import Array, describe_value, labelled_dtype
from meshdist.backends.base import Backend
from meshdist.backends.p2p.own_messages import OwnMessages as QueuedOwnMessages
from meshdist.core import Record
from meshdist.groups.known_messages import KnownMessages
from meshdist.groups.unposted_messages import Facts
from meshdist.runtime.flight_recorder import clock
from meshdist.runtime.hooks import HookedGroup
from meshdist.runtime.interfaces import OwnMessages
from meshdist.runtime.waiting import Found, Incoming, Probe, Waitable, is_ready

# Backends may send a tag as an integer of 64 bits.
_TAGS = 1 << 63
_NOTHING = np.empty(0, np.uint8)
_ANY_TAG = "; to receive a message of any tag, call info = probe(tag=None) first, then "


class MessageGroup(HookedGroup, Protocol):
    """What messages need of their group."""

    def check_usable(self, error_prefix: str) -> None: ...
    def usable_backend(self, error_prefix: str, *buffers: Any) -> Backend: ...


class Probes(ABC):
    """Looks for messages without receiving them, and chooses between a backend and the messages of a rank to itself."""

    def __init__(self, group: MessageGroup) -> None:
        self._group = group
        self._rank = group.rank()
        self._recorder = group.recorder
        self._own_messages: OwnMessages | None = None
        self.known = KnownMessages(group)

    @property
    def num_messages(self) -> int:
        return self._group.calls.num_messages

    @abstractmethod
    def post_deferred(self) -> None:
        """Post the receives that are not posted yet, which come before a probe."""

    def probe(self, src: int | None, tag: int | None) -> Found:
        """Wait for a message from rank `src`, or from any rank if it is None, and leave it there."""
        error_prefix, src = self._group.error_prefix("probe"), self._only_source(src)
        backend, probe = self._probe(error_prefix, src, tag)
        if src == self._rank and not probe.ready():
            raise ValueError(
                f"{error_prefix}: src is this rank, {src}, which has sent itself no such message, so the call would"
                " wait for itself; call isend before it, or iprobe"
            )
        record = self.begin_record("probe", _NOTHING, src, -1 if tag is None else tag, sends=False)
        try:
            backend.wait(probe, error_prefix)
        except BaseException as error:
            raise self._group.fail(error, error_prefix, record) from None
        record.completed = clock()
        found = probe.found()
        if src != self._rank:
            self.known.probed("probe", src, tag, backend, found, record.facts)
        return found

    def iprobe(self, src: int | None, tag: int | None) -> Found | None:
        """Return the message that `probe` would find; None if there is none yet."""
        error_prefix = self._group.error_prefix("iprobe")
        src = self._only_source(src)
        backend, probe = self._probe(error_prefix, src, tag)
        try:
            found = probe.found() if is_ready(probe) else None
        except BaseException as error:
            raise self._group.fail(error, error_prefix) from None
        if src != self._rank:
            self.known.probed("iprobe", src, tag, backend, found, None)
        return found

    def _probe(self, error_prefix: str, src: int | None, tag: int | None) -> tuple[Backend, Probe]:
        if tag is not None:
            self._check_tag(error_prefix, tag)
        self.post_deferred()
        group = self._group
        backend = group.usable_backend(error_prefix)
        if src == self._rank:
            return backend, self._own(backend).probe(tag)
        return backend, group.named(error_prefix, backend.probe, src, tag)

    def _own(self, backend: Backend) -> OwnMessages:
        """Return this rank's messages to itself."""
        own = backend.own_messages()
        if own is None:
            own = self._own_messages = self._own_messages or QueuedOwnMessages(self._rank)
        return own

    def _post_send(self, backend: Backend, array: Array, dst: int, tag: int, label: str = "") -> Waitable:
        if label:
            array = array.view(labelled_dtype(array.dtype, label))
        return self._own(backend).send(array, tag) if dst == self._rank else backend.send(array, dst, tag)

    def _post_recv(self, backend: Backend, array: Array, src: int | None, tag: int, label: str = "") -> Incoming:
        if label:
            array = array.view(labelled_dtype(array.dtype, label))
        return self._own(backend).recv(array, tag) if src == self._rank else backend.recv(array, src, tag)

    def _only_source(self, src: int | None) -> int | None:
        # In a group of one rank, any source is this rank.
        return self._rank if src is None and self._group.size() == 1 else src

    def _facts(self, of: str, array: Array, peer: int | None, tag: int, *, sends: bool) -> Facts:
        # A plain tuple, to be cheap; `facts_in` converts it.
        group = self._group
        return of, group.name, group.label, array.dtype, array.shape, peer, tag, group.timeout_s, sends

    def begin_record(self, of: str, array: Array, peer: int | None, tag: int, *, sends: bool) -> Record:
        """Return the flight recorder's record of a message that is about to be sent or received."""
        self._group.calls.num_messages += 1
        return self._recorder.begin(self._facts(of, array, peer, tag, sends=sends), self.num_messages)

    def _check_tag(self, error_prefix: str, tag: int, receive: str = "recv(x, src=info.source, tag=info.tag)") -> None:
        if type(tag) is not int and not isinstance(tag, (int, np.integer)):
            hint = _ANY_TAG + receive if tag is None else ""
            raise TypeError(f"{error_prefix}: tag must be an integer, got {describe_value(tag)}{hint}")
        if tag < 0:
            hint = _ANY_TAG + receive if tag == -1 else ""  # of MPI libraries, any tag
            raise ValueError(f"{error_prefix}: tag must not be negative, got {tag}{hint}")
        if tag >= _TAGS:
            raise ValueError(f"{error_prefix}: tag must be less than 2 ** 63, got {tag}")
