"""The `nccl` backend: the group's state, set-up, failure and end; `calls` carries out the calls."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from copy import copy
from typing import Any

from meshdist.arrays.device import cupy_module
from meshdist.arrays.device_types import cuda_number
from meshdist.backends.backend_options import BackendOptions
from meshdist.backends.base import Backend, Plan
from meshdist.backends.group_setup import withdraw
from meshdist.backends.nccl.calls import CARRIED, NcclCalls
from meshdist.backends.nccl.comm_setup import CommSetup, compare_calls
from meshdist.backends.nccl.comm_stream import CommStream, InFlightOp
from meshdist.backends.nccl.launch_gate import Admission, Arrivals, LaunchGate
from meshdist.backends.nccl.library import CupyLibrary, Library
from meshdist.backends.nccl.p2p import Pair
from meshdist.backends.nccl.watchdog import Aborting, Watchdog
from meshdist.errors import DistBackendError, DistError, DistTimeoutError
from meshdist.runtime.call import Call
from meshdist.runtime.departure import Departure, LeftOut, PeerExit, gave_up, peer_gone
from meshdist.runtime.waiting import wait_until
from meshdist.store.brief_requests import brief
from meshdist.system.deadline import Deadline

# Key of the group's store under which a rank reports that it gave up.
_BROKEN = "nccl/broken"
# Age of the oldest operation in flight from which on the peers are checked.
_PATIENCE_S = 1.0
# How long an operation may be in flight after a rank was seen to have left in order.
_LEFT_S = 3.0
_LAST_WORDS_S, _LAST_MESSAGES_S, _LAST_ARRAYS_S, _ABORT_S = 10.0, 5.0, 1.0, 10.0
_TOLD_S, _LONGEST_REST_S = 0.5, 5.0


class NcclBackend(Backend):
    """The backend of one group: a CommStream for its collectives, two more for each pair of ranks with messages.

    A CommStream is created at its first use, by all of its ranks together.
    """

    def __init__(self, options: BackendOptions, library: Library | None = None) -> None:
        super().__init__(options)
        self.library: Library = CupyLibrary() if library is None else library
        self.cuda = cupy_module().cuda
        self.device: int | None = self._named_device()
        self.gate = LaunchGate.of(options)
        self.error: DistError | None = None
        self._arrivals = Arrivals(options)
        self._left_s: dict[int, float] = {}  # when ranks were first seen to have left in order
        self._comm_stream: CommStream | None = None
        self._pairs: dict[int, Pair] = {}
        self._comm_streams: dict[str, CommStream] = {}  # all of them
        self._is_closing = False
        self._making, self._pairing, self._taking = threading.Lock(), threading.Lock(), threading.Lock()
        self._failing = threading.Lock()
        self._watchdog = Watchdog(
            f"meshdist-nccl-{options.rank}", self._look, self._notice, self._use_device, self._look_around
        )
        self._num_compared = 0
        self.device_calls = NcclCalls(self)

    @classmethod
    def has_own(cls, native: str) -> bool:
        return native in CARRIED

    def prepare(self, call: Call) -> Plan:
        raise AssertionError("calls of this backend go through its device_calls")

    def comm_stream(self, error_prefix: str, device: int | None) -> CommStream:
        """Return the CommStream of the group's collectives; the first time, wait for the other ranks.

        Raises:
            ValueError: The arrays are on a different GPU than those before.
            DistError: The communicator cannot be created.
        """
        self.check()
        comm_stream = self._comm_stream
        if comm_stream is not None and device in (None, self.device):
            return comm_stream
        with self._making:
            self._take_device(error_prefix, device)
            assert self.device is not None
            if self._comm_stream is None:
                with self.cuda.Device(self.device):
                    self._comm_stream = self.new_comm_stream("all", tuple(range(self.size)), error_prefix)
            return self._comm_stream

    def admit(self, number: int, error_prefix: str, timeout_s: float) -> None:
        """Wait until collective `number` may be launched, since messages wait for a connection.

        Raises:
            DistTimeoutError: The connection was not made in time.
            DistError: A rank is gone, or the backend has given up.
        """
        admission = Admission(self.gate, self.options, self._arrivals, number, self.check_open)
        wait_until(admission, self.options.bells.mine(), Deadline(timeout_s), error_prefix, self.options.observer)

    def pair(self, peer: int, error_prefix: str, device: int) -> Pair:
        """Return what carries the messages between this rank and another one."""
        self.check()
        with self._pairing:  # a separate lock: isend must not wait for the set-up of the collectives
            self._take_device(error_prefix, device)
            pair = self._pairs.get(peer)
            if pair is None:
                pair = self._pairs[peer] = Pair(self, peer, device)
            return pair

    def check(self) -> None:
        """Raise the error that the backend has given up with, if it has."""
        error = self.error
        if error is not None:
            # A copy: callers add their own prefix.
            raise copy(error)

    def fail(self, error: BaseException, departure: Departure | None = None) -> None:
        """Give up once: abort the communicators and complete everything in flight with `error`."""
        with self._failing:
            if self.error is not None:
                return
            failure = self.library.failure(error)
            told = failure if isinstance(failure, DistError) else DistBackendError(f"{type(error).__name__}: {error}")
            for comm_stream in list(self._comm_streams.values()):
                for in_flight in comm_stream.flights.copy():
                    in_flight.record_end(told)
            self.error = told
        withdraw(self.options, self.rank, departure or gave_up(told))
        with contextlib.suppress(DistError):
            self.options.store.set(_BROKEN, "")
        aborting = Aborting(list(self._comm_streams.values()), self.options.label)
        # Before the aborts end, since they may take long; and again for operations launched meanwhile.
        self._fail_flights()
        aborting.wait(_ABORT_S)
        self._fail_flights()

    def describe(self, rank: int) -> str:
        return self.options.call(rank)

    def compare(self, call: Call, error_prefix: str) -> None:
        """Compare the calls that all ranks are about to make.

        Raises:
            DistBackendError: The calls differ.
            DistTimeoutError: Some ranks did not arrive.
        """
        self.check()
        self._num_compared += 1
        number, timeout_s = self._num_compared, self.options.timeout_s
        compare_calls(self.options, number, call.signature(), error_prefix, timeout_s, self.check_open)

    def give_up(self, error: DistError) -> None:
        self.fail(DistBackendError(str(error)), gave_up(error))

    def begin_close(self) -> None:
        if self._is_closing:
            return
        comm_stream = self._comm_stream
        self._await(lambda: comm_stream is not None and bool(comm_stream.flights), self.options.timeout_s)
        self._drain_messages()
        self._is_closing = True
        self._watchdog.stop()
        if self.error is None and self._is_broken():
            self.fail(DistBackendError("another rank failed"))
        if self.error is None:
            if comm_stream is not None:
                with contextlib.suppress(DistError), brief(_TOLD_S):  # if the store is gone, nobody reads it
                    self._arrivals.tell(comm_stream.num_launched)
            withdraw(self.options, self.rank, Departure(PeerExit.DESTROYED_GROUP))

    def close(self) -> None:
        self.begin_close()
        if self.error is None:
            _in_time(self._finish, self._give_up)
        if self.error is not None:  # the thread that gave up may not have done this yet
            self._fail_flights()
        # Aborted operations may still run on the device, and need their arrays until they end.
        deadline = Deadline(_LAST_ARRAYS_S)
        while any(comm_stream.keeps_arrays() for comm_stream in self._comm_streams.values()) and not deadline.expired():
            time.sleep(1e-3)
        self._comm_stream = None
        self._pairs.clear()
        for closed in self._comm_streams.values():
            self.gate.forget(closed)
        self._comm_streams.clear()

    def new_comm_stream(self, place: str, members: tuple[int, ...], error_prefix: str) -> CommStream:
        """Create a CommStream of some ranks of the group, together with them, on this rank's GPU (the current device).

        Raises:
            DistError: A rank is missing, or NCCL creates no communicator.
        """
        device, library = self.device, self.library
        assert device is not None
        gpu = f"{self.cuda.runtime.deviceGetPCIBusId(device)} on {self.options.peers.mine.host_name}"
        host = self.options.peers.mine.host
        setup = CommSetup(self.options, members, f"nccl/{place}", error_prefix, self.check_open)
        unique_id = setup.unique_id(library, (gpu, host))
        rank = members.index(self.options.rank)

        def make() -> Any:
            with self.cuda.Device(device):
                return library.communicator(len(members), unique_id, rank)

        try:
            communicator = setup.made_in_time(make)
        except Exception as error:
            raise library.failure(error) from None
        priority = -1 if getattr(self.options.pg_options, "is_high_priority_stream", False) else None
        stream = self.cuda.Stream(non_blocking=True, priority=priority)
        wake = self._watchdog.wake
        comm_stream = self._comm_streams[place] = CommStream(
            library, self.cuda, communicator, device, stream, self.gate, self.check, wake
        )
        self._watchdog.watch(comm_stream)
        if self.error is not None:  # the backend gave up before this one was registered
            self._give_up()
            self.check()
        return comm_stream

    def _fail_flights(self) -> None:
        for comm_stream in list(self._comm_streams.values()):
            while comm_stream.flights:
                comm_stream.flights.popleft().end_with(self.error)
        for pair in list(self._pairs.values()):
            pair.fail(self.error)

    def _drain_messages(self) -> None:
        pairs = self._pairs
        # Sends may take until the timeout, as long as the receiver exists. Receives get a short time: whether the
        # peer is going to send is unknown.
        self._await(lambda: any(pair.is_busy() for pair in pairs.values()), _LAST_MESSAGES_S)
        self._await(
            lambda: any(
                pair.is_busy(sends_alone=True) and self.options.gone(peer) is None for peer, pair in pairs.items()
            ),
            self.options.timeout_s,
            poll_interval_s=50e-3,
        )
        if self.error is None and any(pair.is_busy() for pair in pairs.values()):
            self.fail(DistError("the group was destroyed before a message was received"))

    def _await(self, busy: Callable[[], bool], timeout_s: float, poll_interval_s: float = 1e-3) -> None:
        deadline = Deadline(timeout_s)
        while self.error is None and busy() and not deadline.expired():
            time.sleep(poll_interval_s)

    def check_open(self) -> None:
        self.check()
        if self._is_closing:
            raise DistError("the group was destroyed before the other rank arrived")

    def _take_device(self, error_prefix: str, device: int | None) -> None:
        with self._taking:
            if self.device is None:
                self.device = self.cuda.runtime.getDevice() if device is None else device
        if device is not None and device != self.device:
            raise ValueError(
                f"{error_prefix}: the array is on GPU {device}, and this rank's calls on the group are on GPU"
                f" {self.device}; a rank has one GPU in a group: copy the array to it"
            )

    def _use_device(self) -> None:
        # CUDA creates a context on the thread's current device at its first call; by default on GPU 0.
        self.cuda.Device(self.device).use()

    def _named_device(self) -> int | None:
        number = cuda_number(self.options.device_id)
        there = int(self.cuda.runtime.getDeviceCount())
        if number is not None and number >= there:
            raise DistBackendError(
                f"backend 'nccl': there is no GPU {number} (device_id), this process sees {there}, numbered from 0;"
                " check CUDA_VISIBLE_DEVICES, and whether more ranks than GPUs were started on this host"
            )
        return number

    def _notice(self, error: BaseException) -> None:
        self.fail(error)
        # Log it as well: results on the device are invalid, and no later call may report it.
        logging.getLogger("meshdist").error("group %r is broken: %s", self.options.label, self.error)

    def _look(self, comm_stream: CommStream) -> None:
        in_flight = next(iter(comm_stream.flights), None)
        if in_flight is None:
            return
        age_s = in_flight.age_s()
        if age_s >= in_flight.timeout_s:
            raise DistTimeoutError(
                f"timed out after {in_flight.timeout_s:g} s waiting for the other ranks to carry out their"
                " part, or for earlier work on this rank's stream",
                error_prefix=in_flight.error_prefix,
            )
        if not comm_stream.monitor.is_due():
            return
        try:
            comm_stream.check_async_error()
        except Exception as error:
            failure = self.library.failure(error, comm_stream.communicator)
            raise DistBackendError(str(failure), peer_failed=True, error_prefix=in_flight.error_prefix) from None
        if age_s > _PATIENCE_S:
            self._look_after_peers(comm_stream, in_flight)

    def _look_around(self) -> float:
        comm_stream = self._comm_stream
        if comm_stream is None:
            return _LONGEST_REST_S
        in_flight = next(iter(comm_stream.flights.copy()), None)
        return self._arrivals.look(comm_stream.num_launched, 0.0 if in_flight is None else in_flight.age_s())

    def _look_after_peers(self, comm_stream: CommStream, in_flight: InFlightOp) -> None:
        self.options.check_preconditions()
        for rank in comm_stream.monitor.turn(range(self.size)):
            if rank == self.rank:
                continue
            how = self.options.gone(rank)
            peers, number = self.options.peers, self.options.ranks[rank]
            if how is None and peers.card(number).host == peers.mine.host and peers.ended(number):
                how = peers.how_ended(number)
            # A rank that left in order has finished its part, unless that was in calls before this one.
            if how is not None and (not how.exit.is_orderly or self._has_left_without(rank, in_flight)):
                left_out = LeftOut.CALL if how.exit.is_orderly else LeftOut.NOTHING
                error = peer_gone(self.options.call(rank), how, left_out, rank=number)
                error.locate(in_flight.error_prefix)
                raise error

    def _has_left_without(self, rank: int, in_flight: InFlightOp) -> bool:
        now_s = time.monotonic()
        if now_s - self._left_s.setdefault(rank, now_s) <= _LEFT_S:
            return False
        # A part that is done on that rank may wait for long on this one, behind other work of its stream.
        return in_flight.number is None or not self._arrivals.have_told(rank, in_flight.number)

    def _is_broken(self) -> bool:
        try:
            return self.options.store.check([_BROKEN])
        except DistError:  # the store is gone, and with it any such report
            return False

    def _finish(self) -> None:
        # All ranks end their CommStreams in the same order: NCCL may wait for the other ranks of the host.
        for place in sorted(self._comm_streams):
            try:
                self._comm_streams[place].finish()
            except Exception as error:  # all calls are complete, so nothing is lost
                words = self.library.failure(error)
                logging.getLogger("meshdist").warning("the end of group %r: %s", self.options.label, words)

    def _give_up(self) -> None:
        Aborting(list(self._comm_streams.values()), self.options.label).wait(_ABORT_S)


def _in_time(end: Callable[[], Any], give_up: Callable[[], None]) -> None:
    # NCCL ends a communicator together with the other ranks of the host, and blocks if one has died.
    thread = threading.Thread(target=end, name="meshdist-nccl-end", daemon=True)
    thread.start()
    thread.join(_LAST_WORDS_S)
    if thread.is_alive():
        give_up()
