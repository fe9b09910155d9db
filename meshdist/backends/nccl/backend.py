"""Backend `nccl`: the engine of a group whose arrays are in the memory of GPUs."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from meshdist.backends.base import Backend, BackendOptions, Plan
from meshdist.backends.counting_in import Counted
from meshdist.backends.nccl.aborting import Aborting
from meshdist.backends.nccl.calls import CARRIED, NcclCalls
from meshdist.backends.nccl.lane import Flight, Lane
from meshdist.backends.nccl.library import CupyLibrary, Library
from meshdist.backends.nccl.meeting import Meeting, compare_calls
from meshdist.backends.nccl.pairs import Pair
from meshdist.backends.nccl.watchdog import Watchdog
from meshdist.backends.withdrawal import withdraw
from meshdist.call import Call
from meshdist.cupy_arrays import cupy_module
from meshdist.deadline import Deadline
from meshdist.devices import cuda_number
from meshdist.errors import DistBackendError, DistError, DistTimeoutError
from meshdist.farewell import DESTROYED_GROUP, ORDERLY, gave_up
from meshdist.store import PrefixStore
from meshdist.waiting import wait_until

# Under it, in the group's store, a rank says that it gave up.
_BROKEN = "nccl/broken"
# After how long an operation that is on its way is wondered about, and how often then.
_PATIENCE_S, _LOOK_S = 1.0, 0.5
_LOOKED_AFTER = 16
_LAST_WORDS_S, _LAST_MESSAGES_S, _LAST_ARRAYS_S, _ABORT_S = 10.0, 5.0, 1.0, 10.0


class NcclBackend(Backend):
    """The engine of one group: a lane for its collectives, and two for each pair of ranks that exchange messages.

    A lane is made when it is first needed, by the ranks that it is for, all at once.

    Args:
        options: What the group is.
        library: NCCL; None takes that of CuPy.
    """

    def __init__(self, options: BackendOptions, library: Library | None = None) -> None:
        super().__init__(options)
        self.library: Library = CupyLibrary() if library is None else library
        self.cuda = cupy_module().cuda
        self.device: int | None = self._named_device()
        self.error: DistError | None = None
        self._lane: Lane | None = None
        self._pairs: dict[int, Pair] = {}
        self._lanes: dict[str, Lane] = {}  # all there are
        self._is_closing = False
        self._making, self._pairing, self._taking = threading.Lock(), threading.Lock(), threading.Lock()
        self._failing = threading.Lock()
        self._watchdog = Watchdog(f"meshdist-nccl-{options.rank}", self._look, self._notice, self._use_device)
        self._looked_at = 0
        self._num_meetings = self._num_compared = 0
        self.device_calls = NcclCalls(self)

    @classmethod
    def has_own(cls, native: str) -> bool:
        return native in CARRIED

    def prepare(self, call: Call) -> Plan:
        raise AssertionError("calls of this engine go by way of its device_calls")

    def lane(self, where: str, device: int | None) -> Lane:
        """Return the lane of the group's collectives; the first time, meet the other ranks.

        Args:
            where: How messages begin.
            device: The GPU of the arrays; None where there are none.

        Raises:
            ValueError: The arrays are on another GPU than those before.
            DistError: The ranks cannot meet.
        """
        self.check()
        lane = self._lane
        if lane is not None and device in (None, self.device):
            return lane
        with self._making:
            self._take_device(where, device)
            assert self.device is not None
            if self._lane is None:
                with self.cuda.Device(self.device):
                    self._lane = self.new_lane("all", tuple(range(self.size)), where)
            return self._lane

    def pair(self, peer: int, where: str, device: int) -> Pair:
        """Return what carries the messages between this rank and another.

        Raises:
            ValueError: The array is on another GPU than those before.
        """
        self.check()
        with self._pairing:  # and not the other: isend must not wait for ranks that meet for a collective
            self._take_device(where, device)
            pair = self._pairs.get(peer)
            if pair is None:
                pair = self._pairs[peer] = Pair(self, peer, device)
            return pair

    def check(self) -> None:
        """Raise what the engine has given up for."""
        error = self.error
        if error is not None:
            # A new one: who catches it puts words of its own before it.
            raise type(error)(str(error), peer_failed=error.peer_failed)

    def fail(self, error: BaseException) -> None:
        """Give up: end the communicators at once, once, and have all that is on its way fail with `error`."""
        with self._failing:
            if self.error is not None:
                return
            failure = self.library.failure(error)
            told = failure if isinstance(failure, DistError) else DistBackendError(_in_words(error))
            for lane in list(self._lanes.values()):
                for flight in lane.flights.copy():
                    flight.record_end(told)
            self.error = told
        withdraw(self.options, self.rank, gave_up(str(self.error)))
        with contextlib.suppress(DistError):
            self.options.store.set(_BROKEN, "")
        aborting = Aborting(list(self._lanes.values()), self.options.label)
        # Not after it: it may take its time. And what is begun in this moment afterwards.
        self._fail_flights()
        aborting.wait(_ABORT_S)
        self._fail_flights()

    def monitored_barrier(self, where: str, timeout_s: float) -> None:
        """Meet the other ranks in the store, which knows who has come.

        Raises:
            DistTimeoutError: Some ranks did not come in time; says which.
        """
        self.check()
        self._num_meetings += 1
        store = PrefixStore(f"nccl/monitored/{self._num_meetings}", self.options.store)
        counted = Counted(self.options, store, tuple(range(self.size)), "", self._check_open)
        wait_until(counted, self.options.bells.mine(), Deadline(timeout_s), where, self.options.vigil)

    def compare(self, call: Call, where: str) -> None:
        """Have all ranks compare what they are about to call.

        Raises:
            DistBackendError: They call different things.
            DistTimeoutError: Some ranks did not come.
        """
        self.check()
        self._num_compared += 1
        number, timeout_s = self._num_compared, self.options.timeout_s
        compare_calls(self.options, number, call.signature(), where, timeout_s, self._check_open)

    def abort(self, reason: str) -> None:
        self.fail(DistBackendError(reason))

    def close(self) -> None:
        lane = self._lane
        self._await(lambda: lane is not None and bool(lane.flights), self.options.timeout_s)
        self._drain_messages()
        self._is_closing = True
        self._watchdog.stop()
        if self.error is None and self._is_broken():
            self.fail(DistBackendError("another rank gave up"))
        if self.error is None:
            withdraw(self.options, self.rank, DESTROYED_GROUP)
            _in_time(self._finish, self._give_up)
        if self.error is not None:  # the thread that gave up may not have come so far
            self._fail_flights()
        # What was aborted may not have ended on the device yet, and its arrays live until then.
        deadline = Deadline(_LAST_ARRAYS_S)
        while any(lane.keeps_arrays() for lane in self._lanes.values()) and not deadline.expired():
            time.sleep(1e-3)
        self._lane = None
        self._pairs.clear()
        self._lanes.clear()

    def new_lane(self, place: str, members: tuple[int, ...], where: str) -> Lane:
        """Meet some ranks of the group, and make a lane on this rank's GPU, which is the current device.

        Raises:
            DistError: The ranks cannot meet, or NCCL makes no communicator.
        """
        device, library = self.device, self.library
        assert device is not None
        gpu = f"{self.cuda.runtime.deviceGetPCIBusId(device)} on {self.options.peers.mine.host_name}"
        host = self.options.peers.mine.host
        meeting = Meeting(self.options, members, f"nccl/{place}", where, self._check_open)
        unique_id = meeting.unique_id(library, (gpu, host))
        rank = members.index(self.options.rank)

        def make() -> Any:
            with self.cuda.Device(device):
                return library.communicator(len(members), unique_id, rank)

        try:
            communicator = meeting.made_in_time(make)
        except Exception as error:  # NCCL's words are said as ours
            raise library.failure(error) from None
        priority = -1 if getattr(self.options.pg_options, "is_high_priority_stream", False) else None
        stream = self.cuda.Stream(non_blocking=True, priority=priority)
        wake = self._watchdog.wake
        lane = self._lanes[place] = Lane(library, self.cuda, communicator, device, stream, self.check, wake)
        self._watchdog.watch(lane)
        if self.error is not None:  # it may have come too late to be aborted with the others
            self._give_up()
            self.check()
        return lane

    def _fail_flights(self) -> None:
        for lane in list(self._lanes.values()):
            while lane.flights:
                lane.flights.popleft().end_with(self.error)
        for pair in list(self._pairs.values()):
            pair.fail(self.error)

    def _drain_messages(self) -> None:
        pairs = self._pairs
        # What is sent may take its time, as long as there is somebody to receive it; whether somebody is going to send
        # what is received here is not known.
        self._await(lambda: any(pair.is_busy() for pair in pairs.values()), _LAST_MESSAGES_S)
        self._await(
            lambda: any(
                pair.is_busy(sends_alone=True) and self.options.gone(peer) is None for peer, pair in pairs.items()
            ),
            self.options.timeout_s,
            nap_s=50e-3,
        )
        if self.error is None and any(pair.is_busy() for pair in pairs.values()):
            self.fail(DistError("the group is destroyed, and a message was not received"))

    def _await(self, busy: Callable[[], bool], timeout_s: float, nap_s: float = 1e-3) -> None:
        deadline = Deadline(timeout_s)
        while self.error is None and busy() and not deadline.expired():
            time.sleep(nap_s)

    def _check_open(self) -> None:
        self.check()
        if self._is_closing:
            raise DistError("the group is destroyed, and the other rank has not come")

    def _take_device(self, where: str, device: int | None) -> None:
        with self._taking:
            if self.device is None:
                self.device = self.cuda.runtime.getDevice() if device is None else device
        if device is not None and device != self.device:
            raise ValueError(
                f"{where}: the array is on GPU {device}, and this rank's calls on the group are on GPU {self.device};"
                " a rank has one GPU in a group: bring the array there"
            )

    def _use_device(self) -> None:
        # A thread that asks CUDA anything makes a context on its current device: without this, all on GPU 0.
        self.cuda.Device(self.device).use()

    def _named_device(self) -> int | None:
        number = cuda_number(self.options.device_id)
        there = int(self.cuda.runtime.getDeviceCount())
        if number is not None and number >= there:
            raise DistBackendError(
                f"backend 'nccl': there is no GPU {number} here (device_id), this process sees {there}, from 0 on;"
                " see CUDA_VISIBLE_DEVICES, and whether more ranks than GPUs were started on this host"
            )
        return number

    def _notice(self, error: BaseException) -> None:
        self.fail(error)
        # Perhaps nobody asks again, and what is on the device is worthless: that must be seen.
        logging.getLogger("meshdist").error("group %r is broken: %s", self.options.label, self.error)

    def _look(self, lane: Lane) -> None:
        flight = next(iter(lane.flights), None)
        if flight is None:
            return
        if flight.deadline.expired():
            raise DistTimeoutError(
                f"{flight.where}: timed out after {flight.deadline.timeout_s:g} s waiting for the other ranks to carry"
                " out their part, or for what this rank's stream was asked to do before"
            )
        now_s = time.monotonic()
        if now_s < lane.next_look_s:
            return
        lane.next_look_s = now_s + _LOOK_S
        try:
            lane.check_async_error()
        except Exception as error:  # what it is, NCCL's words say
            failure = self.library.failure(error, lane.communicator)
            raise DistBackendError(f"{flight.where}: {failure}", peer_failed=True) from None
        if flight.deadline.timeout_s - flight.deadline.remaining_s() > _PATIENCE_S:
            self._look_after_peers(flight)

    def _look_after_peers(self, flight: Flight) -> None:
        self.options.check_premises()
        for _ in range(min(_LOOKED_AFTER, self.size)):
            rank = self._looked_at = (self._looked_at + 1) % self.size
            if rank == self.rank:
                continue
            how = self.options.gone(rank)
            peers, number = self.options.peers, self.options.ranks[rank]
            if how is None and peers.card(number).host == peers.mine.host and peers.ended(number):
                how = peers.how_ended(number)
            # Who left in order has done its part.
            if how is not None and how not in ORDERLY:
                raise DistBackendError(f"{flight.where}: {self.options.call(rank)} {how}", peer_failed=True)

    def _is_broken(self) -> bool:
        try:
            return self.options.store.check([_BROKEN])
        except DistError:  # the store is gone, and nobody is left who could have said so
            return False

    def _finish(self) -> None:
        # Ranks end the same lanes in the same order: NCCL may wait for those of the host.
        for place in sorted(self._lanes):
            try:
                self._lanes[place].finish()
            except Exception as error:  # all calls are done: nothing is lost with it
                words = self.library.failure(error)
                logging.getLogger("meshdist").warning("the end of group %r: %s", self.options.label, words)

    def _give_up(self) -> None:
        Aborting(list(self._lanes.values()), self.options.label).wait(_ABORT_S)


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _in_time(end: Callable[[], Any], give_up: Callable[[], None]) -> None:
    # NCCL ends a communicator together with the other ranks of the host. One that died does not come.
    thread = threading.Thread(target=end, name="meshdist-nccl-end", daemon=True)
    thread.start()
    thread.join(_LAST_WORDS_S)
    if thread.is_alive():
        give_up()
