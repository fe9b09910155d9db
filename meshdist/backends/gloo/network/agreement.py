"""Agreement: what the ranks of a group on several hosts do, whether all do the same, and whether all are there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from meshdist.backends.base import Backend
from meshdist.backends.gloo.wire.bag import Bag
from meshdist.backends.gloo.wire.frames import CALLED, pack_text
from meshdist.backends.gloo.wire.parts import NUMBER
from meshdist.backends.gloo.wire.waiting import Inquiry, check_all
from meshdist.call import Signature, call_site
from meshdist.debug.mismatch import disagreement
from meshdist.errors import DistBackendError

if TYPE_CHECKING:
    from meshdist.backends.gloo.wire.wire import Wire

# How long a rank whose call disagrees waits for the others to say what theirs is.
_EXPLAIN_S = 0.8
_PAUSE_S = 0.002
LEFT_OUT = "making this call"


class Agreement:
    """One rank's view of the collectives of its group, one after the other.

    Args:
        backend: The backend of the group.
        wire: The wire.
        bag: What comes for the group.

    Attributes:
        word: That of the current collective, which all that is sent in it carries.
    """

    def __init__(self, backend: Backend, wire: Wire, bag: Bag) -> None:
        self.wire = wire
        self.bag = bag
        self.word = 0
        self._backend = backend
        self._options = backend.options
        self._others = [rank for rank in range(backend.size) if rank != backend.rank]
        self._inquiry = Inquiry(backend.options, LEFT_OUT)
        self.signature = Signature("nothing")

    def begin(self, signature: Signature, fingerprint: int) -> None:
        """Begin a collective."""
        self.signature = signature
        with self.wire.lock:
            self.word = self.bag.parts.begin(fingerprint)

    def check(self) -> None:
        """Raise DistBackendError if the ranks' calls disagree, or one has given the group up or died."""
        # What has been said may not be read yet.
        self.wire.drive()
        if self.bag.parts.is_at_odds():
            raise self.disagreement()
        check_all(self._options, self.bag, self.wire)

    def inquire(self) -> None:
        """Raise DistBackendError if the store says that a rank is gone; not all are asked for every time."""
        # Of all: the last word of one that has sent all that is waited for may be behind what nobody waits for yet.
        self._inquiry.check(self._others)

    def disagreement(self) -> DistBackendError:
        """Tell all ranks what this one calls, hear what they call, and return the error that says all."""
        mine = f"{self.signature.text} at {call_site()}"
        header, text = pack_text(CALLED, self._backend.rank, self.bag.token, mine, self.word)
        for rank in self._others:
            self.wire.link(self._options.ranks[rank]).say(header, text)
        calls, end_s = self.bag.parts.calls, time.monotonic() + _EXPLAIN_S
        while time.monotonic() < end_s and not all(rank in calls for rank in self._others):
            time.sleep(_PAUSE_S)
            self.wire.drive()
        number = self.word & NUMBER
        theirs = {rank: words for rank, (word, words) in calls.items() if word & NUMBER == number}
        return DistBackendError(disagreement({**theirs, self._backend.rank: mine}))
