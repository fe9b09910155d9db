"""MpiBackend: the engine of a group over MPI."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.base import Backend, BackendOptions, DefaultPlan, Express, Incoming, Plan, withdrawn_key
from meshdist.backends.counting_in import check_there
from meshdist.backends.mpi import plans
from meshdist.backends.mpi.arithmetic import Arithmetic
from meshdist.backends.mpi.environment import is_launched, not_launched
from meshdist.backends.mpi.library import Session, session
from meshdist.backends.mpi.mail import Mail
from meshdist.backends.mpi.meeting import Coming, Meeting, word_of
from meshdist.backends.mpi.membership import new_communicator
from meshdist.backends.mpi.offices import office_of
from meshdist.call import Call, Signature, num_bytes
from meshdist.deadline import Deadline
from meshdist.device_calls import DeviceCalls
from meshdist.errors import DistBackendError, DistError
from meshdist.farewell import gave_up
from meshdist.waiting import Waitable, look_a_while


class MpiBackend(Backend):
    """The ranks of an MPI job.

    The group's communicator is made at its first collective, which all its ranks make; messages need only the two
    ranks.
    """

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        # Numbers in MPI.COMM_WORLD. Worlds that shrink number their ranks anew.
        self.addresses = [options.peers.joined_as(rank) for rank in options.ranks]
        self.comm: Any = None
        self._meeting: Meeting | None = None
        self._mail: Mail | None = None
        self._mail_lock = threading.Lock()
        self._is_broken = False

    @cached_property
    def session(self) -> Session:
        """The MPI library of this process."""
        return session()

    @cached_property
    def arithmetic(self) -> Arithmetic:
        """The datatypes and operations of reductions."""
        return office_of(self.session).arithmetic

    @property
    def meeting(self) -> Meeting:
        """Where the ranks meet before a collective."""
        assert self._meeting is not None, "connect comes before prepare"
        return self._meeting

    @classmethod
    def has_own(cls, native: str) -> bool:
        return native in _PLANS

    def connect(self) -> Iterator[Waitable]:
        if self._meeting is None and self.size > 1:
            self.mail()
            self.comm = yield from new_communicator(self)
            self._meeting = Meeting(self, self.session, self.comm)

    def prepare(self, call: Call) -> Plan:
        if call.collective.staging is not None:
            return super().prepare(call)
        make = _PLANS.get(call.collective.native)
        # Alone there is nobody to talk to.
        if make is None or self.size == 1 or self._is_too_large(call):
            return DefaultPlan(self, call)
        if call.collective.native == "all_gather" and isinstance(call.recv, list):
            return plans.AllGatherList(self, call)
        if call.collective.native == "all_to_all_single" and call.splits is not None:
            return plans.AllToAllVarying(self, call)
        plan: Plan = make(self, call)
        return plan

    def staged_calls(self) -> DeviceCalls:
        from meshdist.backends.mpi.passing import PassingCalls, is_cuda_aware

        return PassingCalls(self) if is_cuda_aware(self.session) else super().staged_calls()

    def check_in(self, signature: Signature) -> Iterator[Waitable]:
        if self.size > 1:
            yield from self.meeting.steps(word_of(signature, may_block=False), signature)

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        return (self._mail or self.mail()).send(array, dst, tag)

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        return (self._mail or self.mail()).recv(array, src, tag)

    def express_to(self, dst: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Express | None:
        return None if self._mail is None else self._mail.express_to(dst, tag, dtype, shape)

    def express_from(self, src: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Express | None:
        return None if self._mail is None else self._mail.express_from(src, tag, dtype, shape)

    def wait(self, waitable: Waitable, where: str, deadline: Deadline | None = None) -> None:
        own_deadline = deadline or Deadline(self.options.timeout_s)
        if look_a_while(waitable):
            return
        if isinstance(waitable, Coming) and deadline is not None:
            waitable.limit(deadline.timeout_s)
        super().wait(waitable, where, own_deadline)

    def look(self) -> None:
        """Raise DistBackendError if another rank has failed, or what the group rests on is broken."""
        mail = self._mail
        if mail is not None:
            mail.office.poll()
            if mail.failure is not None:
                raise DistBackendError(mail.failure, peer_failed=True)
        self.options.check_premises()

    def check_there(self, rank: int) -> None:
        """Raise DistBackendError if a rank has gone away."""
        check_there(self.options, rank, "making this call")

    def abort(self, reason: str) -> None:
        self._is_broken = True
        if self.size == 1:
            return
        # Those that have not used the group yet find it in the store.
        self._withdraw(gave_up(reason))
        if self._mail is not None:
            self._mail.fail(reason)

    def close(self) -> None:
        if self.size > 1:
            self._withdraw(self.options.peers.farewell)
        if self._mail is not None:
            self._mail.close()
            self._mail = None
        meeting, self._meeting = self._meeting, None
        # What is left of a call that failed may still come to the communicator: it stays.
        if meeting is not None and not self._is_broken and not self.session.mpi.Is_finalized():
            with self.session.lock:
                meeting.close()
                self.comm.Free()

    def mail(self) -> Mail:
        """Return the messages of this group.

        Raises:
            DistBackendError: The ranks of this world are not those of MPI.
        """
        with self._mail_lock:
            if self._mail is None:
                self._check_numbers()
                places = {address: place for place, address in enumerate(self.addresses)}
                self._mail = Mail(self, office_of(self.session).office, self._token(), places)
            return self._mail

    def _withdraw(self, how: str) -> None:
        # The first word stands. Where there is no store any more, nobody waits either.
        with contextlib.suppress(DistError):
            self.options.store.compare_set(withdrawn_key(self.rank), "", how)

    def _token(self) -> int:
        # What the group is known by among all that ever were in this job.
        return int(self.options.store.compare_set("token", "", str(secrets.randbits(63))))

    def _check_numbers(self) -> None:
        if not is_launched():
            raise DistBackendError(f"backend 'mpi': {not_launched()}")
        expected, size = self.addresses[self.rank], self.session.size
        if self.session.rank != expected or max(self.addresses) >= size:
            raise DistBackendError(
                f"backend 'mpi': this is rank {expected} of the world, but rank {self.session.rank} of {size} in"
                " MPI.COMM_WORLD; start the ranks by mpirun, and give them the numbers that they have there"
            )

    def _is_too_large(self, call: Call) -> bool:
        # Where MPI counts in 32 bits, our own algorithms take over, which send piece by piece. All ranks must find the
        # same: not all of them have the arrays of all.
        most, name = self.session.largest_count, call.collective.native
        if most is None or name == "all_to_all":
            return False
        if name in ("gather", "scatter"):
            block = call.send if name == "gather" else call.recv
            return self.size * num_bytes(block) > most
        return call.splits is None and max(num_bytes(call.send), num_bytes(call.recv)) > most


_PLANS: dict[str, Any] = {
    "all_gather": plans.AllGather,
    "all_gather_into_tensor": plans.AllGather,
    "all_reduce": plans.AllReduce,
    "all_to_all": plans.AllToAllVarying,
    "all_to_all_single": plans.AllToAll,
    "barrier": plans.Barrier,
    "broadcast": plans.Broadcast,
    "gather": plans.Gather,
    "reduce": plans.Reduce,
    "reduce_scatter": plans.ReduceScatter,
    "reduce_scatter_tensor": plans.ReduceScatter,
    "scatter": plans.Scatter,
}
