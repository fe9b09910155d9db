"""The client's side of a job on a Dask cluster: reserve the workers, start a rank on each, wait for all of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import cloudpickle
from dask.base import is_dask_collection
from distributed import Client, Future, MultiLock

from meshdist.arrays.trees import exchanged, values_in
from meshdist.dask.chosen_workers import (
    ANSWER_S,
    ask_workers,
    checked_names,
    choose_workers,
    known_workers,
)
from meshdist.dask.client_calls import called, check_open, settle
from meshdist.dask.job_errors import Failed, RankError, WorkerLostError
from meshdist.dask.partitions import BlockOf, Cut, Kept, Partitions, from_dask
from meshdist.dask.returned_arrays import dask_arrays
from meshdist.dask.seat import Reserved, Ticket, drop_seat, end_seat, reserve_seat, take_block, take_seat
from meshdist.errors import DistError, DistTimeoutError
from meshdist.launch.rank_functions import RankResult, in_words
from meshdist.system.deadline import DEFAULT_TIMEOUT_S, Deadline, Timeout, seconds

# How often the client looks for workers that are gone.
_LOOK_S = 0.5
# How long the other ranks have to raise, after one has failed, before they are ended; and how long that may take.
_RAISE_S = 1.0
_END_S = 5.0
_SEAT_S = 15.0  # longer than a worker waits for the rank before
_FETCH_S = 600.0
_FIRST = 1000  # the priority of ranks: before the other tasks of their workers


def run(
    client: Client,
    fn: Callable[..., Any],
    *args: Any,
    ranks: int | None = None,
    workers: Iterable[str | int] | None = None,
    backend: str | None = None,
    timeout: Timeout | None = None,
    start_timeout: Timeout | None = None,
    wait_for_workers: Timeout = 0.0,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(*args, **kwargs)` as one rank on each of some workers of a Dask cluster, and return the results by rank.

    Every rank finds an initialized world: `meshdist.get_rank()`, `init_device_mesh` and collectives work in `fn`, and
    the world is destroyed when it returns. The workers are reserved, all or none; jobs that want the same workers run
    one after the other, and other tasks of Dask run beside them. Dask arrays and dataframes among the arguments, also
    in tuples, lists and dicts, are computed on the workers and arrive as DTensors, see `from_dask`. DTensors that `fn`
    returns, also in such containers, come back as Dask arrays whose chunks are the blocks, on their workers: all ranks
    must return them.

    Args:
        client: The client of the cluster; not an asynchronous one.
        fn: The function, which the workers must be able to import, or which cloudpickle can send.
        args: Its arguments, the same for all ranks.
        ranks: How many; None: as many as there are workers.
        workers: The addresses or names of the workers to choose from, each once; None: all. Those without a rank of
            another job are chosen first.
        backend: The backend of the world, as in `init_process_group`.
        timeout: How long calls in `fn` wait for other ranks, as in `init_process_group`. 30 minutes if None.
        start_timeout: How long to wait for the workers to be free, and for the ranks to meet. 30 minutes if None.
        wait_for_workers: How long to wait for so many workers to be there: a timedelta or seconds.
        kwargs: Arguments of `fn` by name.

    Raises:
        RankError: A rank raised, or its result cannot be pickled: the first failure that does not follow from
            another's, with rank and worker.
        WorkerLostError: The worker of a rank ended or restarted.
        DistTimeoutError: The workers did not become free in time.
        ConnectionError: The client was closed meanwhile, or has lost the scheduler.
        DistError: There are too few workers or not those named, or they cannot be ranks; nothing was started.
        TypeError: An argument has the wrong type or cannot be pickled, or is a Dask collection that cannot be a
            DTensor.
        ValueError: `ranks` is not positive, or `workers` names one twice, or fewer than `ranks`.
        KeyboardInterrupt: The client was interrupted; the ranks are ended first.

    Example:
        ::

            def total(x):
                return float(x.sum().full_tensor())

            with distributed.Client("scheduler:8786") as client:
                sums = meshdist.dask.run(client, total, dask.array.arange(1000, chunks=100), ranks=4)
    """
    if not isinstance(client, Client):
        raise TypeError(f"run: client must be a distributed.Client, got {type(client).__name__}")
    if client.asynchronous:
        raise TypeError("run: the client is asynchronous; call run in a thread, with a Client(..., asynchronous=False)")
    if not callable(fn):
        raise TypeError(f"run: fn must be callable, as in run(client, main, ranks=4), got {type(fn).__name__}")
    named = checked_names(ranks, workers)
    given = exchanged((args, kwargs), lambda value: from_dask(value) if is_dask_collection(value) else value)
    deadline, timeout_s = Deadline(start_timeout), seconds(timeout, DEFAULT_TIMEOUT_S)
    chosen = choose_workers(client, ranks, named, Deadline(wait_for_workers))
    with _reserved(client, chosen, deadline) as lock:
        partitions = {cut: Partitions.of(client, cut, chosen) for cut in values_in(given) if isinstance(cut, Cut)}
        first = next(iter(partitions.values()), None)
        order = tuple(chosen if first is None else first.order(chosen))
        start_s = max(1.0, deadline.remaining_s())
        ticket = Ticket(secrets.token_hex(8), order, secrets.token_bytes(32), backend, timeout_s, start_s, lock)
        job = _Job(client, ticket)
        try:
            job.start(fn, given, partitions)
            return job.results()
        finally:
            job.leave()


@contextmanager
def _reserved(client: Client, workers: Sequence[str], deadline: Deadline) -> Iterator[str]:
    """Reserve the workers, all at once, for a `with` block; yield the lock's id."""
    lock = MultiLock([f"meshdist-{worker}" for worker in workers], client)
    try:
        if not called(client, lock.acquire, timeout=deadline.remaining_s()):
            raise DistTimeoutError(
                f"run: other jobs of meshdist had one or more of the workers, {len(workers)}, for"
                f" {deadline.timeout_s:g} s; wait for them, or pass a longer start_timeout"
            )
    except DistTimeoutError:
        raise
    except BaseException:
        _release(client, lock)  # the request may wait at the scheduler
        raise
    try:
        yield lock.id
    finally:
        _release(client, lock)


def _release(client: Client, lock: MultiLock) -> None:
    # Without a scheduler there is no lock, and a rank whose task was cancelled has released it.
    with suppress(OSError, KeyError):
        called(client, lambda: client.scheduler.multi_lock_release(id=lock.id))


def _block_instead(blocks: dict[Cut, BlockOf], value: Any) -> Any:
    return blocks[value] if isinstance(value, Cut) else value


def _pickled(fn: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:  # whatever an object's own code raises
        raise TypeError(
            f"run: {getattr(fn, '__name__', fn)} or its arguments cannot be pickled: {in_words(error)}; make locks,"
            " open files and connections in the function"
        ) from None
    return pickled


class _Job:
    """The ranks of a job, as tasks of Dask."""

    def __init__(self, client: Client, ticket: Ticket) -> None:
        self._client = client
        self._ticket = ticket
        self._futures: list[Future] = []
        self._returned: dict[int, Any] = {}
        self._failed: dict[int, Failed] = {}
        self._lost: list[int] = []
        self._end: Deadline | None = None  # when ranks that were asked to end are given up

    def start(self, fn: Callable[..., Any], given: tuple[Any, Any], partitions: dict[Cut, Partitions]) -> None:
        """Start one task on each worker, once all have a seat; `given` are the function's args and kwargs."""
        ticket = self._ticket
        splits = {cut: each.split(ticket.workers) for cut, each in partitions.items()}
        payloads: list[tuple[bytes, list[Future]]] = []
        for rank in range(ticket.size):
            chunks: list[Future] = []
            blocks: dict[Cut, BlockOf] = {}
            for cut, each in partitions.items():
                blocks[cut] = each.block_of(splits[cut][rank], len(chunks))
                chunks += [each.chunks[chunk] for chunk in splits[cut][rank]]
            args, kwargs = exchanged(given, partial(_block_instead, blocks))
            payloads.append((_pickled(fn, args, kwargs), chunks))
        port = self._reserve_seats()
        name = getattr(fn, "__name__", type(fn).__name__)
        for rank, (worker, (payload, chunks)) in enumerate(zip(ticket.workers, payloads, strict=True)):
            key = f"meshdist-{name}-{ticket.job}-{rank}"
            self._futures.append(
                self._client.submit(
                    *(take_seat, ticket.job, key, port, payload, chunks),
                    key=key,
                    workers=[worker],
                    allow_other_workers=False,
                    pure=False,
                    priority=_FIRST,
                )
            )

    def _reserve_seats(self) -> int:
        answers = ask_workers(self._client, self._ticket.workers, _SEAT_S, reserve_seat, self._ticket)
        port, processes = None, dict[tuple[str, int], str]()
        for rank, worker in enumerate(self._ticket.workers):
            if worker not in answers:
                raise DistError(
                    f"run: worker {worker} cannot start rank {rank}: it has not answered for {_SEAT_S:g} s; is it busy"
                    " with native code that holds the GIL? Restart it, or ask for as many ranks as there are other"
                    " workers"
                )
            answer = answers[worker]
            if isinstance(answer, ModuleNotFoundError):
                raise DistError(f"run: worker {worker} cannot import what the job needs: {answer}; install it there")
            if not isinstance(answer, Reserved):
                raise WorkerLostError(f"run: worker {worker} cannot start rank {rank}: {answer!r}", rank, worker)
            if answer.refusal is not None:
                raise DistError(f"run: worker {worker} cannot start rank {rank}: it {answer.refusal}")
            if answer.process in processes:
                raise DistError(
                    f"run: the workers {processes[answer.process]} and {worker} are threads of one process (pid"
                    f" {answer.process[1]}), and a rank is a process; make the cluster with processes=True"
                )
            processes[answer.process] = worker
            port = answer.port if rank == 0 else port
        assert port is not None
        return port

    def results(self) -> list[Any]:
        """Return what the ranks returned, or raise the first failure."""
        pending = dict(enumerate(self._futures))
        raising: Deadline | None = None
        while pending and not (self._end is not None and self._end.expired()):
            self._wait(pending, _LOOK_S if raising is None else 0.1)
            if self._failed or self._lost:
                raising = raising or Deadline(_RAISE_S)
                if pending and raising.expired():
                    self._ask_to_end(pending)
        if self._failed or self._lost:
            raise self._first_failure(pending)
        results = [self._returned[rank] for rank in range(self._ticket.size)]
        return dask_arrays(results, self._block, self._client)

    def _wait(self, pending: dict[int, Future], longest_s: float) -> None:
        """Wait until a rank has come to its end, and sort it out; look for lost workers."""
        settle(self._client, pending.values(), longest_s, first=True)
        for rank in [rank for rank, future in pending.items() if future.done()]:
            try:
                outcome = called(self._client, pending[rank].result, timeout=_FETCH_S)
            except TimeoutError:
                continue  # its worker ended before it could send the result
            except (Exception, CancelledError) as error:  # of Dask: it was cancelled, or cannot be sent
                check_open(self._client)
                outcome = Failed.of_task(error)
            del pending[rank]
            if isinstance(outcome, RankResult):
                try:
                    self._returned[rank] = outcome.unpickled(rank)
                except TypeError as error:
                    self._failed[rank] = Failed.of(error)
            elif outcome.worker_is_new:
                self._lost.append(rank)
            else:
                self._failed[rank] = outcome
        alive = known_workers(self._client) if pending else {}
        for rank in [rank for rank in pending if self._ticket.workers[rank] not in alive]:
            del pending[rank]
            self._lost.append(rank)

    def _first_failure(self, pending: dict[int, Future]) -> RankError:
        ticket = self._ticket
        stuck = "".join(f"; rank {rank}, on {ticket.workers[rank]}, could not be ended" for rank in pending)
        if self._lost:
            rank = min(self._lost)
            return WorkerLostError(
                f"run: the worker of rank {rank} of {ticket.size}, {ticket.workers[rank]}, ended, restarted or lost its"
                f" connection to the scheduler; see its log, and whether it ran out of memory; wait_for_workers=20 in"
                f" the next run waits for a restarted worker{stuck}",
                rank,
                ticket.workers[rank],
            )
        rank, failed = min(self._failed.items(), key=lambda pair: (pair[1].is_consequence, pair[1].time_s))
        error = RankError(
            f"run: rank {rank} of {ticket.size}, on worker {ticket.workers[rank]}, {failed.summary}{stuck}"
            + (f"\n\n{failed.text}" if failed.text else ""),
            rank,
            ticket.workers[rank],
        )
        error.__cause__ = failed.cause
        return error

    def _block(self, rank: int, kept: Kept) -> Future:
        """Return a block that a rank kept as a future that stays on its worker."""
        return self._client.submit(
            *(take_block, self._ticket.job, kept),
            workers=[self._ticket.workers[rank]],
            pure=False,
            priority=_FIRST,
        )

    def _ask_to_end(self, ranks: dict[int, Future]) -> Deadline:
        """Have ranks end, once; return when they are given up."""
        if self._end is not None:
            return self._end
        workers = [self._ticket.workers[rank] for rank in ranks]
        ask_workers(self._client, workers, ANSWER_S, end_seat, self._ticket.job)
        self._end = Deadline(_END_S)
        return self._end

    def leave(self) -> None:
        """End the ranks that still run, wait for them, and give back the seats."""
        pending = {rank: each for rank, each in enumerate(self._futures) if not each.done() and rank not in self._lost}
        with suppress(OSError):  # the scheduler is gone
            alive = known_workers(self._client)
            pending = {rank: each for rank, each in pending.items() if self._ticket.workers[rank] in alive}
            if pending:
                end = self._ask_to_end(pending)
                settle(self._client, pending.values(), end.remaining_s())
            workers = [worker for worker in self._ticket.workers if worker in alive]
            ask_workers(self._client, workers, ANSWER_S, drop_seat, self._ticket.job)
            called(self._client, self._client.cancel, self._futures)
