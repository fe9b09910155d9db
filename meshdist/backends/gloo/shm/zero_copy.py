"""Collectives on shared arrays: every rank reads, and in reductions writes, the arrays of the others in place.

Only the ranks together know whether all arrays are shared: each sets a flag before the first step. Ranks without shared
arrays meanwhile do the first step of the ordinary plan; if no rank has any, that plan just continues. If only some
have, the ordinary plan starts again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from meshdist import core
from meshdist.arrays.host import Array
from meshdist.arrays.reduce_op import quiet_runner
from meshdist.backends.gloo.shm.barrier_plans import BarrierPlan, NextCalls
from meshdist.backends.gloo.shm.descriptors import ORDINARY
from meshdist.backends.gloo.shm.flag_barrier import BarrierWait
from meshdist.backends.gloo.shm.shm_group import ShmGroup
from meshdist.collectives.algorithms.blocks import reduce_in_rank_order
from meshdist.collectives.dataflow import Blocks, ReductionSpec, TransferSpec
from meshdist.runtime.call import Buffers, Call, Signature


class SharedPlan(BarrierPlan):
    """A plan for shared arrays: `give` returns, from what is sent, the block that each rank reads.

    The `fallback` runs if not all blocks are in shared arrays. It flips to the other slot once before its first step,
    and until then changes nothing of what is sent or received.
    """

    def __init__(
        self, shm: ShmGroup, call: Call, give: Callable[[Buffers], Blocks], givers: Sequence[int], fallback: BarrierPlan
    ) -> None:
        super().__init__(shm.barrier, shm.backend, call)
        self._shm, self.descriptors = shm, shm.descriptors
        self.rank, self.size = call.rank, call.size
        self.give = give
        self.fallback = fallback
        self._givers = givers
        self._gives = call.rank in givers

    def adopt_signature(self, signature: Signature) -> None:
        super().adopt_signature(signature)
        # Ranks with and without shared arrays take part in the same first step.
        self.fallback.adopt_signature(signature)

    @abstractmethod
    def run_in_place(self, send: Buffers, recv: Buffers, phase: int) -> None:
        """Carry out this rank's part in place; all ranks have arrived."""

    def shares(self, send: Buffers, recv: Buffers) -> bool:
        """Return whether `run_in_place` can be used for these arrays."""
        return True

    def run(self, send: Buffers, recv: Buffers) -> None:
        barrier, descriptors = self.barrier, self.descriptors
        phase = barrier.phase ^ 1  # of the first step
        if descriptors.heap.in_use or descriptors.flags[phase]:
            super().run(send, recv)
            return
        # Like `steps`, without the cost of the flags, for programs that have no shared arrays.
        rest = self.fallback.first_step(send, recv)
        if descriptors.any_shared(phase):
            rest = partial(self._take_steps, self.after_first_step(send, recv, phase))
        rest()

    def next_calls(self) -> NextCalls | None:
        found = self.fallback.next_calls()
        return found and found._replace(shared=self.descriptors.told_by(self.barrier))

    def go_on(self, send: Buffers, recv: Buffers) -> None:
        """Go on after the first step of a call: arrays of a rank are shared."""
        self._take_steps(self.after_first_step(send, recv, self.barrier.phase))

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[BarrierWait]:
        phase = self.barrier.phase ^ 1
        if self.set_flag(send, recv, phase):
            self.barrier.flip()
            yield self.arrive()
            yield from self.after_first_step(send, recv, phase)
            return
        steps = self.fallback.steps(send, recv)
        yield next(steps)
        yield from self.after_first_step(send, recv, phase) if self.descriptors.any_shared(phase) else steps

    def set_flag(self, send: Buffers, recv: Buffers, phase: int) -> bool:
        """Tell, before a step, whether this rank's blocks are in shared arrays; return that."""
        if self._gives and self.descriptors.possible and self.shares(send, recv):
            return self.descriptors.publish_places(phase, send, self.give)
        self.descriptors.set_flag(phase, ORDINARY)
        return False

    def after_first_step(self, send: Buffers, recv: Buffers, phase: int) -> Iterator[BarrierWait]:
        """Go on after the first step, if some ranks have shared arrays: all see the same flags, and decide alike."""
        descriptors = self.descriptors
        if descriptors.all_shared(phase, self._givers):
            unopened = descriptors.unopened(self._givers)
            if unopened:
                descriptors.publish_opened(unopened)
                yield self.arrive()
            if not unopened or descriptors.all_open(unopened):
                self._shm.end_exposure()  # as the first step may have begun one
                self.run_in_place(send, recv, phase)
                yield self.arrive()
                return
        yield from self.fallback.steps(send, recv)


class SharedReduce(SharedPlan):
    """A reduction: each rank reduces its segment of all arrays, in rank order, into all arrays that want it."""

    def __init__(self, shm: ShmGroup, call: Call, spec: ReductionSpec, fallback: BarrierPlan) -> None:
        super().__init__(shm, call, spec.give, range(call.size), fallback)
        assert call.op is not None
        self._spec = spec
        self._op = call.op
        self._root = call.root
        self._run = quiet_runner()
        self._scratch = shm.scratch

    def shares(self, send: Buffers, recv: Buffers) -> bool:
        # Peers write the finished segment to the place of this rank's own.
        return self._spec.keeps or recv is None or send is recv

    def run_in_place(self, send: Buffers, recv: Buffers, phase: int) -> None:
        own = self.give(send)[self.rank]
        assert own is not None
        if own.size:
            sources = [
                own if peer == self.rank else self.descriptors.view(phase, peer, own.dtype, own.size)
                for peer in range(self.size)
            ]
            self._reduce(sources, self._targets(sources, recv))

    def _targets(self, sources: list[Array], recv: Buffers) -> list[Array]:
        if self._spec.keeps:
            kept = self._spec.take(recv)[self.rank]
            assert kept is not None
            return [kept]
        if self._root is not None:
            return [sources[self._root]]
        return [*sources[self.rank :], *sources[: self.rank]]

    def _reduce(self, sources: list[Array], targets: list[Array]) -> None:
        scratch, _ = self._scratch(sources[0].dtype)
        for begin in range(0, sources[0].size, scratch.size):
            piece = slice(begin, begin + scratch.size)
            total, parts = targets[0][piece], [source[piece] for source in sources]
            reduce_in_rank_order(self._run, self._op, parts, self.size, total, scratch=scratch[: total.size])
            for target in targets[1:]:
                target[piece] = total


class SharedMove(SharedPlan):
    """Data movement: each rank copies its blocks straight out of the senders' arrays."""

    def __init__(self, shm: ShmGroup, call: Call, spec: TransferSpec, fallback: BarrierPlan) -> None:
        givers = range(call.size) if spec.giver is None else (spec.giver,)
        super().__init__(shm, call, spec.give, givers, fallback)
        self._spec = spec
        self._copy: Callable[[Array, Array], object] = (
            core.module.copy_around_caches if core.module is not None and shm.streams(call) else np.copyto
        )

    def run_in_place(self, send: Buffers, recv: Buffers, phase: int) -> None:
        take = self._spec.take(recv)
        own, kept = self.give(send)[self.rank], take[self.rank]
        if own is not None and kept is not None:
            self._copy(kept, own)
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            block = take[peer]
            if block is not None and block.size:
                self._copy(block, self.descriptors.view(phase, peer, block.dtype, block.size))
