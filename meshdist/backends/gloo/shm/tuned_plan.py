"""Plans that measure themselves: where there are several ways to carry out a call, the fastest one here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic_ns
from typing import TypeAlias, TypeVar

from meshdist.backends.base import Plain
from meshdist.backends.gloo.shm.barrier_plans import BarrierPlan, NextCalls
from meshdist.backends.gloo.shm.cache_distance import BYTES_OF_A_CALL
from meshdist.backends.gloo.shm.flag_barrier import BarrierWait
from meshdist.backends.gloo.shm.shm_group import ShmGroup
from meshdist.backends.gloo.shm.tuning import Trials
from meshdist.runtime.call import Buffers, Call, Signature, each
from meshdist.system.platform import num_preemptions, num_runnable

Spec = TypeVar("Spec")
# What makes the plan of each way, by name; the first is the default.
Ways: TypeAlias = "Mapping[str, Callable[[ShmGroup, Call, Spec], BarrierPlan]]"

# The time, and how often this rank had lost its core.
Moment: TypeAlias = "tuple[int, int]"

ONE_STEP = "one step"  # the names of ways are explained in docs/performance.md


def chunks_of(num_bytes: int) -> str:
    """Return the chunks of a way in words."""
    mebibytes, rest = divmod(num_bytes, 1 << 20)
    return f"chunks of {num_bytes >> 10} KiB" if rest or not mebibytes else f"chunks of {mebibytes} MiB"


def kind_of(call: Call) -> str:
    """Return the kind of a call, but for its size: calls of one kind share their trials."""
    dtype = (each(call.recv) or each(call.send))[0].dtype
    words = (call.collective.native, "" if call.op is None else call.op.value, dtype.name)
    return " ".join(filter(None, words))


def fastest(
    shm: ShmGroup, call: Call, spec: Spec, num_bytes: int, ways: Ways[Spec], *, least_bytes: int = 0
) -> BarrierPlan:
    """Return a plan that tries the ways in its first calls, and now and then, and else goes the fastest.

    `ways` has what makes the plan of each way, by name, the same on all ranks; the first is the default, and the only
    one for fewer than `least_bytes`. `num_bytes` is equal on all ranks.
    """
    names = list(ways) if num_bytes >= least_bytes else list(ways)[:1]
    trials = shm.tuning.trials(kind_of(call), num_bytes, names)
    if trials.is_final:
        return ways[trials.next](shm, call, spec)
    first = {trials.next: ways[trials.next](shm, call, spec)}
    return TunedPlan(shm, call, first, lambda way, call: ways[way](shm, call, spec)).over(num_bytes, names)


class TunedPlan(BarrierPlan):
    """Runs one of several plans of one call, one for each way: that which is the fastest, or is to be tried.

    Args:
        plans: By the name of the way, those that are there already.
        make: Makes that of another way; None if all are there.
    """

    def __init__(
        self,
        shm: ShmGroup,
        call: Call,
        plans: dict[str, BarrierPlan],
        make: Callable[[str, Call], BarrierPlan] | None = None,
    ) -> None:
        super().__init__(shm.barrier, shm.backend, call)
        self._shm, self._rank, self._plans = shm, call.rank, plans
        self._kind, self._trials = kind_of(call), Trials.of_one_way(next(iter(plans), ""))
        self._num_bytes = 0
        self._names: tuple[str, ...] = ()  # none before `over`
        self._make, self._call = make, call.without_buffers()

    def over(self, num_bytes: int, names: Sequence[str]) -> TunedPlan:
        """The calls from now on are of this size, and the default is the first of `names`; return this plan."""
        self._num_bytes, self._names = num_bytes, tuple(names)
        self._trials = self._shm.tuning.trials(self._kind, num_bytes, names)
        return self

    @property
    def way(self) -> str:
        """The way of the next call."""
        return self._trials_now().next

    def _trials_now(self) -> Trials:
        """Return the trials of the next call; there are others once the ranks are on other processors."""
        if self._names and self._trials.is_far != self._shm.tuning.is_far:
            self.over(self._num_bytes, self._names)
        return self._trials

    def adopt_signature(self, signature: Signature) -> None:
        super().adopt_signature(signature)
        for plan in self._plans.values():
            plan.adopt_signature(signature)

    def run(self, send: Buffers, recv: Buffers) -> None:
        began, plan = self.begins(), self._next(send, recv)
        plan.run(send, recv)
        self.conclude(began)

    def run_strided(self, send: Buffers, recv: Buffers, plain: Plain) -> None:
        began, plan = self.begins(), self._next(send, recv)
        plan.run_strided(send, recv, plain)
        self.conclude(began)

    def first_step(self, send: Buffers, recv: Buffers) -> Callable[[], object]:
        began, plan = self.begins(), self._next(send, recv)
        return partial(self._finish, plan.first_step(send, recv), began)

    def _finish(self, rest: Callable[[], object], began: Moment | None) -> None:
        rest()
        self.conclude(began)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[BarrierWait]:
        began, plan = self.begins(), self._next(send, recv)
        yield from plan.steps(send, recv)
        if self.ended(began):
            yield from self.compare()

    def _next(self, send: Buffers, recv: Buffers) -> BarrierPlan:
        return self.plan_of(self.way, send, recv)

    def plan_of(self, way: str, send: Buffers, recv: Buffers) -> BarrierPlan:
        """Return the plan that goes this way, of calls of such arrays."""
        plan = self._plans.get(way)
        if plan is None:
            assert self._make is not None
            plan = self._make(way, self._call._replace(send=send, recv=recv).on_plain_arrays())
            plan.adopt_signature(self.signature)
            self._plans[way] = plan
        return plan

    def next_calls(self) -> NextCalls | None:
        trials = self._trials_now()
        plan = None if trials.goes_on else self._plans.get(trials.next)
        found = None if plan is None else plan.next_calls()
        return found and self.while_chosen(found)

    def while_chosen(self, found: NextCalls) -> NextCalls:
        """Return what carries out the calls of the chosen way, for as long as that is chosen."""
        distance = self._shm.distance
        looks = None if distance is None else distance.looks
        return found._replace(calls=self._trials.calls, looks=looks, cost=self._num_bytes + BYTES_OF_A_CALL)

    @property
    def goes_on(self) -> bool:
        """Whether the next call tries a way."""
        return self._trials_now().goes_on

    def begins(self) -> Moment | None:
        """Return when a call begins; None if no ways are being tried."""
        return self._now() if self.goes_on else None

    def conclude(self, began: Moment | None) -> None:
        """Take in a call that was carried out in this way, and compare if the ranks are to."""
        if self.ended(began):
            self._take_steps(self.compare())

    def ended(self, began: Moment | None) -> bool:
        """Take in a call that was carried out in this way; return whether the ranks are to `compare` now."""
        if not self._trials.goes_on:
            self._trials.passed()
            return self._shm.distance is not None and self._shm.distance.is_due(self._num_bytes)
        now = self._now()
        return self._trials.ended(began or now, now)

    def compare(self) -> Iterator[BarrierWait]:
        """Tell the others when this rank began and ended the calls of a run, and take in what all tell.

        They also tell how far apart they are; after a call that was no trial, only that.
        """
        distance, trials, run = self._shm.distance, self._trials, self._trials.take_run()
        remembered = self._shm.tuning.remembered(trials) if run.num_calls and trials.is_first else None
        phase, region = self.barrier.flip(), self._shm.region
        sees_far = distance is not None and distance.write()
        told = [
            -1 if remembered is None else remembered,
            sees_far,
            run.num_preemptions + self._num_others() if run.num_calls else 0,
            *run.times,
        ]
        region.table(phase, self._rank).reshape(-1)[: len(told)] = told
        yield self.arrive()
        rows = [region.table(phase, peer).reshape(-1)[: len(told)].tolist() for peer in range(self.backend.size)]
        known, far, preempted, *times = zip(*rows, strict=True)
        if run.num_calls:
            took = [max(ends) - max(begins) for begins, ends in zip(times[::2], times[1::2], strict=True)]
            trials.add(sum(took) // run.num_calls, known[0] if known[0] >= 0 else None, was_disturbed=any(preempted))
        if distance is not None:
            self._shm.tuning.moved(is_far=distance.read(far))

    def _now(self) -> Moment:
        """Return the time, and how often other processes have taken this rank's core; ranks that share cores do so."""
        return monotonic_ns(), num_preemptions() if self._shm.tuning.has_cores else 0

    def _num_others(self) -> int:
        """Return how many threads besides the ranks compete for the cores that these share."""
        return 0 if self._shm.tuning.has_cores else max(0, num_runnable() - self.backend.size)
