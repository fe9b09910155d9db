"""run: a function on ranks that are actors of a Ray cluster."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from meshdist.errors import DistError, DistTimeoutError
from meshdist.launch.rank_results import RankResult, in_words
from meshdist.launch.spawn_context import ProcessException, ProcessRaisedException
from meshdist.ray.meeting import DEFAULT_JOIN_TIMEOUT_S, remove_entry
from meshdist.ray.rank_actor import Place, Raised, RankActor, Seat, local_ranks
from meshdist.ray.rank_bundles import await_places, bundle_of, bundles
from meshdist.system.deadline import DEFAULT_TIMEOUT_S, Deadline, Timeout, seconds

T = TypeVar("T")

# A failure that follows from another rank's may arrive before it: Ray notices a killed actor within a second.
_ECHO_S = 5.0
# No wait for Ray is longer; Ctrl-C ends it at once.
_POLL_S = 5.0
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
    """Run `fn` on `ranks` actors of the Ray cluster, and return what each returned.

    Every rank has a world with an initialized process group. All ranks are placed, or none; those on the same node
    follow each other. If a rank fails, the others are ended. In any case, also on Ctrl-C, actors and placement group
    are removed.

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
        runtime_env: Ray's environment of the actors.
        start_timeout: How long to wait for places, for the actors, and until the ranks have met: seconds or a
            timedelta. 3 minutes if None.
        timeout: How long a call of a rank may wait for the others. 30 minutes if None.

    Returns:
        The results in rank order.

    Raises:
        TypeError: `fn` is not callable or cannot be pickled, or `ranks` is not an integer, or `args` no tuple or list.
        ValueError: `ranks` is not positive, nothing or a negative amount is asked for, or the strategy is unknown.
        DistTimeoutError: The cluster has no place for all ranks, or the actors did not start.
        ProcessRaisedException: A rank raised. It is the first failure that does not follow from another rank's; the
            rank is `error_index`, and its exception, if it can be unpickled here, the `__cause__`.
        ProcessException: An actor died, or its node; what Ray says is the `__cause__`. Or a result cannot be unpickled
            here.
        DistError: An actor did not start, as where meshdist is not installed on a node.

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
        actors = _actors(group, bundle, runtime_env)
        try:
            seats = [actor.seat.remote() for actor in actors]  # while Ray looks for places
            await_places(group, bundle, strategy, deadline)
            started = _start(actors, seats, deadline)
            running = {}
            for rank, local_rank in enumerate(local_ranks([each.seat for each in started])):
                place = Place(name, rank, ranks, local_rank, deadline.remaining_s(), timeout_s)
                running[started[rank].actor.run.remote(place, job)] = started[rank]
            return _results(running)
        finally:
            for actor in actors:
                ray.kill(actor)
            remove_entry(name)


class _Started(NamedTuple):
    actor: Any
    seat: Seat


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


def _actors(group: Any, bundle: Mapping[str, float], runtime_env: Mapping[str, Any] | None) -> list[Any]:
    """Create an actor in each bundle of a placement group."""
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
    actor = ray.remote(
        num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), resources=others, runtime_env=runtime_env
    )(RankActor)
    places = [PlacementGroupSchedulingStrategy(group, number) for number in range(group.bundle_count)]
    return [actor.options(scheduling_strategy=place).remote() for place in places]


def _start(actors: Sequence[Any], seats: list[Any], deadline: Deadline) -> list[_Started]:
    """Wait until all actors run; return them in rank order, those of a node one after the other."""
    try:
        found = ray.get(seats, timeout=deadline.remaining_s())
    except GetTimeoutError:
        ready, missing = ray.wait(seats, num_returns=len(seats), timeout=0)
        raise DistTimeoutError(
            f"meshdist.ray.run: {len(ready)} of {len(seats)} actors started within {deadline.timeout_s:g} s,"
            f" {len(missing)} did not; is a node overloaded, or a runtime_env being installed? Pass a longer"
            " start_timeout"
        ) from None
    except RayError as error:
        raise DistError(f"meshdist.ray.run: an actor did not start: {_words(error)}") from error
    started = [_Started(actor, seat) for actor, seat in zip(actors, found, strict=True)]
    nodes = list(dict.fromkeys(each.seat.node_id for each in started))
    return sorted(started, key=lambda each: nodes.index(each.seat.node_id))


def _results(running: Mapping[Any, _Started]) -> list[Any]:
    """Wait for the ranks, given in order; raise the first failure that does not follow from another."""
    refs, waiting = list(running), list(running)
    results: dict[Any, Any] = {}
    echo: _Failure | None = None
    grace: Deadline | None = None
    while waiting and not (grace is not None and grace.expired()):
        done, waiting = ray.wait(waiting, timeout=_POLL_S if grace is None else grace.slice_s(_POLL_S))
        failures = []
        for ref in done:
            rank, seat = refs.index(ref), running[ref].seat
            results[ref] = _result(ref, f"rank {rank} of {len(refs)} ({seat})", rank, seat.pid)
            if isinstance(results[ref], Raised):
                failures.append(_Failure(rank, len(refs), seat, results[ref]))
        first = min(failures, key=lambda failure: failure.order, default=None)
        if first is not None and not first.raised.secondary:
            raise first.exception() from first.raised.cause()
        if first is not None and echo is None:
            echo, grace = first, Deadline(_ECHO_S)
    if echo is not None:
        raise echo.exception() from echo.raised.cause()
    return [results[ref] for ref in refs]


class _Failure(NamedTuple):
    rank: int
    size: int
    seat: Seat
    raised: Raised

    @property
    def order(self) -> tuple[bool, float]:
        return self.raised.secondary, self.raised.time_s

    def exception(self) -> ProcessRaisedException:
        words = f"rank {self.rank} of {self.size} ({self.seat}) raised:\n{self.raised.traceback}"
        return ProcessRaisedException(words, error_index=self.rank, error_pid=self.seat.pid)


def _result(ref: Any, who: str, rank: int, pid: int) -> Any:
    """Return what a rank has returned, or how it failed; raise if its actor died."""
    try:
        found = ray.get(ref)
    except RayTaskError as error:  # what it shall call cannot be unpickled there
        words = f"{who} could not call the function: {_words(error)}"
        raise ProcessException(words, error_index=rank, error_pid=pid) from error.cause
    except RayError as error:
        raise ProcessException(f"{who} ended: {_words(error)}", error_index=rank, error_pid=pid) from error
    if not isinstance(found, RankResult):
        return found
    try:
        return found.unpickled(rank)
    except TypeError as error:
        raise ProcessException(f"{who}: {error}", error_index=rank, error_pid=pid) from None


def _words(error: RayError) -> str:
    """Return what Ray says, without its colours, and without its own traceback where the cause is known."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return in_words(cause) if isinstance(cause, Exception) else _COLOURS.sub("", str(error)).strip()
