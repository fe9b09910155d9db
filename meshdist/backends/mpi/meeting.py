"""Meeting: the ranks of a group come together before a collective, and compare their calls.

MPI does not say what becomes of calls that disagree, and a rank that waits inside of MPI for one that never comes waits
for ever. So all ranks meet first, by requests that this side waits for as politely as it likes; once they have, the
collective itself cannot but end.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from meshdist.backends.mpi.library import Polled, Session
from meshdist.call import Signature, call_site
from meshdist.deadline import Deadline
from meshdist.debug.mismatch import disagreement
from meshdist.errors import DistBackendError, DistStoreError

if TYPE_CHECKING:
    from meshdist.backends.mpi.backend import MpiBackend

TAG = 1
# The least and the greatest fingerprint of the ranks heard of, and whether all of these may wait inside of MPI.
_WORD = struct.Struct("=QQQ")
# From when on a rank that waits says so in the store, where the others' messages find out who has come.
_PATIENCE_S = 1.0
_LOOK_S = 0.1
_NAMED_RANKS = 64
_WORDS_S = 5.0


def word_of(signature: Signature, may_block: bool) -> bytes:
    """Return what a rank brings to the meeting."""
    return _WORD.pack(signature.fingerprint, signature.fingerprint, may_block)


def merged(one: bytes, other: bytes) -> bytes:
    """Return what two ranks know together.

    Example:
        >>> here, there = (word_of(Signature("barrier()"), may_block) for may_block in (True, False))
        >>> merged(here, there) == there
        True
    """
    (least, greatest, all_may), (low, high, may) = _WORD.unpack(one), _WORD.unpack(other)
    return _WORD.pack(min(least, low), max(greatest, high), all_may and may)


class Round:
    """A round of the meeting: a word to one rank, and one from another. Its requests are made once.

    Attributes:
        src: The rank that is listened to.
        said: The word to the one.
        heard: The word from the other.
        requests: What starts the receipt and the sending, and what looks whether they are done.
    """

    def __init__(self, session: Session, comm: Any, dst: int, src: int) -> None:
        self.src = src
        self.heard = bytearray(_WORD.size)
        self.said = bytearray(_WORD.size)
        self._lock = session.lock
        byte = session.mpi.BYTE
        with session.lock:
            self._receipt = comm.Recv_init([self.heard, byte], src, TAG)
            self._sending = comm.Send_init([self.said, byte], dst, TAG)
        self.requests = self._receipt.Start, self._sending.Start, self._receipt.Test, self._sending.Test

    def begin(self, word: bytes) -> None:
        """Say `word`, and listen."""
        self.said[:] = word
        with self._lock:
            self._receipt.Start()
            self._sending.Start()

    def done(self) -> bool:
        """Return whether both are done."""
        with self._lock:
            return bool(self._receipt.Test() and self._sending.Test())

    def close(self) -> None:
        """Give the requests back."""
        self._receipt.Free()
        self._sending.Free()


class Meeting:
    """The meetings of a group.

    Attributes:
        number: How many have begun.
    """

    def __init__(self, backend: MpiBackend, session: Session, comm: Any) -> None:
        self._backend = backend
        self._spins = range(session.spins)
        self.number = 0
        rank, size = backend.rank, backend.size
        # Dissemination: in round k with the rank 2 ** k further on, telling all that has been heard. After the last
        # round every rank has heard of all, so all find the same.
        self._rounds = [
            Round(session, comm, (rank + (1 << k)) % size, (rank - (1 << k)) % size)
            for k in range((size - 1).bit_length())
        ]
        self._ways = [(each, each.said, each.heard, *each.requests) for each in self._rounds]

    def meet(self, word: bytes, signature: Signature, where: str) -> bool:
        """Meet, waiting here; return whether all ranks may wait inside of MPI, as this one may.

        It is the way of every sync call, so it goes straight at the requests. MPI lets several threads in: no lock.
        """
        self.number += 1
        together = word
        for each, said, heard, start_receipt, start_sending, received, sent in self._ways:
            said[:] = together
            start_receipt()
            start_sending()
            for _ in self._spins:
                # What is sent is a few bytes, and the other rank is there.
                if received() and sent():
                    break
            else:
                self._backend.wait(Coming(self._backend, self, each), where)
            if heard != together:
                together = merged(together, bytes(heard))
        return together == word or self._compare(together, signature)

    def steps(self, word: bytes, signature: Signature) -> Generator[Polled, None, bool]:
        """Meet as `meet` does, yielding what has to be waited for."""
        self.number += 1
        together = word
        for each in self._rounds:
            each.begin(together)
            coming = Coming(self._backend, self, each)
            if not coming.ready():
                yield coming
            if each.heard != together:
                together = merged(together, bytes(each.heard))
        return self._compare(together, signature)

    def close(self) -> None:
        """Give the requests back."""
        for each in self._rounds:
            each.close()

    def _compare(self, together: bytes, signature: Signature) -> bool:
        least, greatest, all_may_block = _WORD.unpack(together)
        if least != greatest:
            self._disagree(signature)
        return bool(all_may_block)

    def _disagree(self, signature: Signature) -> None:
        # All ranks come here, each by itself, and a group that disagrees once is broken: the keys are used once.
        store, size = self._backend.options.store, self._backend.size
        store.set(f"call/{self._backend.rank}", f"{signature.text} at {call_site()}")
        ranks = range(min(size, _NAMED_RANKS))
        try:
            store.wait([f"call/{rank}" for rank in ranks], Deadline(_WORDS_S).timeout_s)
        except DistStoreError:
            ranks = range(0)
        calls = {rank: store.get(f"call/{rank}").decode() for rank in ranks}
        calls[self._backend.rank] = f"{signature.text} at {call_site()}"
        raise DistBackendError(disagreement(calls, self._backend.options.ranks))


class Coming(Polled):
    """The other rank of a round is there."""

    def __init__(self, backend: MpiBackend, meeting: Meeting, each: Round) -> None:
        super().__init__()
        self._backend, self._meeting, self._round = backend, meeting, each
        self._number = meeting.number
        self._next_look_s = 0.0
        self._patience_s = min(_PATIENCE_S, backend.options.timeout_s / 4)
        self._has_said = False
        self._has_come = False

    def limit(self, timeout_s: float) -> None:
        """Say when whoever waits for this gives up."""
        self._patience_s = min(_PATIENCE_S, timeout_s / 4)

    def ready(self) -> bool:
        if not self._has_come:
            self._has_come = self._round.done()
        return self._has_come

    def check(self) -> None:
        self._backend.look()
        waited_s, now_s = self.waited_s(), time.monotonic()
        if not self._has_said and waited_s >= self._patience_s:
            self._backend.options.store.set(f"at/{self._backend.rank}", str(self._number))
            self._has_said = True
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            self._backend.check_there(self._round.src)

    def missing(self) -> str:
        """Return the ranks that have not said that they wait as well."""
        store = self._backend.options.store
        here = {self._backend.rank}
        for rank in range(self._backend.size):
            if store.check([f"at/{rank}"]) and int(store.get(f"at/{rank}")) >= self._number:
                here.add(rank)
        absent = [rank for rank in range(self._backend.size) if rank not in here]
        return ", ".join(map(self._backend.options.call, absent or [self._round.src]))
