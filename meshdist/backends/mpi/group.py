"""MpiGroup: the communicator, the prechecks and the messages of one group over MPI."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from meshdist.arrays.host import Array
from meshdist.backends.backend_options import BackendOptions, withdrawn_key
from meshdist.backends.base import Backend, FastPath
from meshdist.backends.group_setup import check_there
from meshdist.backends.mpi.arithmetic import Arithmetic
from meshdist.backends.mpi.communicator import new_communicator
from meshdist.backends.mpi.dispatcher import Packets, resources_of
from meshdist.backends.mpi.environment import is_launched, not_launched
from meshdist.backends.mpi.library import Session, session
from meshdist.backends.mpi.p2p import P2P
from meshdist.backends.mpi.precheck import Coming, Precheck, word_of
from meshdist.backends.p2p.own_messages import OwnMessages
from meshdist.errors import DistBackendError, DistError
from meshdist.runtime.call import Signature
from meshdist.runtime.departure import Departure, LeftOut, gave_up
from meshdist.runtime.message_counts import name_of_group
from meshdist.runtime.waiting import Incoming, Probe, Waitable, spin
from meshdist.system.deadline import Deadline


class MpiGroup(Backend):
    """A group whose ranks are processes of one MPI job.

    The first collective creates the communicator; point-to-point messages do not need it.
    """

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        # Ranks in MPI.COMM_WORLD. A world that shrinks renumbers its ranks.
        self.addresses = [options.peers.joined_as(rank) for rank in options.ranks]
        self.comm: Any = None
        self._precheck: Precheck | None = None
        self._p2p: P2P | None = None
        self._p2p_lock = threading.Lock()
        self._is_broken = False

    @cached_property
    def session(self) -> Session:
        return session()

    @cached_property
    def arithmetic(self) -> Arithmetic:
        return resources_of(self.session).arithmetic

    @property
    def precheck(self) -> Precheck:
        """Compares the calls of the ranks before each collective."""
        assert self._precheck is not None, "connect comes before prepare"
        return self._precheck

    def connect(self) -> Iterator[Waitable]:
        if self._precheck is None and self.size > 1:
            self.p2p()
            self.comm = yield from new_communicator(self)
            self._precheck = Precheck(self, self.session, self.comm)
            self.options.peers.carriers[name_of_group(self.options.name)] = self._precheck

    def check_in(self, signature: Signature) -> Iterator[Waitable]:
        if self.size > 1:
            yield from self.precheck.steps(word_of(signature, may_block=False), signature)

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        return (self._p2p or self.p2p()).send(array, dst, tag)

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        return (self._p2p or self.p2p()).recv(array, src, tag)

    def probe(self, src: int | None, tag: int | None) -> Probe:
        return (self._p2p or self.p2p()).probe(src, tag)

    def own_messages(self) -> OwnMessages:
        return (self._p2p or self.p2p()).own

    def left_over(self) -> list[tuple[int, int]]:
        if self._p2p is None:
            return []
        self._p2p.dispatcher.poll()
        return self._p2p.queue.left_over()

    def fast_send(self, dst: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> FastPath | None:
        return None if self._p2p is None else self._p2p.fast_send(dst, tag, dtype, shape)

    def fast_recv(self, src: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> FastPath | None:
        return None if self._p2p is None else self._p2p.fast_recv(src, tag, dtype, shape)

    def wait(self, waitable: Waitable, error_prefix: str, deadline: Deadline | None = None) -> None:
        own_deadline = deadline or Deadline(self.options.timeout_s)
        if spin(waitable):
            return
        if isinstance(waitable, Coming) and deadline is not None:
            waitable.limit(deadline.timeout_s)
        super().wait(waitable, error_prefix, own_deadline)

    def look(self) -> None:
        """Raise DistBackendError if another rank has failed, or a precondition of the group is broken."""
        p2p = self._p2p
        if p2p is not None:
            p2p.dispatcher.poll()
            p2p.check_failure()
        self.options.check_preconditions()

    def check_there(self, rank: int) -> None:
        check_there(self.options, rank, LeftOut.CALL)

    def give_up(self, error: DistError) -> None:
        departure = gave_up(error)
        self._is_broken = True
        if self.size == 1:
            return
        # Ranks that have not used the group yet find this in the store.
        self._withdraw(departure)
        if self._p2p is not None:
            self._p2p.fail(departure)

    def close(self) -> None:
        if self.size > 1:
            self._withdraw(self.options.peers.departure)
        if self._p2p is not None:
            self._p2p.close()
            self._p2p = None
        precheck, self._precheck = self._precheck, None
        self.options.peers.carriers.pop(name_of_group(self.options.name), None)
        # After a failed call, its messages may still arrive on the communicator: do not free it.
        if precheck is not None and not self._is_broken and not self.session.mpi.Is_finalized():
            with self.session.lock:
                precheck.close()
                self.comm.Free()

    def p2p(self) -> P2P:
        """Return the point-to-point messages of this group.

        Raises:
            DistBackendError: The ranks of this world are not those of MPI.
        """
        with self._p2p_lock:
            if self._p2p is None:
                self._check_numbers()
                places = {address: place for place, address in enumerate(self.addresses)}
                dispatcher, peers = resources_of(self.session).dispatcher, self.options.peers
                peers.carriers.setdefault("mpi", Packets(dispatcher, peers))
                self._p2p = P2P(self, dispatcher, self._token(), places)
            return self._p2p

    def _withdraw(self, departure: Departure) -> None:
        # The first departure counts. If the store is gone, no rank waits for this one.
        with contextlib.suppress(DistError):
            self.options.store.compare_set(withdrawn_key(self.rank), "", departure.encode())

    def _token(self) -> int:
        # Identifies the group among all groups of the job.
        return int(self.options.store.compare_set("token", "", str(secrets.randbits(63))))

    def _check_numbers(self) -> None:
        if not is_launched():
            raise DistBackendError(f"backend 'mpi': {not_launched()}")
        expected, size = self.addresses[self.rank], self.session.size
        if self.session.rank != expected or max(self.addresses) >= size:
            raise DistBackendError(
                f"backend 'mpi': this is rank {expected} of the world, but rank {self.session.rank} of {size} in"
                " MPI.COMM_WORLD; start the ranks with mpirun and pass the ranks of MPI.COMM_WORLD, or none"
            )
