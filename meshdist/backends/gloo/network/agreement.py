"""Agreement: what the ranks of a group on several hosts do, whether all do the same, and whether all are there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from meshdist.backends.base import Backend, Plan
from meshdist.backends.gloo.wire.bag import Bag
from meshdist.backends.gloo.wire.frames import CALLED, pack_text
from meshdist.backends.gloo.wire.parts import NUMBER
from meshdist.backends.gloo.wire.waiting import Inquiry, check_all
from meshdist.call import Buffers, Call, Signature, call_site
from meshdist.deadline import Deadline
from meshdist.debug.mismatch import disagreement
from meshdist.errors import DistBackendError, DistError
from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.backends.gloo.wire.wire import Wire

# How long a rank whose call disagrees waits for the others to say what theirs is.
_EXPLAIN_S = 0.6
_PAUSE_S = 0.005
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
        self._turn = 0
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
        """Raise DistBackendError if the store says that a rank is gone, or at odds with another."""
        if self._inquiry.is_due():
            if self._options.store.check([self._key("any")]):
                raise self.disagreement()
            # Of all: the last word of one that has sent all that is waited for may be behind what nobody waits for yet.
            self._turn += 1
            rank = self._others[self._turn % len(self._others)]
            if not self._is_through(rank):
                try:
                    self._inquiry.ask(rank, self.wire.link(self._options.ranks[rank]))
                except DistBackendError:
                    # It may have gone between the two looks, after its part in this collective.
                    if not self._is_through(rank):
                        raise

    def conclude(self) -> None:
        """End the current collective: it is completed here."""
        self.bag.parts.completed = self.word & NUMBER

    def leave_word(self) -> None:
        """Say in the store which collectives this rank has completed, before it says that it goes away."""
        with suppress(DistError):
            self._options.store.set(_through_key(self._backend.rank), str(self.bag.parts.completed))

    def _is_through(self, rank: int) -> bool:
        """Return whether a rank that has gone away did so after its part in the current collective."""
        if rank not in self.bag.through:
            key = _through_key(rank)
            if not self._options.store.check([key]):
                return False
            self.bag.through[rank] = int(self._options.store.get(key))
        return self.bag.through[rank] >= self.word & NUMBER

    def disagreement(self) -> DistBackendError:
        """Tell all ranks what this one calls, hear what they call, and return the error that says all."""
        mine = f"{self.signature.text} at {call_site()}"
        store, rank, number = self._options.store, self._backend.rank, self.word & NUMBER
        calls: dict[int, str] = {rank: mine}
        with suppress(DistError):  # without a store, those that are connected are heard
            store.set(self._key(rank), mine)
            store.set(self._key("any"), "")
        header, text = pack_text(CALLED, rank, self.bag.token, mine, self.word)
        for link in self.wire.links_of(self.bag):
            if link.is_connected:
                link.say(header, text)
        deadline = Deadline(_EXPLAIN_S)
        while len(calls) <= len(self._others) and not deadline.expired():
            self.wire.drive()
            told = self.bag.parts.calls.items()
            calls.update((other, words) for other, (word, words) in told if word & NUMBER == number)
            with suppress(DistError):
                for other in [other for other in self._others if other not in calls]:
                    if store.check([self._key(other)]):
                        calls[other] = store.get(self._key(other)).decode()
            time.sleep(_PAUSE_S)
        return DistBackendError(disagreement(calls, self._options.ranks))

    def _key(self, rank: object) -> str:
        return f"calls/{self.word & NUMBER}/{rank}"


def _through_key(rank: int) -> str:
    return f"through/{rank}"


class Concluded(Plan):
    """A plan of a collective, which is known to be completed when it is.

    Args:
        plan: The plan.
        backend: The backend of the group.
        call: The call.
        agreement: Where it is known.
    """

    def __init__(self, plan: Plan, backend: Backend, call: Call, agreement: Agreement) -> None:
        self.copies = plan.copies
        super().__init__(backend, call)
        self._plan = plan
        self._agreement = agreement

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        yield from self._plan.steps(send, recv)
        self._agreement.conclude()
