"""Collectives on shared arrays: every rank reads, and in reductions writes, the arrays of the others where they lie.

Nothing is copied in or out. Whether it can be so only the ranks together know: each leaves a sign before the first
step. Ranks without shared arrays do meanwhile what the call would do without any; so where nobody has any, the call
goes on as if nobody had asked. Where some have and some have not, it begins anew without.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from meshdist.arrays import Array
from meshdist.backends.gloo.cuts import Cut
from meshdist.backends.gloo.lockstep import Arrival, LockstepPlan
from meshdist.backends.gloo.routes import Blocks, Route
from meshdist.backends.gloo.sharing import ORDINARY
from meshdist.call import Buffers, Call, Signature
from meshdist.quiet import quiet_runner

if TYPE_CHECKING:
    from meshdist.backends.gloo.host import Host
    from meshdist.backends.gloo.movement import BulkMove


class SharedPlan(LockstepPlan):
    """A plan for shared arrays.

    Args:
        host: The group's shared memory.
        call: What is prepared.
        give: From what is sent, the block that each rank reads.
        givers: The ranks that give something.
        otherwise: Carries the call out where not all blocks are in shared arrays. It flips to the other slot once
            before its first step, and until then changes nothing of what is sent or received.
    """

    def __init__(
        self,
        host: Host,
        call: Call,
        give: Callable[[Buffers], Blocks],
        givers: Sequence[int],
        otherwise: LockstepPlan,
    ) -> None:
        super().__init__(host.lockstep, host.backend, call)
        self.sharing = host.sharing
        self.rank, self.size = call.rank, call.size
        self.give = give
        self.otherwise = otherwise
        self._givers = givers
        self._gives = call.rank in givers

    def stand_for(self, signature: Signature) -> None:
        super().stand_for(signature)
        # Ranks with shared arrays and ranks without meet in the first step.
        self.otherwise.stand_for(signature)

    @abstractmethod
    def straight(self, send: Buffers, recv: Buffers, use: int) -> None:
        """Carry out this rank's part in the arrays themselves; all ranks have come."""

    def shares(self, send: Buffers, recv: Buffers) -> bool:
        """Return whether the arrays are such that `straight` can be for them."""
        return True

    def run(self, send: Buffers, recv: Buffers) -> None:
        lockstep, sharing = self.lockstep, self.sharing
        use = lockstep.use ^ 1  # that of the first step
        if sharing.heap.in_use or sharing.left[use]:
            super().run(send, recv)
            return
        # As `steps`, for most programs: they have no shared arrays, and this way costs next to nothing.
        steps, await_all = self.otherwise.steps(send, recv), lockstep.await_all
        await_all(next(steps).word, self)
        for arrival in self._together(send, recv, use) if sharing.any_left(use) else steps:
            await_all(arrival.word, self)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Arrival]:
        use = self.lockstep.use ^ 1
        if self._leave_sign(send, recv, use):
            self.lockstep.flip()
            yield self.arrive()
            yield from self._together(send, recv, use)
            return
        steps = self.otherwise.steps(send, recv)
        yield next(steps)
        yield from self._together(send, recv, use) if self.sharing.any_left(use) else steps

    def _leave_sign(self, send: Buffers, recv: Buffers, use: int) -> bool:
        if self._gives and self.sharing.possible and self.shares(send, recv):
            return self.sharing.leave_places(use, send, self.give)
        self.sharing.leave(use, ORDINARY)
        return False

    def _together(self, send: Buffers, recv: Buffers, use: int) -> Iterator[Arrival]:
        # Behind the first step, where some have shared arrays: what all see, and so all do the same.
        sharing = self.sharing
        if sharing.all_left(use, self._givers):
            unopened = sharing.unopened(self._givers)
            if unopened:
                sharing.say_who_opens(unopened)
                yield self.arrive()
            if not unopened or sharing.all_open(unopened):
                self.straight(send, recv, use)
                yield self.arrive()
                return
        yield from self.otherwise.steps(send, recv)


class SharedReduce(SharedPlan):
    """A reduction: each rank reduces its segment, reading it in all arrays, into all arrays that want it.

    It goes piece by piece, in rank order, as all reductions do: the result does not depend on where the arrays lie.
    """

    def __init__(self, host: Host, call: Call, cut: Cut, otherwise: LockstepPlan) -> None:
        super().__init__(host, call, cut.give, range(call.size), otherwise)
        assert call.op is not None
        self._cut = cut
        self._op = call.op
        self._root = call.root
        self._run = quiet_runner()
        self._scratch = host.scratch

    def shares(self, send: Buffers, recv: Buffers) -> bool:
        # The finished segment goes where the peers know this rank's own to be.
        return self._cut.keeps or recv is None or send is recv

    def straight(self, send: Buffers, recv: Buffers, use: int) -> None:
        own = self.give(send)[self.rank]
        assert own is not None
        if own.size:
            sources = [
                own if peer == self.rank else self.sharing.view(use, peer, own.dtype, own.size)
                for peer in range(self.size)
            ]
            self._reduce(sources, self._targets(sources, recv))

    def _targets(self, sources: list[Array], recv: Buffers) -> list[Array]:
        if self._cut.keeps:
            kept = self._cut.take(recv)[self.rank]
            assert kept is not None
            return [kept]
        if self._root is not None:
            return [sources[self._root]]
        return [*sources[self.rank :], *sources[: self.rank]]

    def _reduce(self, sources: list[Array], targets: list[Array]) -> None:
        run, combine = self._run, self._op.ufunc
        scratch, _ = self._scratch(sources[0].dtype)
        for begin in range(0, sources[0].size, scratch.size):
            piece = slice(begin, begin + scratch.size)
            *parts, last = [source[piece] for source in sources]
            total = targets[0][piece]
            so_far = parts[0]
            for part in parts[1:]:
                so_far = run(combine, so_far, part, out=scratch[: part.size])
            run(combine, so_far, last, out=total)
            run(self._op.finish, total, self.size)
            for target in targets[1:]:
                target[piece] = total


class SharedMove(SharedPlan):
    """A movement: each rank copies what is for it straight out of the givers' arrays."""

    def __init__(self, host: Host, call: Call, route: Route, otherwise: BulkMove) -> None:
        givers = range(call.size) if route.giver is None else (route.giver,)
        super().__init__(host, call, route.give, givers, otherwise)
        self._route = route
        self._bulk = otherwise

    @property
    def longest(self) -> int:
        """Bytes of the longest block of any rank, which only the ranks together may know."""
        return self._bulk.longest

    @longest.setter
    def longest(self, num_bytes: int) -> None:
        self._bulk.longest = num_bytes

    def straight(self, send: Buffers, recv: Buffers, use: int) -> None:
        take = self._route.take(recv)
        own, kept = self.give(send)[self.rank], take[self.rank]
        if own is not None and kept is not None:
            kept[...] = own
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            block = take[peer]
            if block is not None and block.size:
                block[...] = self.sharing.view(use, peer, block.dtype, block.size)
