"""The side of the worker: a seat is the place of one rank of a job on it.

The client reserves a seat on every worker, and starts tasks that take them. A worker that was restarted has no seat, so
it never runs half of a job again. Worlds are per process: a worker has one seat that is in use.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import cloudpickle
import numpy as np
from distributed import Worker, get_worker
from distributed.comm import get_address_host

from meshdist.arrays.trees import exchanged, values_in
from meshdist.backends.device_backends import usable_backend_name
from meshdist.dask.job_errors import Failed, JobEndedError
from meshdist.dask.partitions import BlockOf, Kept, keep_blocks
from meshdist.device_mesh import init_device_mesh
from meshdist.groups.world import World, world_in
from meshdist.launch.rank_functions import RankResult
from meshdist.lifecycle import check_environment, enter_owned_world
from meshdist.runtime.context import current_slot
from meshdist.store import TCPStore
from meshdist.system.deadline import Deadline

_SEATS = "_meshdist_seats"
# How soon a rank notices that its client is gone, and how long its calls have to raise before its code is interrupted.
_LOOK_S = 0.5
_STORE_S = 30.0
# How long a job waits for a rank of the job before, which is being ended.
_END_S = 10.0


@dataclass(frozen=True)
class Ticket:
    """What the ranks of a job have to know; its repr, which Dask may log, leaves out the secret."""

    job: str
    workers: tuple[str, ...]  # the addresses, by rank
    secret: bytes = field(repr=False)
    backend: str | None
    timeout_s: float
    start_timeout_s: float
    lock: str  # the id of the MultiLock that reserves the workers

    @property
    def size(self) -> int:
        return len(self.workers)


@dataclass(frozen=True)
class Reserved:
    """What a worker says of its seat."""

    process: tuple[str, int]  # host and pid
    port: int | None  # of the store, which rank 0 hosts
    refusal: str | None = None


class Use(IntEnum):
    """What a worker does for the package; of two workers, a job takes the one with less of it."""

    FREE = 0
    HAS_RANK = 1  # of a job that may end soon
    BEING_ENDED = 2  # a rank that was told to end, and may be stuck


class Seat:
    """The place of one rank on a worker."""

    def __init__(self, worker: Worker, ticket: Ticket) -> None:
        self._worker = worker
        self.ticket = ticket
        self.rank = ticket.workers.index(worker.address)
        self.store: TCPStore | None = None
        self.blocks: list[Any] = []  # of DTensors that were returned, until the client takes them
        self.is_running = False
        self._host = get_address_host(ticket.workers[0])
        self._ending = threading.Event()
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._world: World | None = None
        self._thread: int | None = None  # that runs the user's function

    def host_store(self) -> int:
        self.store = TCPStore(
            self._host, 0, is_master=True, timeout=_STORE_S, wait_for_workers=False, secret=self.ticket.secret
        )
        return self.store.port

    def discard(self) -> None:
        """Give up a seat that no rank has taken."""
        if self.store is not None and not self.is_running:
            self.store.close()
        self.blocks.clear()

    @property
    def use(self) -> Use:
        """What the worker does as long as it has this seat."""
        return Use.BEING_ENDED if self.is_running and self._ending.is_set() else Use.HAS_RANK

    def end(self) -> None:
        """Have the rank end soon: its calls raise, and then its code."""
        self._ending.set()

    def run(self, key: str, port: int, payload: bytes, chunks: Sequence[Any]) -> RankResult | Failed:
        """Join the world, call the function, leave the world."""
        slot = current_slot()
        if slot.world is not None:
            raise RuntimeError(
                f"this worker (pid {os.getpid()}) is a rank of another world already; call destroy_process_group there"
            )
        self.is_running = True
        watcher = threading.Thread(target=self._watch, args=(key,), name="meshdist-dask-seat", daemon=True)
        watcher.start()
        outcome: RankResult | Failed
        try:
            world = self._join(port)
            try:
                result = keep_blocks(self._call(world, payload, chunks), self.blocks)
                outcome = RankResult.of(result, self.rank, cloudpickle.dumps)
                world.finish()
            except BaseException as error:
                if world_in(slot) is world:
                    world.finish_after_error()
                    world.abort("it raised", error)
                raise
        except BaseException as error:  # whatever the function raises goes to the client
            outcome = Failed.of(error, is_consequence=self._ending.is_set())
        finally:
            left = world_in(slot)
            if left is not None:
                slot.empty()
                left.close()
            self._world = None
            self._done.set()
            watcher.join()
            self.is_running = False
        return outcome

    def _join(self, port: int) -> World:
        ticket, deadline = self.ticket, Deadline(self.ticket.start_timeout_s)
        check_environment()
        backend = usable_backend_name(ticket.backend)
        if self.store is None:
            self.store = TCPStore(
                self._host, port, timeout=deadline.slice_s(_STORE_S), wait_for_workers=False, secret=ticket.secret
            )
        world = enter_owned_world(current_slot(), self.store, self.rank, ticket.size, backend, deadline)
        world.timeout_s = world.default_group.timeout_s = ticket.timeout_s
        self._world = world
        return world

    def _call(self, world: World, payload: bytes, chunks: Sequence[Any]) -> Any:
        fn, args, kwargs = pickle.loads(payload)
        has_blocks = any(isinstance(value, BlockOf) for value in values_in((args, kwargs)))
        mesh = init_device_mesh("cpu", (world.size,)) if has_blocks else None
        args, kwargs = exchanged(
            (args, kwargs), lambda value: value.to_dtensor(mesh, chunks) if isinstance(value, BlockOf) else value
        )
        with self._lock:
            if self._ending.is_set():
                raise JobEndedError("the job was ended before this rank began")
            self._thread = threading.get_ident()
        try:
            return fn(*args, **kwargs)
        finally:
            with self._lock:
                _interrupt(self._thread, None)  # one that has not arrived yet
                self._thread = None

    def _watch(self, key: str) -> None:
        while not self._ending.wait(_LOOK_S):
            if self._done.is_set():
                return
            task = self._worker.state.tasks.get(key)
            if task is None or task.state == "cancelled":  # the client is gone, and nobody waits for the result
                if self.rank == 0:
                    self._release_workers()
                break
        world = self._world
        if world is not None and not self._done.is_set():
            world.abort("the job was ended")
        elif world is None and self.store is not None:
            self.store.close()  # the rank waits there for the others
        while not self._done.wait(_LOOK_S):
            with self._lock:
                _interrupt(self._thread, JobEndedError)

    def _release_workers(self) -> None:
        """Release the lock that the client can release no more."""
        release: Any = self._worker.scheduler.multi_lock_release
        asyncio.run_coroutine_threadsafe(release(id=self.ticket.lock), self._worker.loop.asyncio_loop)


def _interrupt(thread: int | None, error: type[BaseException] | None) -> None:
    """Raise `error` in a thread as soon as it runs Python's bytecode; None takes one back that was not raised yet."""
    if thread is not None:
        what = None if error is None else ctypes.py_object(error)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


# ---- What the client calls on workers; all but `take_seat` and `take_block` run on the worker's event loop


def _seats(worker: Worker) -> dict[str, Seat]:
    seats: dict[str, Seat] = vars(worker).setdefault(_SEATS, {})
    return seats


def use_of_worker(dask_worker: Any) -> Use:
    """Return what this worker does."""
    return max((seat.use for seat in _seats(dask_worker).values()), default=Use.FREE)


async def reserve_seat(ticket: Ticket, dask_worker: Any) -> Reserved:
    """Reserve a seat on this worker; the worker of rank 0 hosts the store."""
    process, seats = (get_address_host(dask_worker.address), os.getpid()), _seats(dask_worker)
    deadline = Deadline(_END_S)
    for job, old in list(seats.items()):
        old.end()
        while old.is_running and not deadline.expired():
            await asyncio.sleep(deadline.slice_s(0.02))
        if old.is_running:
            words = (
                f"still runs rank {old.rank} of an earlier job, which could not be ended; restart the worker, or ask"
                " for as many ranks as there are other workers"
            )
            return Reserved(process, None, words)
        if seats.pop(job, None) is not None:  # else it was dropped meanwhile
            old.discard()
    if world_in(current_slot()) is not None:
        return Reserved(process, None, "is in a world already, by init_process_group; call destroy_process_group there")
    seat = Seat(dask_worker, ticket)
    port = await asyncio.to_thread(seat.host_store) if seat.rank == 0 else None
    seats[ticket.job] = seat
    return Reserved(process, port)


def end_seat(job: str, dask_worker: Any) -> None:
    """End the rank of a job on this worker."""
    seat = _seats(dask_worker).get(job)
    if seat is not None:
        seat.end()


def drop_seat(job: str, dask_worker: Any) -> None:
    """Forget the seat of a job, unless its rank still runs."""
    seat = _seats(dask_worker).get(job)
    if seat is not None:
        seat.end()
        if not seat.is_running:
            _seats(dask_worker).pop(job).discard()


def take_seat(job: str, key: str, port: int, payload: bytes, chunks: Sequence[Any]) -> RankResult | Failed:
    """Run the rank of a job on this worker, as a task."""
    seat = _seats(get_worker()).get(job)
    if seat is None:
        return Failed("the worker was restarted", "", None, False, worker_is_new=True)
    return seat.run(key, port, payload, chunks)


def take_block(job: str, kept: Kept) -> np.ndarray[Any, Any]:
    """Return a block that the rank on this worker kept, as a task: so it becomes one of Dask's."""
    block: np.ndarray[Any, Any] = _seats(get_worker())[job].blocks[kept.number]
    return block
