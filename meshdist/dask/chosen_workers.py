"""Which workers of the cluster a job runs on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from distributed import Client

from meshdist.dask.client_calls import called
from meshdist.dask.seat import Use, use_of_worker
from meshdist.errors import DistError
from meshdist.system.deadline import Deadline
from meshdist.system.plurals import counted

# How long a worker has to answer a short question.
ANSWER_S = 2.0


def checked_names(ranks: int | None, names: Iterable[str | int] | None) -> list[str | int] | None:
    """Return the argument `workers` of `run` as a list, after a check of it and of `ranks`.

    Raises:
        TypeError: One of them has the wrong type.
        ValueError: There is no rank, a worker is named twice, or more ranks than workers are named.
    """
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int)):
        raise TypeError(f"run: ranks must be an integer, got {ranks!r}")
    if ranks is not None and ranks < 1:
        raise ValueError(f"run: ranks must be at least 1, got {ranks}")
    if names is None:
        return None
    if isinstance(names, (str, bytes)):
        raise TypeError(f"run: workers must be a list of addresses or names; write workers=[{names!r}]")
    listed: list[Any] = list(names) if isinstance(names, Iterable) else [None]
    if not all(isinstance(each, (str, int)) for each in listed):
        raise TypeError(f"run: workers must be a list of addresses or names, such as [0, 1], got {names!r}")
    if not listed:
        raise ValueError("run: workers names no worker; leave it out to choose from all")
    twice = [name for name, times in Counter(listed).items() if times > 1]
    if twice:
        raise ValueError(f"run: workers has {twice[0]!r} twice, and a worker is one rank; name each once")
    if ranks is not None and ranks > len(listed):
        raise ValueError(
            f"run: {counted(ranks, 'rank')} need as many workers, one each, and workers names {len(listed)}; name"
            " more, or ask for fewer ranks"
        )
    return listed


def choose_workers(
    client: Client, ranks: int | None, names: Sequence[str | int] | None, deadline: Deadline
) -> list[str]:
    """Return the addresses of the workers to use, when there are enough and all that are named; free ones first.

    Raises:
        ValueError: Two names mean the same worker.
        DistError: There are too few up to the deadline, one that is named is missing, or the workers are threads.
    """
    while True:
        infos = known_workers(client)
        named = infos if names is None else _named(infos, names)
        unknown = [name for name in names or () if name not in named]
        found = [info["address"] for info in named.values() if info["status"] in ("running", "init")]
        if (len(found) >= (ranks or 1) and not unknown) or deadline.expired():
            break
        time.sleep(deadline.slice_s(0.1))
    waited = f" after {deadline.timeout_s:g} s" if deadline.timeout_s else ""
    if unknown:
        there = ", ".join(f"{address} (name {info['name']!r})" for address, info in infos.items())
        raise DistError(
            f"run: the cluster has no worker {', '.join(map(repr, unknown))}{waited}; it has {there or 'none'}"
        )
    if len(found) < (ranks or 1):
        raise DistError(
            f"run: {counted(ranks or 1, 'rank')} need as many workers, one each, and the cluster has {len(found)}"
            f"{' of those named' if names is not None else ''}{waited}; start more workers of one process each, ask for"
            " fewer ranks, or pass wait_for_workers="
        )
    if any(address.startswith("inproc://") for address in found):
        raise DistError(
            "run: the workers of this cluster are threads of the client, and a rank is a process; make it with"
            " LocalCluster(processes=True), or use meshdist.run for ranks that are threads"
        )
    return sorted(found if ranks in (None, len(found)) else _free_first(client, found)[:ranks])


def _free_first(client: Client, workers: Sequence[str]) -> list[str]:
    answers = ask_workers(client, workers, ANSWER_S, use_of_worker)
    # A worker that is gone, or cannot import meshdist, is reported when its seat is reserved.
    uses = {worker: answer if isinstance(answer, Use) else Use.FREE for worker, answer in answers.items()}
    return sorted(workers, key=lambda worker: (uses.get(worker, Use.BEING_ENDED), worker))


def _named(infos: dict[str, Any], names: Sequence[str | int]) -> dict[Any, Any]:
    """Return the workers of these addresses or names, by them."""
    found = {}
    by_address: dict[str, str | int] = {}
    for name in names:
        for address, info in infos.items():
            # Dask's own names are numbers, which a user may give as text.
            if name not in (address, info["name"]) and str(name) != str(info["name"]):
                continue
            if address in by_address:
                raise ValueError(f"run: {by_address[address]!r} and {name!r} of workers are the same one; name it once")
            by_address[address] = name
            found[name] = info
    return found


def known_workers(client: Client) -> dict[str, Any]:
    """Return what the scheduler knows of its workers, by address."""
    # Client.scheduler_info may have none of them, since the client updates it in between.
    identity: Any = called(client, lambda: client.scheduler.identity())
    return {address: {**info, "address": address} for address, info in identity["workers"].items()}


def ask_workers(
    client: Client, workers: Iterable[str], timeout_s: float, function: Callable[..., Any], *args: Any
) -> dict[str, Any]:
    """Call a function on workers; return what it has returned or raised, by worker.

    A worker that does not answer in time is left out: code that holds the GIL may block its event loop.
    """

    async def ask(worker: str) -> dict[str, Any]:
        running: Any = client.run(function, *args, workers=[worker], on_error="return")  # awaitable in the event loop
        try:
            answers: dict[str, Any] = await asyncio.wait_for(running, timeout_s)
        except asyncio.TimeoutError:  # TimeoutError itself since Python 3.11
            return {}
        return answers

    async def ask_all() -> list[dict[str, Any]]:
        return await asyncio.gather(*map(ask, workers))

    answers: list[dict[str, Any]] = called(client, ask_all)
    return {worker: answer for each in answers for worker, answer in each.items()}
