"""A driver of Ray: runs jobs by `meshdist.ray.run` on one cluster.

    python job_driver.py DIRECTORY PROGRAM

The program is one of docs/ray.md.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
from clusters_of_drivers import drive, outcome, run_page
from ray.experimental.internal_kv import _internal_kv_list
from ray.util.placement_group import placement_group_table
from until import until

import meshdist as dist
import meshdist.ray
from meshdist.ray.rank_task import Raised


def where(offset: int, times: int = 1) -> dict[str, Any]:
    total = dist.all_reduce(np.array(dist.get_rank() + offset)).item() * times
    return {
        "rank": dist.get_rank(),
        "total": total,
        "local rank": dist.get_node_local_rank(),
        "pid": os.getpid(),
        "secrets": [name for name in os.environ if "MESHDIST_SECRET" in name],
    }


class OddError(Exception):
    """An exception that can be pickled, and not unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def raise_on_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("weights")
    dist.barrier()


def return_a_lock_on_1() -> Any:
    return threading.Lock() if dist.get_rank() == 1 else None


def kill_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_ctrl_c(began: str) -> None:
    Path(began, str(dist.get_rank())).touch()
    if dist.get_rank() == 0:
        dist.barrier()
    threading.Event().wait(60)


def where_and_collectives(offset: int, times: int = 1) -> dict[str, Any]:
    """Say where the rank is, and then make a group of Ray's."""
    return {**where(offset, times), "collectives": collectives()}


def collectives() -> list[float]:
    """Make a group of Ray's among the ranks of a job; return their sum, and that of the world in it."""
    from ray.util import collective  # after meshdist.ray

    collective.init_collective_group(2, dist.get_rank(), backend="MESHDIST", group_name="data")
    x = np.full(2, collective.get_rank("data") + 1.0)
    collective.allreduce(x, "data")
    with meshdist.ray.use_world("data"):
        same = dist.all_reduce(np.array(1.0)).item()
    return [*x.tolist(), same]


def only_here() -> Any:
    """Return a function of a module that the ranks cannot import."""
    module: Any = types.ModuleType("only_here")
    exec("def fn():\n    return 1", module.__dict__)
    sys.modules[module.__name__] = module
    return module.fn


def failure(job: Callable[[], Any]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        job()
    except dist.DistError as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "rank": getattr(error, "error_index", None),
            "cause": repr(error.__cause__),
            "seconds": time.monotonic() - began,
        }
    raise AssertionError("the job did not fail")


def ctrl_c() -> str:
    """Send Ctrl-C to this process when both ranks run; return what came of it."""
    with tempfile.TemporaryDirectory() as began:

        def send() -> None:
            until(lambda: len(os.listdir(began)) == 2, "both ranks run", 60)
            os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of shells ignore it
        threading.Thread(target=send, daemon=True).start()
        try:
            meshdist.ray.run(wait_for_ctrl_c, 2, args=(began,))
        except KeyboardInterrupt:
            return "interrupted"
    return "not interrupted"


def told_while_waiting() -> list[str]:
    """Return what is logged while a job waits for places that the cluster does not have."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshdist").addHandler(handler)
    try:
        failure(lambda: meshdist.ray.run(where, 2, strategy="STRICT_SPREAD", start_timeout=9))
    finally:
        logging.getLogger("meshdist").removeHandler(handler)
    return told


def wrong_calls() -> dict[str, Any]:
    run = meshdist.ray.run
    return {
        "fn": outcome(lambda: run(3, 2)),
        "ranks": outcome(lambda: run(kill_1, 0)),
        "half a rank": outcome(lambda: run(kill_1, 1.5)),
        "args": outcome(lambda: run(kill_1, 1, args=1)),
        "strategy": outcome(lambda: run(kill_1, 1, strategy="NEAR")),
        "resources": outcome(lambda: run(kill_1, 1, resources={"GPU": 1})),
        "amount": outcome(lambda: run(kill_1, 1, num_cpus=-1)),
        "nothing": outcome(lambda: run(kill_1, 1, num_cpus=0)),
        "timeout": outcome(lambda: run(kill_1, 1, timeout=-1)),
        "lock": outcome(lambda: run(kill_1, 1, args=(threading.Lock(),))),
    }


def left() -> dict[str, Any]:
    """Return what is left of the jobs in the cluster, when Ray has removed what it was told to."""

    def groups() -> set[str]:
        return {group["state"] for group in placement_group_table().values()}

    until(lambda: groups() == {"REMOVED"}, "Ray removes the placement groups", 30)
    until(lambda: ray.available_resources().get("CPU") == 4, "Ray ends the ranks", 30)
    return {"entries": _internal_kv_list("", namespace="meshdist")}


def main(program: str) -> dict[str, Any]:
    said: dict[str, Any] = {"page": run_page(program)}
    said["too fast"] = failure(lambda: meshdist.ray.run(where, 4, start_timeout=0.01))
    # Ray keeps the processes: the second job finds no group of the first.
    for _ in range(2):
        said["job"] = meshdist.ray.run(where_and_collectives, 2, args=(1,), kwargs={"times": 2}, num_cpus=0.5)
    said["raised"] = failure(lambda: meshdist.ray.run(raise_on_1, 2))
    said["odd"] = repr(Raised(0.0, False, "", ray.cloudpickle.dumps(OddError(1, 2))).cause())
    said["not there"] = failure(lambda: meshdist.ray.run(only_here(), 2))
    said["no result"] = failure(lambda: meshdist.ray.run(return_a_lock_on_1, 2))
    said["killed"] = failure(lambda: meshdist.ray.run(kill_1, 2))
    said["no place"] = failure(lambda: meshdist.ray.run(where, 5, start_timeout=0.5))
    said["no gpu"] = failure(lambda: meshdist.ray.run(where, 2, num_gpus=1, start_timeout=0.5))
    said["told"] = told_while_waiting()
    said["ctrl-c"] = ctrl_c()
    said["wrong"] = wrong_calls()
    said["left"] = left()
    return said


if __name__ == "__main__":
    drive(main)
