"""Lockstep: the ranks of a group advance together, and compare what they are doing.

Every step, each rank posts a word that holds the fingerprint of its call and the number of the step, and waits until
all others have posted the same word. A rank that has seen the posts of step s knows that all have finished step s - 1.
So no rank is ever more than one step from another, two words for each rank (even and odd steps) are enough, and a slot
may be written again as soon as a later step than its last use has been passed.

A word that carries this step's number and another fingerprint is a call that disagrees.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

from meshdist.backends.base import Backend, Plan
from meshdist.backends.gloo.arena import STATE, Arena
from meshdist.backends.gloo.fences import KEEPS_ORDER, fence
from meshdist.call import Buffers, Call, Signature, call_site
from meshdist.deadline import Deadline
from meshdist.debug.mismatch import disagreement
from meshdist.errors import DistBackendError
from meshdist.farewell import gave_up, peer_gone
from meshdist.systems import let_others_run
from meshdist.waiting import Doorbell, Waitable

_STEP = 0xFFFFFFFF
# States of a rank.
_LEFT, _FAILED, _DISAGREES = 1, 2, 3
# How often to look before letting others run: some microseconds, which is what a peer that is under way takes. Where it
# was in vain it is less often next time, as on a machine with more ranks than cores, where looking keeps a peer from
# coming. Then, how often to let others run before asking what keeps them.
LOOKS, _FEWEST_LOOKS, _TURNS = 60, 4, 60
# How long a rank whose call disagrees waits for the others to say what theirs is. They find out in the same step.
_EXPLAIN_S = 0.8
_LEFT_OUT = "making this call"


class Members:
    """The ranks of a group as their processes: whether they live, how they are woken, what they are called.

    `number` is what a rank is numbered in messages, which may be of a larger group, whose global ranks are `ranks`.
    """

    def __init__(
        self,
        ended: Callable[[int], bool],
        how_ended: Callable[[int], str],
        ring: Callable[[int, int], None],
        describe: Callable[[int], str],
        number: Callable[[int], int],
        ranks: Sequence[int],
    ) -> None:
        self.ranks = ranks
        self.number = number
        self.ended = ended
        self.how_ended = how_ended
        self.ring = ring
        self.describe = describe


class Lockstep:
    """One rank's place in the steps of its group.

    Attributes:
        step: The number of the last step that this rank has posted.
        use: Which of the two slots the current call uses, 0 or 1.
        explain: Finds out what the calls are that disagree, where these ranks are some of a larger group, all of which
            are to hear of it, and to be heard.
    """

    explain: Callable[[], DistBackendError] | None = None

    def __init__(self, arena: Arena, rank: int, num_ranks: int, members: Members) -> None:
        self.step = 0
        self.use = 0
        self._word = 0
        self._looks = LOOKS
        self.arena = arena
        self.rank = rank
        self.peers = [peer for peer in range(num_ranks) if peer != rank]
        self.members = members
        self._words = arena.words
        self._mine = arena.line(rank, 0)
        self._posts = tuple(tuple(arena.line(peer, parity) for peer in self.peers) for parity in (0, 1))
        self._bells = arena.bell_words()

    def post(self, fingerprint: int) -> int:
        """Enter the next step; return the word that all ranks have to post."""
        self.step = step = self.step + 1
        self._word = word = fingerprint | (step & _STEP)
        words = self._words
        words[self._mine + (step & 1)] = word
        for bells in self._bells:
            if words[bells]:
                self._ring()
                break
        return word

    def meet(self, plan: LockstepPlan) -> None:
        """Enter the next step and return when all ranks have."""
        self.await_all(self.post(plan.fingerprint), plan)

    def await_all(self, word: int, plan: LockstepPlan) -> None:
        """Return when all ranks have posted `word`, as this one has."""
        words = self._words
        looks = most = self._looks
        for index in self._posts[word & 1]:
            while words[index] != word:
                looks -= 1
                if looks < 0:
                    if looks < -_TURNS:
                        plan.wait(Arrival(self, word, plan.signature))
                        return
                    let_others_run()
        if looks < 0:
            self._looks = max(most >> 1, _FEWEST_LOOKS)
        elif most < LOOKS and looks < most:
            self._looks = most + 1

    def flip(self) -> int:
        """Change to the other slot, for a call or a chunk; return which it is."""
        self.use = use = self.use ^ 1
        return use

    def arrived(self, word: int) -> bool:
        """Return True once all ranks have posted `word`."""
        words = self._words
        return all(words[index] == word for index in self._posts[word & 1])

    def absent(self, word: int) -> list[int]:
        """Return the ranks that have not posted `word`."""
        posts = self._posts[word & 1]
        return [peer for peer, index in zip(self.peers, posts, strict=True) if self._words[index] != word]

    def check(self, word: int, signature: Signature) -> None:
        """Raise DistBackendError if a rank disagrees, has given up, has left, or is dead.

        Asked while some rank has not come: until it does no rank can have got further, so one that has come and given
        up since has given up this call.
        """
        self.check_states(word, signature)
        for peer in self.peers:
            if self.members.ended(peer):
                self.check_states(word, signature)  # its last word may have come right after the look
                raise peer_gone(self.members.describe(peer), self.members.how_ended(peer), _LEFT_OUT)

    def underway(self, word: int) -> list[int]:
        """Return the ranks that have not posted `word`, and may."""
        words, ended = self._words, self.members.ended
        return [peer for peer in self.absent(word) if not words[self.arena.line(peer, STATE)] and not ended(peer)]

    def next_word(self, fingerprint: int, steps: int) -> int:
        """Return what `post` will return for the call of a fingerprint after so many steps."""
        return fingerprint | (self.step + steps & _STEP)

    def is_at_odds(self) -> bool:
        """Return whether a rank has posted another call than this one in its current step, or found that one has."""
        words, word = self._words, self._word
        posted = [words[index] for index in self._posts[word & 1]]
        return any(other != word and (other ^ word) & _STEP == 0 for other in posted) or any(
            words[self.arena.line(peer, STATE)] == _DISAGREES for peer in self.peers
        )

    def check_states(self, word: int, signature: Signature) -> None:
        """Like `check`, by what the ranks have said: raise if one disagrees, has given up, or has left."""
        words = self._words
        # Each word is read once: a peer may post between two looks.
        posted = [words[index] for index in self._posts[word & 1]]
        if any(other != word and (other ^ word) & _STEP == 0 for other in posted):
            raise self._disagree(signature)
        if words[self.arena.line(self.rank, STATE)] == _FAILED:
            # Another thread of this rank gave the group up; what it says is on the group.
            raise DistBackendError(self.arena.text(self.rank))
        for peer in self.peers:
            state = words[self.arena.line(peer, STATE)]
            if state == _DISAGREES:
                raise self._disagree(signature)
            if state:
                text = self.arena.text(peer)
                raise peer_gone(self.members.describe(peer), text if state == _LEFT else gave_up(text), _LEFT_OUT)

    def check_now(self, signature: Signature) -> None:
        """Like `check`, in the middle of a step: raise if a rank has given up or is dead."""
        self.check(self._word, signature)

    def leave(self, farewell: str) -> None:
        """Say that this rank makes no more calls; it has the last word only if it has not failed."""
        if self._words[self.arena.line(self.rank, STATE)] == 0:
            self._say(_LEFT, farewell)

    def fail(self, reason: str) -> None:
        """Say that this rank cannot go on, and why."""
        if self._words[self.arena.line(self.rank, STATE)] == 0:
            self._say(_FAILED, reason)

    def sleep_on(self, bell: Doorbell | None) -> None:
        """Ask to be woken by `bell`, or by none."""
        self.arena.set_bell(self.rank, 0 if bell is None else bell.number)

    def _say(self, state: int, text: str) -> None:
        self.arena.write_text(self.rank, text)
        self._words[self.arena.line(self.rank, STATE)] = state
        if state != _LEFT and not self.arrived(self._word):
            # Take back the post: a rank that comes late must look at the state, not at a step that nobody finishes.
            self._words[self._mine + (self.step & 1)] = 0
        self._ring()

    def _ring(self) -> None:
        for peer, number in enumerate(self.arena.bells()):
            if number and peer != self.rank:
                self.members.ring(peer, number)

    def _disagree(self, signature: Signature) -> DistBackendError:
        if self.explain is not None:
            return self.explain()
        mine = f"{signature.text} at {call_site()}"
        self._say(_DISAGREES, mine)
        deadline = Deadline(_EXPLAIN_S)
        pause = threading.Event()
        silent = self.peers
        while silent and not deadline.expired():
            pause.wait(deadline.slice_s(0.001))
            silent = [peer for peer in silent if self._words[self.arena.line(peer, STATE)] != _DISAGREES]
        number = self.members.number
        calls = {number(peer): self.arena.text(peer) for peer in self.peers if peer not in silent}
        return DistBackendError(disagreement({**calls, number(self.rank): mine}, self.members.ranks))


class Arrival(Waitable):
    """All ranks have posted a word."""

    def __init__(self, lockstep: Lockstep, word: int, signature: Signature) -> None:
        self.word = word
        self._lockstep = lockstep
        self._signature = signature

    def ready(self) -> bool:
        return self._lockstep.arrived(self.word)

    def check(self) -> None:
        self._lockstep.check(self.word, self._signature)

    def arm(self, bell: Doorbell) -> None:
        self._lockstep.sleep_on(bell)

    def disarm(self, bell: Doorbell) -> None:
        self._lockstep.sleep_on(None)

    def missing(self) -> str:
        return ", ".join(self._lockstep.members.describe(peer) for peer in self._lockstep.absent(self.word))


class LockstepPlan(Plan):
    """A plan whose steps are those of the group's lockstep."""

    def __init__(self, lockstep: Lockstep, backend: Backend, call: Call) -> None:
        super().__init__(backend, call)
        self.lockstep = lockstep
        self.fingerprint = self.signature.fingerprint

    @abstractmethod
    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Arrival]:
        """Carry out the call, yielding whenever all ranks have to come."""

    def stand_for(self, signature: Signature) -> None:
        """Be a part of another call: who compares calls, and reads of one that differs, is to find what the user calls.

        Args:
            signature: That of the user's call.
        """
        self.signature, self.fingerprint = signature, signature.fingerprint

    def run(self, send: Buffers, recv: Buffers) -> None:
        await_all = self.lockstep.await_all
        for arrival in self.steps(send, recv):
            await_all(arrival.word, self)

    def arrive(self) -> Arrival:
        """Enter the next step and return the wait for the other ranks."""
        return Arrival(self.lockstep, self.lockstep.post(self.fingerprint), self.signature)


class OneStep(LockstepPlan):
    """A call of few bytes: put them into the slot, meet, take what the others put. The shortest way there is."""

    copies = True

    @abstractmethod
    def put(self, send: Buffers, use: int) -> None:
        """Put this rank's data into its slot."""

    @abstractmethod
    def take(self, recv: Buffers, use: int) -> None:
        """Take the others' data out of their slots."""

    def run(self, send: Buffers, recv: Buffers) -> None:
        # As `flip` and `meet` do; the call of a method takes a fortieth of the time of all this.
        lockstep = self.lockstep
        lockstep.use = use = lockstep.use ^ 1
        self.put(send, use)
        lockstep.await_all(lockstep.post(self.fingerprint), self)
        self.take(recv, use)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Arrival]:
        use = self.lockstep.flip()
        self.put(send, use)
        yield self.arrive()
        self.take(recv, use)


class FencedLockstep(Lockstep):
    """Lockstep for processors that may reorder stores, and loads: all but x86-64."""

    def post(self, fingerprint: int) -> int:
        fence()
        return super().post(fingerprint)

    def await_all(self, word: int, plan: LockstepPlan) -> None:
        super().await_all(word, plan)
        fence()

    def arrived(self, word: int) -> bool:
        arrived = super().arrived(word)
        fence()
        return arrived


def lockstep_class() -> type[Lockstep]:
    """Return the Lockstep for this machine's processor."""
    return Lockstep if KEEPS_ORDER else FencedLockstep
