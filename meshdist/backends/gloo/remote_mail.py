"""Remote mail: the messages of a group with its ranks on other hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshdist.backends.gloo.places import ranks_elsewhere
from meshdist.backends.gloo.published import mark_told

if TYPE_CHECKING:
    from meshdist.backends.base import Backend
    from meshdist.backends.gloo.inbox import Inbox
    from meshdist.backends.gloo.receipts import Origin
    from meshdist.backends.gloo.wire.inbox import WireInbox
    from meshdist.backends.gloo.wire.outbox import WireOutbox


class RemoteMail:
    """The part of a group's mail that goes over the wire.

    Args:
        backend: The backend of the group.
        ranks: Its ranks on other hosts.

    Attributes:
        wire: The wire.
        bag: What comes for the group.
    """

    def __init__(self, backend: Backend, ranks: frozenset[int]) -> None:
        from meshdist.backends.gloo.wire.wire import wire_of

        self.ranks = ranks
        self.wire = wire_of(backend.options)
        self.bag = self.wire.open(backend.options.name, backend.options.ranks)
        self._backend = backend
        self._links = {rank: self.wire.link(backend.options.ranks[rank]) for rank in ranks}
        self._in_collectives: dict[int, Origin] = {}

    def outbox(self, dst: int) -> WireOutbox:
        """Return a new outbox of a rank."""
        from meshdist.backends.gloo.wire.outbox import WireOutbox

        return WireOutbox(self._backend, dst, self.wire, self.bag)

    def inbox(self, src: int) -> WireInbox:
        """Return a new inbox of a rank."""
        from meshdist.backends.gloo.wire.inbox import WireInbox

        return WireInbox(self._backend, src, self.wire, self.bag)

    def in_collective(self, src: int, inbox: Inbox | WireInbox) -> Origin:
        """Return where a message of a collective comes from: a rank, which may be on this host."""
        origin = self._in_collectives.get(src)
        if origin is None:
            from meshdist.backends.gloo.wire.inbox import InCollective

            origin = self._in_collectives[src] = InCollective(self._backend, inbox, self.wire, self.bag)
        return origin

    def let_go_on(self, src: int | None) -> None:
        """Learn that a message is waited for, of one rank or of any: what else has come is not to be in its way."""
        from meshdist.backends.gloo.wire.bag import LongParcel

        links = self._links.values() if src is None else [self._links[src]] if src in self.ranks else []
        for link in links:
            link.go_on()
        with self.bag.expected.lock:
            kept = self.bag.expected.matching.kept(src)
        for parcel in kept:
            if isinstance(parcel, LongParcel):
                parcel.pull()

    def fail(self, reason: str) -> None:
        """Tell the ranks that this one gives the group up."""
        from meshdist.backends.gloo.wire.frames import FAILED

        self._say(FAILED, reason)

    def leave(self, farewell: str) -> None:
        """Tell the ranks that this one has closed the group."""
        from meshdist.backends.gloo.wire.frames import LEFT

        self._say(LEFT, farewell)
        mark_told(self._backend.options, self._backend.rank)

    def _say(self, kind: int, text: str) -> None:
        from meshdist.backends.gloo.wire.frames import pack_text

        self.wire.shut(self.bag, *pack_text(kind, self._backend.rank, self.bag.token, text, self.bag.parts.completed))


def remote_mail(backend: Backend) -> RemoteMail | None:
    """Return the remote mail of a group; None where all its ranks are on this host."""
    elsewhere = ranks_elsewhere(backend.options)
    return RemoteMail(backend, elsewhere) if elsewhere else None
