"""Precheck: the ranks of a group synchronize and compare their calls before a collective.

MPI does not define calls that disagree, and a rank that blocks inside MPI for a missing one blocks forever. So all
ranks first exchange messages by nonblocking requests, with our own deadline and checks; after that, the collective
itself completes unless a rank fails within it.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Generator
from typing import Any

from meshdist.backends.mpi.library import Member, Polled, Session
from meshdist.errors import DistStoreError
from meshdist.runtime.call import Signature
from meshdist.runtime.call_mismatch import CallCheck
from meshdist.runtime.message_counts import Carried
from meshdist.runtime.peer_monitor import PeerMonitor
from meshdist.system.deadline import Deadline

TAG = 1
# The least and greatest fingerprint of the ranks heard of, and whether all of these may block inside MPI.
_WORD = struct.Struct("=QQQ")
# After this time a waiting rank reports its call number in the store, where the other ranks' errors find who arrived.
_PATIENCE_S = 1.0
_NAMED_RANKS = 64
_WORDS_S = 5.0


def word_of(signature: Signature, may_block: bool) -> bytes:
    return _WORD.pack(signature.fingerprint, signature.fingerprint, may_block)


def merged(one: bytes, other: bytes) -> bytes:
    (least, greatest, all_may), (low, high, may) = _WORD.unpack(one), _WORD.unpack(other)
    return _WORD.pack(min(least, low), max(greatest, high), all_may and may)


class Round:
    """A round of the precheck: a message to one rank and one from another, by persistent requests."""

    def __init__(self, session: Session, comm: Any, dst: int, src: int) -> None:
        self.dst, self.src = dst, src
        self.heard = bytearray(_WORD.size)  # the word received
        self.said = bytearray(_WORD.size)  # the word to send
        self._lock = session.lock
        byte = session.mpi.BYTE
        with session.lock:
            self._receipt = comm.Recv_init([self.heard, byte], src, TAG)
            self._sending = comm.Send_init([self.said, byte], dst, TAG)
        # Start and Test of the receive and of the send.
        self.requests = self._receipt.Start, self._sending.Start, self._receipt.Test, self._sending.Test

    def begin(self, word: bytes) -> None:
        self.said[:] = word
        with self._lock:
            self._receipt.Start()
            self._sending.Start()

    def done(self) -> bool:
        with self._lock:
            return bool(self._receipt.Test() and self._sending.Test())

    def has_heard(self) -> bool:
        with self._lock:
            return bool(self._receipt.Test())

    def close(self) -> None:
        self._receipt.Free()
        self._sending.Free()


class Precheck:
    """The prechecks of a group; `number` counts those begun."""

    def __init__(self, backend: Member, session: Session, comm: Any) -> None:
        self._backend = backend
        self._spins = range(session.spins)
        self.number = 0
        self.waits_in: Round | None = None  # the round that a wait is for, or has failed in
        rank, size = backend.rank, backend.size
        # Dissemination: in round k, exchange all that is known so far with the ranks at distance 2 ** k. After the last
        # round every rank knows the combination of all words.
        self._rounds = [
            Round(session, comm, (rank + (1 << k)) % size, (rank - (1 << k)) % size)
            for k in range((size - 1).bit_length())
        ]
        self._ways = [(each, each.said, each.heard, *each.requests) for each in self._rounds]

    def meet(self, word: bytes, signature: Signature, error_prefix: str) -> bool:
        """Run the precheck, blocking; return whether all ranks may block inside MPI.

        Every sync call comes here, so it starts and tests the requests directly, without the lock: a
        session that may block supports concurrent calls.
        """
        self.number += 1
        together = word
        for each, said, heard, start_receipt, start_sending, received, sent in self._ways:
            said[:] = together
            start_receipt()
            start_sending()
            for _ in self._spins:
                # The message is a few bytes, and the other rank has usually arrived.
                if received() and sent():
                    break
            else:
                self._backend.wait(Coming(self._backend, self, each), error_prefix)
                self.waits_in = None
            if heard != together:
                together = merged(together, bytes(heard))
        return together == word or self._compare(together, signature)

    def steps(self, word: bytes, signature: Signature) -> Generator[Polled, None, bool]:
        """Run the precheck as `meet` does, yielding what has to be waited for."""
        self.number += 1
        together = word
        for each in self._rounds:
            each.begin(together)
            coming = Coming(self._backend, self, each)
            if not coming.ready():
                yield coming
            self.waits_in = None
            if each.heard != together:
                together = merged(together, bytes(each.heard))
        return self._compare(together, signature)

    def carried(self) -> dict[int, Carried]:
        """Return the number of messages exchanged with each rank, by global rank; see `runtime.message_counts`.

        They end no waits but those in calls of this group, and nothing answers them.
        """
        ranks, current = self._backend.options.ranks, self.waits_in
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        is_begun = True
        for each in self._rounds:
            sent[ranks[each.dst]] += self.number if is_begun else self.number - 1
            is_begun &= each is not current
            is_heard = is_begun or (each is current and each.has_heard())
            received[ranks[each.src]] += self.number if is_heard else self.number - 1
        return {rank: Carried(sent[rank], received[rank], is_held=True) for rank in {*sent, *received}}

    def close(self) -> None:
        for each in self._rounds:
            each.close()

    def _compare(self, together: bytes, signature: Signature) -> bool:
        least, greatest, all_may_block = _WORD.unpack(together)
        if least != greatest:
            self._disagree(signature)
        return bool(all_may_block)

    def _disagree(self, signature: Signature) -> None:
        # Every rank raises here. A group that disagrees once is broken, so the keys are used once.
        store, size, rank = self._backend.options.store, self._backend.size, self._backend.rank
        check = CallCheck(rank, self._backend.options.ranks)
        mine = check.words(signature)
        store.set(f"call/{rank}", mine)
        ranks = range(min(size, _NAMED_RANKS))
        try:
            store.wait([f"call/{rank}" for rank in ranks], Deadline(_WORDS_S).timeout_s)
        except DistStoreError:
            ranks = range(0)
        raise check.error({**{other: store.get(f"call/{other}").decode() for other in ranks}, rank: mine})


class Coming(Polled):
    """The other rank's message of a round."""

    def __init__(self, backend: Member, precheck: Precheck, each: Round) -> None:
        super().__init__()
        self._backend, self._precheck, self._round = backend, precheck, each
        self._number = precheck.number
        self._monitor = PeerMonitor()
        self._patience_s = min(_PATIENCE_S, backend.options.timeout_s / 4)
        self._has_said = False
        self._has_come = False
        precheck.waits_in = each

    def limit(self, timeout_s: float) -> None:
        """Adapt to the timeout of the wait: report well before it ends."""
        self._patience_s = min(_PATIENCE_S, timeout_s / 4)

    def ready(self) -> bool:
        if not self._has_come:
            self._has_come = self._round.done()
        return self._has_come

    def check(self) -> None:
        self._backend.look()
        if not self._has_said and self.waited_s() >= self._patience_s:
            self._backend.options.store.set(f"at/{self._backend.rank}", str(self._number))
            self._has_said = True
        if self._monitor.is_due():
            self._backend.check_there(self._round.src)

    def awaits(self) -> list[int]:
        return [] if self._round.has_heard() else [self._backend.options.ranks[self._round.src]]

    def missing(self) -> str:
        """Return the ranks that have not reported that they wait as well."""
        store = self._backend.options.store
        here = {self._backend.rank}
        for rank in range(self._backend.size):
            if store.check([f"at/{rank}"]) and int(store.get(f"at/{rank}")) >= self._number:
                here.add(rank)
        absent = [rank for rank in range(self._backend.size) if rank not in here]
        return ", ".join(map(self._backend.options.call, absent or [self._round.src]))
