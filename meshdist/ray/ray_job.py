"""run: a function on ranks that are tasks of a Ray cluster.

Tasks run in processes that Ray keeps for that; an actor would need a new one, which takes Ray seconds to start.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple, TypeVar

import ray
from ray.exceptions import RayError, RaySystemError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from meshdist.errors import DistError, DistTimeoutError
from meshdist.launch.rank_functions import RankResult, in_words
from meshdist.launch.spawn_context import ProcessException, ProcessRaisedException
from meshdist.ray.meeting import DEFAULT_JOIN_TIMEOUT_S, remove_entry
from meshdist.ray.rank_bundles import await_places, bundle_of, bundles, nodes_of
from meshdist.ray.rank_task import Place, Raised, Seat, local_ranks, run_rank, seat_name, seat_of
from meshdist.runtime.rank_text import ranks_text
from meshdist.system.deadline import DEFAULT_TIMEOUT_S, Deadline, Timeout, seconds
from meshdist.system.plurals import counted

T = TypeVar("T")

# A failure that follows from another rank's may arrive before it: Ray notices a killed process within a second.
_ECHO_S = 5.0
# No wait for Ray is longer; Ctrl-C ends it at once.
_POLL_S = 5.0
_PAUSE_S = 0.02
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def run(
    fn: Callable[..., T],
    ranks: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_cpus: float = 1,
    num_gpus: float = 0,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    runtime_env: Mapping[str, Any] | None = None,
    start_timeout: Timeout | None = None,
    timeout: Timeout | None = None,
) -> list[T]:
    """Run `fn` on `ranks` tasks of the Ray cluster, and return what each returned.

    Every rank has a world with an initialized process group. All ranks are placed, or none; those on the same node
    follow each other. If a rank fails, the others are ended, as they are on Ctrl-C. Like all tasks, they run in
    processes that Ray keeps for later ones; only those with GPUs end with their rank.

    Args:
        fn: The function that each rank runs; Ray pickles it.
        ranks: The number of ranks.
        args: Arguments of `fn`, the same for all ranks.
        kwargs: Its keyword arguments, likewise.
        num_cpus: What a rank needs, as for `ray.remote`.
        num_gpus: Likewise. Ray sets CUDA_VISIBLE_DEVICES, so that the first GPU of a rank is its device 0.
        resources: Others of the cluster and their amounts for a rank; "memory" in bytes.
        strategy: Where the ranks go, as for Ray's `placement_group`: "PACK" on as few nodes as possible, "SPREAD" on as
            many; "STRICT_PACK" on one node, "STRICT_SPREAD" each on its own.
        runtime_env: Ray's environment of the ranks.
        start_timeout: How long to wait for places, for processes, and until the ranks have met: seconds or a
            timedelta. 3 minutes if None.
        timeout: How long a call of a rank may wait for the others. 30 minutes if None.

    Returns:
        The results in rank order.

    Raises:
        TypeError: `fn` is not callable or cannot be pickled, or `ranks` is not an integer, or `args` no tuple or list.
        ValueError: `ranks` is not positive, nothing or a negative amount is asked for, or the strategy is unknown.
        DistTimeoutError: The cluster has no place for all ranks, or they did not start.
        ProcessRaisedException: A rank raised. It is the first failure that does not follow from another rank's; the
            rank is `error_index`, and its exception, if it can be unpickled here, the `__cause__`.
        ProcessException: The process of a rank died, or its node; what Ray says is the `__cause__`. Or a result cannot
            be unpickled here.
        DistError: A rank did not start, as where meshdist is not installed on a node.

    Example:
        ::

            def main():
                return dist.all_reduce(np.array(dist.get_rank())).item()

            print(meshdist.ray.run(main, 4))  # [6, 6, 6, 6]
    """
    ranks = _checked(fn, ranks)
    if not isinstance(args, tuple | list):
        raise TypeError(f"meshdist.ray.run: args must be a tuple or list, as in args=(1,), got {type(args).__name__}")
    bundle = bundle_of(num_cpus, num_gpus, resources)
    deadline, timeout_s = Deadline(start_timeout, DEFAULT_JOIN_TIMEOUT_S), seconds(timeout, DEFAULT_TIMEOUT_S)
    job = _put(fn, tuple(args), dict(kwargs or {}))
    name = f"run {secrets.token_hex(8)}"
    with bundles(ranks, bundle, strategy) as group:
        running: list[Any] = []
        try:
            await_places(group, bundle, strategy, deadline)
            task = _task(bundle, runtime_env)
            nodes = nodes_of(group)
            order = sorted(range(ranks), key=lambda number: nodes.index(nodes[number]))
            for rank, local_rank in enumerate(local_ranks([nodes[number] for number in order])):
                place = Place(name, rank, ranks, local_rank, deadline.remaining_s(), timeout_s)
                where = PlacementGroupSchedulingStrategy(group, order[rank])
                running.append(task.options(scheduling_strategy=where).remote(place, [job]))
            return _Ranks(name, running, deadline).results()
        finally:
            _end(running)
            for entry in (name, *(seat_name(name, rank) for rank in range(ranks))):
                remove_entry(entry)


def _checked(fn: object, ranks: object) -> int:
    if not callable(fn):
        raise TypeError(f"meshdist.ray.run: fn must be callable, as in run(main, 4), got {type(fn).__name__}")
    try:
        number = index(ranks)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"meshdist.ray.run: ranks must be an integer, got {ranks!r}") from None
    if number < 1:
        raise ValueError(f"meshdist.ray.run: ranks must be at least 1, got {number}")
    return number


def _put(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ship what the ranks call, once for all of them."""
    try:
        return ray.put((fn, args, kwargs))
    except TypeError as error:
        raise TypeError(
            f"meshdist.ray.run: {getattr(fn, '__name__', fn)} or its arguments cannot be pickled:"
            f" {error.__cause__ or error}; make locks, open files and connections in the function"
        ) from None


def _task(bundle: Mapping[str, float], runtime_env: Mapping[str, Any] | None) -> Any:
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
    amounts = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "resources": others}
    return ray.remote(max_retries=0, runtime_env=runtime_env, **amounts)(run_rank)


def _end(running: Sequence[Any]) -> None:
    """End the processes of the ranks that are still running."""
    if running:
        for ref in ray.wait(list(running), num_returns=len(running), timeout=0)[1]:
            ray.cancel(ref, force=True)


class _Ranks:
    """The running ranks of a job, in order."""

    def __init__(self, job: str, refs: Sequence[Any], start: Deadline) -> None:
        self._job, self._refs, self._start = job, refs, start
        self._have_started = False

    def results(self) -> list[Any]:
        """Wait for the ranks; raise the first failure that does not follow from another."""
        waiting = list(self._refs)
        results: dict[Any, Any] = {}
        echo: _Failure | None = None
        grace: Deadline | None = None
        while waiting and not (grace is not None and grace.expired()):
            done, waiting = ray.wait(waiting, timeout=self._slice_s(grace))
            if not done:
                self._check_start()
            failures = []
            for ref in done:
                rank = self._refs.index(ref)
                results[ref] = self._result(ref, rank)
                if isinstance(results[ref], Raised):
                    failures.append(_Failure(rank, self._who(rank), results[ref]))
            first = min(failures, key=lambda failure: failure.order, default=None)
            if first is not None and not first.raised.secondary:
                raise first.exception() from first.raised.cause()
            if first is not None and echo is None:
                echo, grace = first, Deadline(_ECHO_S)
        if echo is not None:
            raise echo.exception() from echo.raised.cause()
        return [results[ref] for ref in self._refs]

    def _slice_s(self, grace: Deadline | None) -> float:
        if grace is not None:
            return grace.slice_s(_POLL_S)
        return _POLL_S if self._have_started else max(self._start.slice_s(_POLL_S), _PAUSE_S)

    def _check_start(self) -> None:
        if self._have_started or not self._start.expired():
            return
        size = len(self._refs)
        missing = [rank for rank in range(size) if seat_of(self._job, rank) is None]
        if missing:
            raise DistTimeoutError(
                f"meshdist.ray.run: {size - len(missing)} of {counted(size, 'rank')} started within"
                f" {self._start.timeout_s:g} s, {ranks_text(missing)} did not; is a node overloaded, or a runtime_env"
                " being installed? Pass a longer start_timeout"
            )
        self._have_started = True

    def _who(self, rank: int) -> _Who:
        return _Who(rank, len(self._refs), seat_of(self._job, rank))

    def _result(self, ref: Any, rank: int) -> Any:
        """Return what a rank has returned, or how it failed; raise if its process died."""
        try:
            found = ray.get(ref)
        except RayError as error:
            who = self._who(rank)
            if who.seat is None:
                raise DistError(f"meshdist.ray.run: rank {rank} did not start: {_words(error)}") from error
            what = "could not call the function" if isinstance(error, RayTaskError) else "ended"
            words = f"{who} {what}: {_words(error)}"
            raise ProcessException(words, error_index=rank, error_pid=who.pid) from _cause(error)
        if not isinstance(found, RankResult):
            return found
        try:
            return found.unpickled(rank)
        except TypeError as error:
            who = self._who(rank)
            raise ProcessException(f"{who}: {error}", error_index=rank, error_pid=who.pid) from None


class _Who(NamedTuple):
    rank: int
    size: int
    seat: Seat | None

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.seat or 'gone'})"

    @property
    def pid(self) -> int:
        return -1 if self.seat is None else self.seat.pid


class _Failure(NamedTuple):
    rank: int
    who: _Who
    raised: Raised

    @property
    def order(self) -> tuple[bool, float]:
        return self.raised.secondary, self.raised.time_s

    def exception(self) -> ProcessRaisedException:
        words = f"{self.who} raised:\n{self.raised.traceback}"
        return ProcessRaisedException(words, error_index=self.rank, error_pid=self.who.pid)


def _words(error: RayError) -> str:
    """Return what Ray says, without its colours, and without its own traceback where the cause is known."""
    cause = _cause(error)
    return _COLOURS.sub("", str(error)).strip() if cause is error else in_words(cause)


def _cause(error: RayError) -> Exception:
    """Return what was raised in the process of a rank, if it is known; else the error of Ray."""
    cause: Any = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RaySystemError):
        cause = getattr(cause, "client_exc", cause)
    return cause if isinstance(cause, Exception) else error
