"""CheckedCall: a call on arrays of any layout, checked, and how a plan carries it out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from meshdist.arrays.reduce_op import Op, PremulSum, as_reduce_op
from meshdist.backends.base import Backend, Plan
from meshdist.runtime.call import Buffers, Call, CollectiveSpec, PassedArrays, ShapeRule, Splits, must_be_copied
from meshdist.runtime.flight_recorder import facts_of
from meshdist.runtime.hooks import HookedGroup
from meshdist.runtime.plan_cache import plan_key, remember, simple_key
from meshdist.runtime.waiting import Waitable


class CheckedCall:
    """A call of a group on arrays on the CPU, as a backend is to carry it out.

    Args:
        group: The group.
        backend: Its backend for these arrays.
        collective: What is called.
        send, recv: What the user passed; for a collective in place, the same.
        op, root, splits: The other arguments.
        shape_rule: What is compared of the arrays' shapes.

    Attributes:
        plan: That of earlier calls of the signature; None for the first.
        facts: What the flight recorder keeps.

    Raises:
        TypeError, ValueError: An argument is wrong; nothing was sent.
    """

    def __init__(
        self,
        group: HookedGroup,
        backend: Backend,
        collective: CollectiveSpec,
        send: Any,
        recv: Any,
        op: Op | None,
        root: int | None,
        splits: Splits | None,
        shape_rule: ShapeRule,
    ) -> None:
        self._group, self._backend, self._passed = group, backend, (send, recv)
        prefix = group.error_prefix(collective.name)
        self._arrays = group.named(prefix, PassedArrays, collective, send, recv)
        reduce_op = None if op is None else group.named(prefix, as_reduce_op, op)
        sends, recvs = self._arrays.in_native_order()
        rest = (reduce_op, root, splits, shape_rule, group.calls.words)
        call = self._call = Call(collective, prefix, group.rank(), group.size(), sends, recvs, *rest)
        self._writes = collective.writes(call)
        if self._writes:
            group.named(prefix, self._arrays.check_output)
        # The plan of a PREMUL_SUM is that of the plain sum; the factor is applied before it runs.
        self._factor = op if isinstance(op, PremulSum) else None
        if self._factor is not None:
            group.named(prefix, self._arrays.check_factor, self._factor)
        self._key = plan_key(collective, sends, recvs, op if self._factor is None else reduce_op, root, splits)
        self._plans = group.plans  # the group may have another dict when an async call starts
        self.plan: Plan | None = self._plans.get(self._key)
        if self.plan is None:
            collective.check(call)
            backend.require(call)
            self.facts = facts_of(call, group.name, group.label, group.timeout_s)
        else:
            self.facts = self.plan.facts
        if self._writes:
            group.named(prefix, self._arrays.check_apart)

    def run(self, plan: Plan) -> None:
        """Carry out the call by a plan of earlier ones, and let the core repeat it."""
        plain = partial(self._plain, plan)
        if self._factor is not None or not self._arrays.are_native() or self._is_copied(plan):
            with plain() as (sent, received):
                plan.run(sent, received)
            return
        plan.run_strided(self._call.send, self._call.recv, plain)
        if self._group.calls.note is not None:
            again = partial(_run_again, plan, self._call.collective, self._writes)
            self._group.calls.note(again, plan.facts, plan.error_prefix, *self._passed, plan.apart)

    def tell_core(self) -> None:
        """Let the core repeat the call, the first of its signature, if it makes others like it from this one."""
        note, plan, (send, recv) = self._group.calls.note, self._plans.get(self._key), self._passed
        template = None if note is None or plan is None or self._factor is not None else plan.template
        if note is None or plan is None or template is None or not self._arrays.are_native():
            return
        call = self._call
        key = simple_key(call.collective, send, recv, call.op, call.root, call.splits)
        if key is not None and not plan.known_apart.may_overlap(send, recv):
            note(template, plan.facts, plan.error_prefix, send, recv, plan.apart, None, plan.go_on)

    def steps(self) -> Iterator[Waitable]:
        """Carry out the call, the first of its signature or an async one, yielding all that has to be waited for."""
        self._group.check_usable(self._call.error_prefix)
        yield from self._backend.connect()
        plan = self._plans.get(self._key)
        if plan is None:
            plan = self._backend.prepare(self._call.on_plain_arrays())
            plan.facts = self.facts
            if not self._call.collective.meets:  # the calls of a remembered plan begin at once
                remember(self._plans, self._key, plan)
        with self._plain(plan) as (sent, received):
            yield from plan.steps(sent, received)

    def _plain(self, plan: Plan) -> AbstractContextManager[tuple[Buffers, Buffers]]:
        return self._arrays.plain(self._factor, copies=self._is_copied(plan), writes=self._writes)

    def _is_copied(self, plan: Plan) -> bool:
        return self._writes and plan.apart and must_be_copied(self._call)


def _run_again(plan: Plan, collective: CollectiveSpec, writes: bool, send: Any, recv: Any) -> None:
    """Repeat a call with arrays of the same strides, which were checked then."""

    def plain() -> AbstractContextManager[tuple[Buffers, Buffers]]:
        return PassedArrays(collective, send, recv).plain(None, copies=False, writes=writes)

    plan.run_strided(send, recv, plain)
