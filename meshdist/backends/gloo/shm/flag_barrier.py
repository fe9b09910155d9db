"""FlagBarrier: the ranks of a group advance in steps, and compare their calls.

In every step each rank writes the fingerprint of its call, signals a word that holds the number of the step and half of
the fingerprint, and waits until all others have signalled the same word, for the same fingerprint. A rank that has seen
the signals of step s knows that all have finished step s - 1. So no rank is more than one step from another, two words
for each rank (even and odd steps) are enough, and a slot may be written again after any step later than its last use.

A word or a fingerprint of another call in this step is a mismatch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from meshdist import core
from meshdist.arrays.host import Array
from meshdist.backends.base import Backend, Plan
from meshdist.backends.gloo.shm.segment import KEEPS_ORDER, fence
from meshdist.backends.gloo.shm.shared_region import FINGERPRINT, STATE, TEXT_BYTES, SharedRegion
from meshdist.errors import DistBackendError, DistError
from meshdist.runtime.call import Buffers, Call, Signature
from meshdist.runtime.call_mismatch import CallCheck
from meshdist.runtime.departure import Departure, LeftOut, gave_up, peer_gone
from meshdist.runtime.waiting import Doorbell, Waitable
from meshdist.system.platform import let_others_run

if TYPE_CHECKING:
    from meshdist.core import Step

_STEP = 0xFFFFFFFF
# States of a rank.
_LEFT, _FAILED, _MISMATCH = 1, 2, 3
# How often to poll before yielding: some microseconds, the delay of a peer in the same call. Fewer after a poll in
# vain; once, where more ranks than cores are known of: polling keeps peers from running. Then, how often to yield
# before sleeping.
SPINS, _FEWEST_SPINS, _TURNS = 60, 4, 60


class PeerSet(NamedTuple):
    """The processes of a group's ranks; `number` is a rank's number in the larger group with the global `ranks`."""

    ended: Callable[[int], bool]
    how_ended: Callable[[int], Departure]
    ring: Callable[[int, int], None]
    describe: Callable[[int], str]
    number: Callable[[int], int]
    ranks: Sequence[int]


class FlagBarrier:
    """One rank's view of its group's steps."""

    # Reports a mismatch if these ranks are part of a larger group: it collects the calls of all of them.
    explain: Callable[[], DistBackendError] | None = None

    def __init__(self, region: SharedRegion, rank: int, num_ranks: int, members: PeerSet) -> None:
        self.step = 0  # the number of the last step that this rank has signalled
        self.phase = 0  # the slot that the current call uses, 0 or 1
        self._word = 0
        self._spins, self.fewest_spins = SPINS, _FEWEST_SPINS
        self.region = region
        self.rank = rank
        self.peers = [peer for peer in range(num_ranks) if peer != rank]
        self.members = members
        self._words = region.words
        self._mine = region.line(rank, 0)
        self._reason = ""
        self._signals = tuple(tuple(region.line(peer, parity) for peer in self.peers) for parity in (0, 1))
        self._bells = region.bell_words()

    def signal(self, fingerprint: int) -> int:
        """Enter the next step; return the word that all ranks have to signal."""
        self.step = step = self.step + 1
        self._word = word = fingerprint & ~_STEP | step & _STEP
        words, mine = self._words, self._mine + (step & 1)
        words[mine + FINGERPRINT] = fingerprint
        words[mine] = word
        for bells in self._bells:
            if words[bells]:
                self._ring()
                break
        return word

    def await_all(self, word: int, plan: BarrierPlan) -> None:
        words = self._words
        spins = most = self._spins
        for index in self._signals[word & 1]:
            while words[index] != word:
                spins -= 1
                if spins < 0:
                    if spins < -_TURNS:
                        plan.await_rest(word)
                        return
                    let_others_run()
        if not self._is_same_call(word, self._signals[word & 1]):
            plan.await_rest(word)
        if spins < 0:
            self._spins = max(most >> 1, self.fewest_spins)
        elif most < SPINS and spins < most:
            self._spins = most + 1

    def flip(self) -> int:
        """Change to the other slot, for a call or a chunk; return its number."""
        self.phase = phase = self.phase ^ 1
        return phase

    def put(self, place: Array, data: Array) -> None:
        """Copy part of an array into a slot."""
        place[...] = data

    def arrived(self, word: int) -> bool:
        words, signals = self._words, self._signals[word & 1]
        return all(words[index] == word for index in signals) and self._is_same_call(word, signals)

    def absent(self, word: int) -> list[int]:
        posts = self._signals[word & 1]
        return [peer for peer, index in zip(self.peers, posts, strict=True) if self._words[index] != word]

    def check(self, word: int, signature: Signature) -> None:
        """Raise DistBackendError if a rank makes another call, has given up, has left, or is dead.

        Called while some rank has not arrived. No rank can have got further, so a rank that has given up has given up
        this call.
        """
        self.check_states(word, signature)
        for peer in self.peers:
            if self.members.ended(peer):
                self.check_states(word, signature)  # it may have recorded its departure between the two checks
                raise peer_gone(self.members.describe(peer), self.members.how_ended(peer), LeftOut.CALL)

    def underway(self, word: int) -> list[int]:
        """Return the ranks that have not signalled `word` but still may."""
        words, ended = self._words, self.members.ended
        return [peer for peer in self.absent(word) if not words[self.region.line(peer, STATE)] and not ended(peer)]

    def is_behind(self) -> bool:
        """Return whether another rank has signalled the next step."""
        following = self.step + 1
        return any(self._words[index] & _STEP == following & _STEP for index in self._signals[following & 1])

    def next_word(self, fingerprint: int, steps: int) -> int:
        return fingerprint & ~_STEP | self.step + steps & _STEP

    def has_mismatch(self) -> bool:
        """Return whether a rank has signalled another call in the current step, or has reported a mismatch."""
        words = self._words
        return self._is_other_call(self._word) or any(
            words[self.region.line(peer, STATE)] == _MISMATCH for peer in self.peers
        )

    def _is_same_call(self, word: int, signals: Sequence[int]) -> bool:
        """Return whether the ranks at `signals`, which have signalled `word`, did so for this rank's call."""
        words = self._words
        fingerprint = words[self._mine + (word & 1) + FINGERPRINT]
        return all(words[index + FINGERPRINT] == fingerprint for index in signals)

    def _is_other_call(self, word: int) -> bool:
        """Return whether a rank has signalled another call in the step of `word`."""
        words = self._words
        # Read each word once: a peer may signal in between.
        signalled = {index: words[index] for index in self._signals[word & 1]}
        if any(other != word and (other ^ word) & _STEP == 0 for other in signalled.values()):
            return True
        return not self._is_same_call(word, [index for index, other in signalled.items() if other == word])

    def check_states(self, word: int, signature: Signature) -> None:
        words = self._words
        if self._is_other_call(word):
            raise self._mismatch_error(signature)
        if words[self.region.line(self.rank, STATE)] == _FAILED:
            # Another thread of this rank gave the group up, for a reason that concerns this thread too.
            raise DistBackendError(self._reason)
        for peer in self.peers:
            state = words[self.region.line(peer, STATE)]
            if state == _MISMATCH:
                if self.arrived(word):  # all may have come just now: the peer has found it in the next call
                    continue
                raise self._mismatch_error(signature)
            if state:
                departure = Departure.decode(self.region.text(peer))
                raise peer_gone(self.members.describe(peer), departure, LeftOut.CALL)

    def check_now(self, signature: Signature) -> None:
        self.check(self._word, signature)

    def leave(self, departure: Departure) -> None:
        if self._words[self.region.line(self.rank, STATE)] == 0:
            self._publish_state(_LEFT, departure.encode(TEXT_BYTES))

    def fail(self, error: DistError) -> None:
        if self._words[self.region.line(self.rank, STATE)] == 0:
            self._reason = str(error)
            self._publish_state(_FAILED, gave_up(error).encode(TEXT_BYTES))

    def sleep_on(self, bell: Doorbell | None) -> None:
        self.region.set_bell(self.rank, 0 if bell is None else bell.number)

    def _publish_state(self, state: int, text: bytes) -> None:
        self.region.write_text(self.rank, text)
        self._words[self.region.line(self.rank, STATE)] = state
        if state != _LEFT and not self.arrived(self._word):
            # Take back the signal: a late rank must see the state, not a step that never completes.
            self._words[self._mine + (self.step & 1)] = 0
        self._ring()

    def _ring(self) -> None:
        for peer, number in enumerate(self.region.bells()):
            if number and peer != self.rank:
                self.members.ring(peer, number)

    def _mismatch_error(self, signature: Signature) -> DistBackendError:
        if self.explain is not None:
            return self.explain()
        number, region, words = self.members.number, self.region, self._words

        def collect() -> dict[int, str]:
            told = [peer for peer in self.peers if words[region.line(peer, STATE)] == _MISMATCH]
            return {number(peer): region.text(peer).decode(errors="replace") for peer in told}

        check = CallCheck(number(self.rank), self.members.ranks)
        return check.explain(
            signature, len(self.peers), lambda mine: self._publish_state(_MISMATCH, mine.encode()), collect
        )


class BarrierWait(Waitable):
    def __init__(self, barrier: FlagBarrier, word: int, signature: Signature) -> None:
        self.word = word
        self._barrier = barrier
        self._signature = signature

    def ready(self) -> bool:
        return self._barrier.arrived(self.word)

    def check(self) -> None:
        self._barrier.check(self.word, self._signature)

    def arm(self, bell: Doorbell) -> None:
        self._barrier.sleep_on(bell)

    def disarm(self, bell: Doorbell) -> None:
        self._barrier.sleep_on(None)

    def missing(self) -> str:
        return ", ".join(self._barrier.members.describe(peer) for peer in self._barrier.absent(self.word))

    def awaits(self) -> list[int]:
        members = self._barrier.members
        return [members.ranks[members.number(peer)] for peer in self._barrier.absent(self.word)]


class BarrierPlan(Plan):
    def __init__(self, barrier: FlagBarrier, backend: Backend, call: Call) -> None:
        super().__init__(backend, call)
        self.barrier = barrier
        self.fingerprint = self.signature.fingerprint

    @abstractmethod
    def steps(self, send: Buffers, recv: Buffers) -> Iterator[BarrierWait]:
        """Carry out the call, yielding a wait at each step."""

    def adopt_signature(self, signature: Signature) -> None:
        """Carry out a part of another call: signal and report that call's signature."""
        self.signature, self.fingerprint = signature, signature.fingerprint

    def run(self, send: Buffers, recv: Buffers) -> None:
        await_all = self.barrier.await_all
        for wait in self.steps(send, recv):
            await_all(wait.word, self)

    def first_step(self, send: Buffers, recv: Buffers) -> Callable[[], object]:
        """Take the first step of a call; return what carries out the rest."""
        steps = self.steps(send, recv)
        self.barrier.await_all(next(steps).word, self)
        return partial(self._take_steps, steps)

    def _take_steps(self, steps: Iterator[BarrierWait]) -> None:
        for wait in steps:
            self.barrier.await_all(wait.word, self)

    def arrive(self) -> BarrierWait:
        return BarrierWait(self.barrier, self.barrier.signal(self.fingerprint), self.signature)

    def await_rest(self, word: int) -> None:
        """Go on with a wait that takes longer than a few polls."""
        await_rest(self.backend, self.error_prefix, self.barrier, self.signature, word)

    def compiled(self, copies: StepCopies | None) -> Step | None:
        """Return what carries out a call of one step; None if the core does not."""
        if core.module is None or copies is None:
            return None
        # Not of this plan, which holds the step.
        wait = partial(await_rest, self.backend, self.error_prefix, self.barrier, self.signature)
        return core.Step(self.barrier, self.fingerprint, wait, *copies)


class OneStep(BarrierPlan):
    """A call of few bytes: put them into the slot, step, take what the others put.

    The core does all of that, if it is there, as far as `step_copies` can describe it.
    """

    copies = True
    _step: Step | None = None
    _is_compiled = False

    @abstractmethod
    def put(self, send: Buffers, phase: int) -> None: ...

    @abstractmethod
    def take(self, recv: Buffers, phase: int) -> None: ...

    def step_copies(self) -> StepCopies | None:
        """Return what `put` and `take` do, for the core; None if they do more than that can describe."""
        return None

    @property
    def runner(self) -> Callable[[Any, Any], object]:
        return self._compile() or self.run

    def adopt_signature(self, signature: Signature) -> None:
        super().adopt_signature(signature)
        self._step, self._is_compiled = None, False

    def run(self, send: Buffers, recv: Buffers) -> None:
        step = self._compile()
        if step is not None and step(send, recv):
            return
        phase = self.barrier.flip()
        self.put(send, phase)
        self.barrier.await_all(self.barrier.signal(self.fingerprint), self)
        self.take(recv, phase)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[BarrierWait]:
        phase = self.barrier.flip()
        self.put(send, phase)
        yield self.arrive()
        self.take(recv, phase)

    def rest(self, recv: Buffers, word: int, phase: int) -> Iterator[BarrierWait]:
        yield BarrierWait(self.barrier, word, self.signature)
        assert self._step is not None, "the core has begun the call"
        self._step.finish(recv, phase)

    def _compile(self) -> Step | None:
        if not self._is_compiled:
            self._is_compiled = True
            self._step = self.compiled(self.step_copies())
        return self._step


def await_rest(backend: Backend, error_prefix: str, barrier: FlagBarrier, signature: Signature, word: int) -> None:
    backend.wait(BarrierWait(barrier, word, signature), error_prefix)


class SlotCopy(NamedTuple):
    """A copy between an array of a call, or a part of it, and its place in a slot."""

    array: int  # -1 is the sizes
    offset: int
    num_bytes: int
    address: int


class StepCopies(NamedTuple):
    """What a call of one step copies, for the core."""

    keeps: Any  # the arrays in the slots; the addresses point into them
    num_sent: int  # arrays of the call
    num_received: int
    # For both phases, the copies into the slots and out of them.
    puts: Sequence[Sequence[SlotCopy]]
    takes: Sequence[Sequence[SlotCopy]]
    # What the rank keeps for itself, copied without the slots: the array and the offset that it is sent from, and those
    # that it is received into, bytes.
    kept: Sequence[tuple[int, int, int, int, int]] = ()
    op: str = ""  # the reduction; "" for none
    kind: str = "-"  # what dtype it is of
    itemsize: int = 0
    num_rows: int = 0
    rows: Sequence[Sequence[int]] = ()  # what is reduced: for both phases, the addresses of each rank's elements
    num_elements: int = 0
    total: int = 0  # where the result is put together before `takes` copy it to the arrays; 0 if it is one array
    # If no rank knows all sizes: the table of all ranks' sizes when they were last compared; the address of this rank's
    # own, which are array -1 of `puts`; and for both phases, the address of the table.
    agreed: bytes = b""
    sizes: int = 0
    tables: tuple[int, int] = (0, 0)


class FencedFlagBarrier(FlagBarrier):
    """For processors that may reorder stores and loads: all but x86-64."""

    def signal(self, fingerprint: int) -> int:
        # Before the signal, as all that this rank has written before.
        self._words[self._mine + (self.step + 1 & 1) + FINGERPRINT] = fingerprint
        fence()
        return super().signal(fingerprint)

    def _is_same_call(self, word: int, signals: Sequence[int]) -> bool:
        fence()
        return super()._is_same_call(word, signals)

    def await_all(self, word: int, plan: BarrierPlan) -> None:
        super().await_all(word, plan)
        fence()

    def arrived(self, word: int) -> bool:
        arrived = super().arrived(word)
        fence()
        return arrived


if TYPE_CHECKING or core.module is not None:

    class CompiledFlagBarrier(core.Barrier, FlagBarrier):
        """The core signals and waits; it has acquire and release order on all processors."""

        def __init__(self, region: SharedRegion, rank: int, num_ranks: int, members: PeerSet) -> None:
            FlagBarrier.__init__(self, region, rank, num_ranks, members)
            even, odd = self._signals
            self.attach(self._words, self._mine, even, odd, self._bells)


def flag_barrier_class() -> type[FlagBarrier]:
    if core.module is not None:
        return CompiledFlagBarrier
    return FlagBarrier if KEEPS_ORDER else FencedFlagBarrier
