"""FlagBarrier: the ranks of a group advance in steps, and compare their calls.

In every step each rank writes the fingerprint of its call, signals a word that holds the number of the step and half of
the fingerprint, and waits until others have signalled the same word, for the same fingerprint. A word or a fingerprint
of another call in this step is a mismatch.

In most steps all ranks wait for all others. A rank that has seen the signals of such a step s knows that all have
finished step s - 1. So a slot may be written again after any step of that kind later than its last use.

In a call of few bytes in which not all ranks take data of all, a rank waits only for the ranks whose data it takes, and
may return before the others have come. So do the root of a broadcast, the other ranks of a reduce, and all ranks but
the last of a scan. But a rank waits until all have signalled the step `AHEAD` steps before, and compares the calls of
that step. So it compares those of step s before it signals step s + AHEAD + 1, which all must have done before any rank
signals step s + 2 * (AHEAD + 1). That is `NUM_PHASES` steps later than s, and uses the signal and the small slot of s
again.

Where ranks share cores, they return early from longer calls as well, so that not all of them have to get a core in each
call. These use the early slots, of which there are few: step s uses the same one as step s + `NUM_EARLY_SLOTS`. So at
the end of the step before that, a rank waits until all have signalled step s + 1, and thus have finished step s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from meshdist.arrays.host import Array
from meshdist.backends.gloo.shm.shared_region import (
    CALL_WORDS,
    FINGERPRINT,
    MISMATCHED,
    NUM_EARLY_SLOTS,
    NUM_PHASES,
    SIGNAL_PLACES,
    STATE,
    TEXT_BYTES,
    SharedRegion,
    Slots,
)
from meshdist.errors import DistBackendError, DistError
from meshdist.runtime.call import Signature
from meshdist.runtime.call_mismatch import CallCheck
from meshdist.runtime.departure import Departure, LeftOut, gave_up, peer_gone
from meshdist.runtime.waiting import Doorbell, Waitable
from meshdist.system.platform import let_others_run

_STEP = 0xFFFFFFFF
# States of a rank.
_LEFT, _FAILED, _MISMATCH = 1, 2, 3
# How many steps a rank may be ahead of another when it returns from a call.
AHEAD = NUM_PHASES // 2 - 1
# In `_long_steps`: the last steps, and that whose early slot the next step uses.
_LAST_STEPS, _NEXT_EARLY_SLOT = (1 << NUM_EARLY_SLOTS) - 1, 1 << NUM_EARLY_SLOTS - 1
# How often to poll before yielding: some microseconds, the delay of a peer in the same call. Fewer after a poll in
# vain; once, where more ranks than cores are known of: polling keeps peers from running. Then, how often to yield
# before sleeping.
SPINS, _FEWEST_SPINS, _TURNS = 60, 4, 60


class Awaited(NamedTuple):
    """The other ranks for whom a rank waits in a step, by their place among the others.

    Attributes:
        first, end: Those from the first up to the end.
        in_order: Each of them waits for those before it; else several of them wait for none.
        is_long: The slots of the call are the early ones, of which there are few.
    """

    first: int
    end: int
    in_order: bool
    is_long: bool = False


ALL = Awaited(-1, -1, False)  # all, as all ranks do


class EarlyReturn(NamedTuple):
    """A call from which ranks return before the others have come."""

    awaited: Awaited
    slots: Slots  # used in turn by the steps, one by each


class LongWait(Protocol):
    """What goes on with a wait that takes longer than a few polls; a plan."""

    def await_rest(self, word: int) -> None: ...


class PeerSet(NamedTuple):
    """The processes of a group's ranks; `number` is a rank's number in the larger group with the global `ranks`."""

    ended: Callable[[int], bool]
    how_ended: Callable[[int], Departure]
    ring: Callable[[int, int], None]
    describe: Callable[[int], str]
    number: Callable[[int], int]
    ranks: Sequence[int]

    def global_rank(self, rank: int) -> int:
        return self.ranks[self.number(rank)]


class FlagBarrier:
    """One rank's view of its group's steps.

    Attributes:
        step: The number of the last step that this rank has signalled.
        phase: The slot that the current call uses, 0 or 1; calls of which ranks return early use other slots.
        most_early_bytes: The most that a rank may put into its slot in a call from which ranks return early.
    """

    # Reports a mismatch if these ranks are part of a larger group: it collects the calls of all of them.
    explain: Callable[[], DistBackendError] | None = None
    # Returns the line of a call of this rank; see `BackendOptions.line_of_earlier`.
    line_of_earlier: Callable[[str, int], str] | None = None

    def __init__(self, region: SharedRegion, rank: int, num_ranks: int, members: PeerSet) -> None:
        self.step = self.phase = 0
        self._word = 0
        self._first, self._end, self._in_order, _ = ALL
        self._long_steps = 0  # bits, of the last steps: whether the calls were long ones; the last bit is of this step
        self._compared = 0  # the last step of which this rank has compared the calls of all ranks
        self._spins, self.fewest_spins = SPINS, _FEWEST_SPINS
        self.region = region
        self.rank = rank
        self.peers = [peer for peer in range(num_ranks) if peer != rank]
        self.members = members
        self._words = region.words
        self._mine = region.line(rank, 0)
        self._reason = ""
        self._signals = tuple(region.line(peer, 0) for peer in self.peers)
        self._bells = region.bell_words()
        self._calls = region.call_words(rank)
        self._recorded_texts: list[bytes | None] = [None] * NUM_PHASES
        self._returns_early = False  # whether there is memory for that
        self.most_early_bytes = region.small_slots.slot_bytes

    def early_return(self, givers: range | None, num_bytes: int, *, in_order: bool = False) -> EarlyReturn | None:
        """Return how ranks return early from a call, if they do.

        Args:
            givers: The ranks from which this rank takes; it may be one of them. None if all ranks take from all.
            num_bytes: The most that a rank puts into its slot.
            in_order: Each rank takes from those before it.
        """
        # In a part of a larger group, all ranks of that compare each call before the next one.
        if givers is None or num_bytes > self.most_early_bytes or self.explain is not None:
            return None
        if not self._returns_early:
            self.region.reserve_early_returns(self.rank)
            self._returns_early = True
        places = [place for place, peer in enumerate(self.peers) if peer in givers]
        first, end = (places[0], places[-1] + 1) if places else (0, 0)
        is_long = num_bytes > self.region.small_slots.slot_bytes
        slots = self.region.early_slots if is_long else self.region.small_slots
        return EarlyReturn(Awaited(first, end, in_order, is_long), slots)

    def record_call(self, text: bytes) -> int:
        """Record which call this rank makes in the next step, from which it may return early; return the phase."""
        step = self.step + 1
        phase = step % NUM_PHASES
        if self._recorded_texts[phase] is not text:
            self.region.write_call_text(self.rank, phase, text)
            self._recorded_texts[phase] = text
        self._words[self._calls + phase * CALL_WORDS] = step
        return phase

    def signal(self, fingerprint: int, awaited: Awaited = ALL) -> int:
        """Enter the next step; return the word that all ranks have to signal."""
        self.step = step = self.step + 1
        self._word = word = fingerprint & ~_STEP | step & _STEP
        self._first, self._end, self._in_order, is_long = awaited
        self._long_steps = self._long_steps << 1 & _LAST_STEPS | is_long
        words, mine = self._words, self._mine + SIGNAL_PLACES[step % NUM_PHASES]
        words[mine + FINGERPRINT] = fingerprint
        words[mine] = word
        for bells in self._bells:
            if words[bells]:
                self._ring()
                break
        return word

    def await_others(self, word: int, plan: LongWait) -> None:
        """Wait for those whom the current step, in which this rank has signalled `word`, needs."""
        words, everyone = self._words, self._signals
        spins = most = self._spins
        is_next = self._first < 0 and self._compared + 1 == self.step  # most calls need nothing else
        for step, signals in ((self.step, everyone),) if is_next else self._due():
            place = SIGNAL_PLACES[step % NUM_PHASES]
            expected = word if step == self.step else words[self._mine + place]
            for index in signals:
                while words[index + place] != expected:
                    spins -= 1
                    if spins < 0:
                        if spins < -_TURNS:
                            plan.await_rest(word)
                            return
                        let_others_run()
            if not self._is_same_call(step, signals):
                plan.await_rest(word)
                return
            if signals is everyone:
                self._compared = step
        if spins < 0:
            self._spins = max(most >> 1, self.fewest_spins)
        elif most < SPINS and spins < most:
            self._spins = most + 1

    def _due(self) -> Iterable[tuple[int, Sequence[int]]]:
        """Return what the current step needs: steps, and the signals to wait for and compare in each."""
        step, everyone, following = self.step, self._signals, self._compared + 1
        awaited = everyone if self._first < 0 else everyone[self._first : self._end]
        last = step if len(awaited) == len(everyone) else step - self._ahead()
        compared = (
            ((last, everyone),) if last == following else [(each, everyone) for each in range(following, last + 1)]
        )
        return compared if last == step or not awaited else ((step, awaited), *compared)

    def _ahead(self) -> int:
        """Return how many steps before the current one the step is that all have to have signalled."""
        return NUM_EARLY_SLOTS - 2 if self._long_steps & _NEXT_EARLY_SLOT else AHEAD

    def flip(self) -> int:
        """Change to the other slot, for a call or a chunk; return its number."""
        self.phase = phase = self.phase ^ 1
        return phase

    def put(self, place: Array, data: Array) -> None:
        """Copy part of an array into a slot."""
        place[...] = data

    def arrived(self, word: int) -> bool:
        """Return whether those have come whom the step of `word` needs: in an earlier step than this, all."""
        if word != self._word:
            return not self.absent(word) and self._is_same_call(word & _STEP, self._signals)
        for step, signals in self._due():
            if not self._have_signalled(step, signals):
                return False
            if signals is self._signals:
                self._compared = step
        return True

    def absent(self, word: int) -> list[int]:
        """Return the ranks that have not come, of those whom the step of `word` needs: in another than this, all."""
        if word != self._word:
            place = _place(word & _STEP)
            found = {index for index in self._signals if self._words[index + place] != word}
        else:
            due = ((step, index) for step, signals in self._due() for index in signals)
            found = {index for step, index in due if not self._have_signalled(step, (index,))}
        return [peer for peer, index in zip(self.peers, self._signals, strict=True) if index in found]

    def signalled(self, word: int) -> list[int]:
        """Return the ranks that have signalled the step of `word` for this rank's call."""
        place = _place(word & _STEP)
        return [
            peer for peer, index in zip(self.peers, self._signals, strict=True) if self._words[index + place] == word
        ]

    def check(self, signature: Signature) -> None:
        """Raise DistBackendError if a rank makes another call, has given up, has left, or is dead.

        Called while some rank has not come. No rank can have got further than this call, so one that has left has not
        completed it; unless ranks return early from it.
        """
        self.check_states(signature)
        for peer in self.peers:
            if self.members.ended(peer) and not self._has_returned(peer):
                self.check_states(signature)  # it may have recorded its departure between the two checks
                raise peer_gone(
                    self.members.describe(peer),
                    self.members.how_ended(peer),
                    LeftOut.CALL,
                    rank=self.members.global_rank(peer),
                )

    def underway(self, word: int) -> list[int]:
        """Return the ranks that have not signalled `word` but still may."""
        words, ended = self._words, self.members.ended
        return [peer for peer in self.absent(word) if not words[self.region.line(peer, STATE)] and not ended(peer)]

    def is_behind(self) -> bool:
        """Return whether another rank has signalled the next step."""
        following = self.step + 1
        place = _place(following)
        return any(self._words[index + place] & _STEP == following & _STEP for index in self._signals)

    def next_word(self, fingerprint: int, steps: int) -> int:
        return fingerprint & ~_STEP | self.step + steps & _STEP

    def has_mismatch(self) -> bool:
        """Return whether a rank has signalled another call in a step so far, or has reported a mismatch."""
        words = self._words
        return self._mismatched_step() is not None or any(
            words[self.region.line(peer, STATE)] == _MISMATCH for peer in self.peers
        )

    def _have_signalled(self, step: int, signals: Sequence[int]) -> bool:
        """Return whether the ranks at `signals` have signalled this rank's call in a step."""
        words, place, word = self._words, _place(step), self._word_of(step)
        return all(words[index + place] == word for index in signals) and self._is_same_call(step, signals)

    def _word_of(self, step: int) -> int:
        """Return what this rank has signalled in a step; in the current one, also if it has taken that back."""
        return self._word if step == self.step else self._words[self._mine + _place(step)]

    def _is_same_call(self, step: int, signals: Sequence[int]) -> bool:
        """Return whether the ranks at `signals`, which have signalled this rank's word of a step, made its call."""
        words, place = self._words, SIGNAL_PLACES[step % NUM_PHASES] + FINGERPRINT
        fingerprint = words[self._mine + place]
        for index in signals:  # noqa: SIM110 - `all` takes longer
            if words[index + place] != fingerprint:
                return False
        return True

    def _mismatched_step(self) -> int | None:
        """Return the first step, of those not compared yet, in which a rank has signalled another call."""
        steps = range(self._compared + 1, self.step + 1)
        return next((step for step in steps if self._is_other_call(step)), None)

    def _is_other_call(self, step: int) -> bool:
        """Return whether a rank has signalled another call in a step."""
        words, place, word = self._words, _place(step), self._word_of(step)
        # Read each word once: a peer may signal in between.
        signalled = {index: words[index + place] for index in self._signals}
        if any(other != word and (other ^ word) & _STEP == 0 for other in signalled.values()):
            return True
        return not self._is_same_call(step, [index for index, other in signalled.items() if other == word])

    def _has_returned(self, peer: int) -> bool:
        """Return whether a rank may have returned from the current call before this one."""
        first, end = self._first, self._end
        if first < 0:
            return False
        place = self.peers.index(peer)
        if self._in_order:
            end = min(end, place)
        elif place == first or end - first > 1:  # those from whom others take wait for none
            end = first
        return self._have_signalled(self.step, (*self._signals[first:end], self._signals[place]))

    def check_states(self, signature: Signature) -> None:
        words = self._words
        mismatched = self._mismatched_step()
        if mismatched is not None:
            raise self._mismatch_error(signature, mismatched)
        if words[self.region.line(self.rank, STATE)] == _FAILED:
            # Another thread of this rank gave the group up, for a reason that concerns this thread too.
            raise DistBackendError(self._reason)
        for peer in self.peers:
            state = words[self.region.line(peer, STATE)]
            if state == _MISMATCH:
                mismatched = words[self.region.line(peer, MISMATCHED)]
                if mismatched > self.step:  # the peer has found it in a later call
                    continue
                raise self._mismatch_error(signature, mismatched)
            if state == _FAILED or (state and not self._has_returned(peer)):
                departure = Departure.decode(self.region.text(peer))
                raise peer_gone(
                    self.members.describe(peer), departure, LeftOut.CALL, rank=self.members.global_rank(peer)
                )

    def check_now(self, signature: Signature) -> None:
        self.check(signature)

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
            self._words[self._mine + _place(self.step)] = 0
        self._ring()

    def _ring(self) -> None:
        for peer, number in enumerate(self.region.bells()):
            if number and peer != self.rank:
                self.members.ring(peer, number)

    def _mismatch_error(self, signature: Signature, step: int) -> DistBackendError:
        """Return the error of a step in which the ranks make different calls; `signature` is that of this rank's."""
        if self.explain is not None:
            return self.explain()
        number, region, words = self.members.number, self.region, self._words

        def publish(mine: str) -> None:
            words[region.line(self.rank, MISMATCHED)] = step
            self._publish_state(_MISMATCH, mine.encode())

        def has_told(peer: int) -> bool:
            line = region.line(peer, 0)
            return words[line + STATE] == _MISMATCH and words[line + MISMATCHED] == step

        def collect() -> dict[int, str]:
            told = filter(has_told, self.peers)
            return {number(peer): region.text(peer).decode(errors="replace") for peer in told}

        check = CallCheck(number(self.rank), self.members.ranks)
        # The calls between this step and the current one took a step each, and are complete: ranks return early from
        # them, since a call for which this rank waited for all has compared all calls before it.
        earlier = self._own_earlier(step, self.step - step - 1, went_on=True) if step < self.step else None
        mine = check.words(signature) if earlier is None else earlier
        return check.explain(mine, len(self.peers), publish, collect, lambda: self._recorded(step))

    def disagreement(self) -> str:
        """Return which calls disagree, in words, if ranks have returned from them and none has raised; else ""."""
        step = None if self._words[self.region.line(self.rank, STATE)] else self._mismatched_step()
        if step is None:
            return ""
        number, calls = self.members.number(self.rank), self._recorded(step)
        mine = self._own_earlier(step, self.step - step)
        error = CallCheck(number, self.members.ranks).error(calls if mine is None else {**calls, number: mine})
        return f"the ranks' last calls disagreed\n{error.hang_report}"

    def _own_earlier(self, step: int, num_later: int, *, went_on: bool = False) -> str | None:
        """Return the words of the call that this rank made in a step, after which it completed `num_later` calls.

        None if this rank waited for all others in that call.
        """
        recorded = self.region.call(self.rank, step)
        if recorded is None:
            return None
        call = recorded.decode(errors="replace")
        line = "" if self.line_of_earlier is None else self.line_of_earlier(call, num_later)
        return CallCheck.words_of_earlier(call, line, went_on=went_on)

    def _recorded(self, step: int) -> dict[int, str]:
        """Return the words of the recorded calls of a step, by the number of the rank."""
        calls = {peer: self.region.call(peer, step) for peer in (self.rank, *self.peers)}
        return {
            self.members.number(peer): CallCheck.words_of_earlier(call.decode(errors="replace"))
            for peer, call in calls.items()
            if call is not None
        }


def _place(step: int) -> int:
    """Return where in a rank's signals that of a step is."""
    return SIGNAL_PLACES[step % NUM_PHASES]


class BarrierWait(Waitable):
    def __init__(self, barrier: FlagBarrier, word: int, signature: Signature) -> None:
        self.word = word
        self._barrier = barrier
        self._signature = signature

    def ready(self) -> bool:
        return self._barrier.arrived(self.word)

    def check(self) -> None:
        self._barrier.check(self._signature)

    def arm(self, bell: Doorbell) -> None:
        self._barrier.sleep_on(bell)

    def disarm(self, bell: Doorbell) -> None:
        self._barrier.sleep_on(None)

    def missing(self) -> str:
        return ", ".join(self._barrier.members.describe(peer) for peer in self._barrier.absent(self.word))

    def awaits(self) -> list[int]:
        return self._global_ranks(self._barrier.absent(self.word))

    def present(self) -> list[int]:
        # Not all others than those awaited: it may need the signals of some, and those of one host are its peers.
        return self._global_ranks(self._barrier.signalled(self.word))

    def _global_ranks(self, peers: Sequence[int]) -> list[int]:
        return [self._barrier.members.global_rank(peer) for peer in peers]
