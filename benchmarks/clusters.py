"""Time jobs on running clusters of Dask and Ray, beside functions that Dask or Ray starts without meshdist.

python benchmarks/clusters.py
python benchmarks/clusters.py --engines dask --ranks 4 --rounds 9 --markdown benchmarks/RESULTS.md

The clusters are local ones with a worker, or a CPU of Ray, for each rank.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from sidebyside import machine, report
from sidebyside.options import names_from, positive

import meshdist as dist

METHOD = """\
Seconds from the call to the results of {ranks} ranks, which call one all_reduce, on a running cluster: the \
first call, the median of {rounds} later ones and, in brackets, the least. Bare are {ranks} functions without a world: \
tasks of Dask, and new actors of Ray. They take turns with the jobs. The loss is that of a rank that \
kills its own process: from then until the client has the error."""
DEFAULT_TIMEOUT_S = 120.0


class Engine(NamedTuple):
    """A cluster that runs."""

    job: Callable[[Callable[[], Any]], list[Any]]  # runs a function on all ranks
    bare: Callable[[], list[Any]]
    settle: Callable[[], None]  # waits until the cluster is as before


def total() -> float:
    return float(dist.all_reduce(np.array(1.0)))


def alone() -> float:
    return 1.0


def one_dies(folder: str) -> None:
    """Note when rank 1 kills its process, in a file of this machine, whose processes share the clock."""
    dist.barrier()
    if dist.get_rank() == 1:
        with open(os.path.join(folder, "died"), "w") as file:
            file.write(str(perf_counter()))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@contextmanager
def on_dask(ranks: int) -> Iterator[Engine]:
    from distributed import Client, LocalCluster, wait

    import meshdist.dask

    with (
        LocalCluster(n_workers=ranks, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(ranks, timeout=DEFAULT_TIMEOUT_S)

        def bare() -> list[Any]:
            workers = list(client.ncores())
            tasks = [client.submit(alone, workers=[worker], pure=False) for worker in workers]
            wait(tasks, timeout=DEFAULT_TIMEOUT_S)
            results: list[Any] = client.gather(tasks)
            return results

        def job(fn: Callable[[], Any]) -> list[Any]:
            return meshdist.dask.run(client, fn, ranks=ranks, start_timeout=DEFAULT_TIMEOUT_S)

        yield Engine(job, bare, lambda: client.wait_for_workers(ranks, timeout=DEFAULT_TIMEOUT_S))


@contextmanager
def on_ray(ranks: int) -> Iterator[Engine]:
    import ray

    import meshdist.ray

    actor = ray.remote(num_cpus=1)(Alone)

    def bare() -> list[Any]:
        actors = [actor.remote() for _ in range(ranks)]
        try:
            results: list[Any] = ray.get([each.call.remote() for each in actors], timeout=DEFAULT_TIMEOUT_S)
            return results
        finally:
            for each in actors:
                ray.kill(each)

    def job(fn: Callable[[], Any]) -> list[Any]:
        return meshdist.ray.run(fn, ranks, start_timeout=DEFAULT_TIMEOUT_S)

    def settle() -> None:
        end = perf_counter() + DEFAULT_TIMEOUT_S
        while ray.available_resources().get("CPU") != ranks and perf_counter() < end:
            ray.wait([ray.put(None)], timeout=0.05)

    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=ranks, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        try:
            yield Engine(job, bare, settle)
        finally:
            ray.shutdown()


class Alone:
    """An actor without a world."""

    def call(self) -> float:
        """Return what every function of the comparison returns."""
        return alone()


ENGINES: dict[str, tuple[str, Callable[[int], AbstractContextManager[Engine]]]] = {
    "dask": ("distributed", on_dask),
    "ray": ("ray", on_ray),
}


def measure(engine: Engine, ranks: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call of both kinds, the first ones first, and until a loss was reported."""
    times: dict[str, list[float]] = {"bare": [], "job": [], "loss": []}
    for _ in range(rounds + 1):
        for name, call, expected in (("bare", engine.bare, 1.0), ("job", lambda: engine.job(total), float(ranks))):
            begin = perf_counter()
            results = call()
            times[name].append(perf_counter() - begin)
            assert results == [expected] * ranks, results
            engine.settle()
    times["loss"].append(loss_s(engine))
    return times


def loss_s(engine: Engine) -> float:
    """Return how long it takes until the client knows that a process of a job is gone."""
    with tempfile.TemporaryDirectory() as folder:
        with suppress(dist.DistError):
            engine.job(partial(one_dies, folder))
        end = perf_counter()
        with open(os.path.join(folder, "died")) as file:
            return end - float(file.read())


def rows(measured: dict[str, dict[str, list[float]]], ranks: int) -> Iterator[list[str]]:
    for name, times in measured.items():
        for kind, what in (("job", f"`meshdist.{name}.run`, {ranks} ranks"), ("bare", f"bare, {ranks} functions")):
            first, *later = times[kind]
            loss = report.duration(times["loss"][0]) if kind == "job" else ""
            yield [f"{name.capitalize()}: {what}", report.duration(first), report.median_and_least(later), loss]


def main() -> int:
    parser = argparse.ArgumentParser(description="Time jobs on clusters of Dask and Ray.")
    add = parser.add_argument
    add("--engines", type=names_from(tuple(ENGINES)), default=list(ENGINES), metavar="NAME,...", help="(default: all)")
    add("--ranks", type=positive, default=4, help="(default: %(default)s)")
    add("--rounds", type=positive, default=5, help="later calls (default: %(default)s)")
    report.add_output_options(parser)
    args = parser.parse_args()
    missing = [ENGINES[name][0] for name in args.engines if find_spec(ENGINES[name][0]) is None]
    if missing:
        parser.error(f"{', '.join(missing)} is not installed: pip install 'meshdist[dask,ray]', or choose --engines")
    measured, before = {}, os.getloadavg()[0]
    for name in args.engines:
        with ENGINES[name][1](args.ranks) as engine:
            measured[name] = measure(engine, args.ranks, args.rounds)
    about = machine.describe({}) | {"load before": f"{before:.0f} processes"}
    about |= {module: import_module(module).__version__ for module, _ in map(ENGINES.__getitem__, args.engines)}
    body = METHOD.format(ranks=args.ranks, rounds=args.rounds)
    head = ["", "first call", "later calls", "until a loss is reported"]
    body += "\n\n" + report.table(head, rows(measured, args.ranks))
    report.publish(args, "Dask and Ray", about, body, measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
