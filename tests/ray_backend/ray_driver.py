"""A driver of Ray: runs each program below on the actors of one cluster, and prints what came out as JSON.

    python ray_driver.py DIRECTORY PROGRAM

The directory is for Ray's own files; a short name, since its sockets are in it. The program of docs/ray.md runs first.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import ray
from clusters_of_drivers import drive, outcome, run_page
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list, _internal_kv_put
from ray.util import collective
from ray.util.collective.collective_group.base_collective_group import BaseGroup

import meshdist
import meshdist.ray

TIMEOUT_S = 60.0
DTYPES = ("bool", "int8", "int32", "int64", "uint64", "float16", "float32", "float64", "complex128")


def array(rank: int, dtype: str = "float64") -> Any:
    return (np.arange(4) % 3 + rank + 1).astype(dtype)


@ray.remote(num_cpus=0)
class Rank:
    """An actor of some groups."""

    def pid(self) -> int:
        return os.getpid()

    def make(self, size: int, rank: int, name: str, join_timeout_s: float = 180.0) -> Any:
        meshdist.ray.register(timeout=TIMEOUT_S, join_timeout=join_timeout_s)
        return outcome(lambda: collective.init_collective_group(size, rank, "MESHDIST", name))

    def destroy(self, name: str) -> bool:
        collective.destroy_collective_group(name)
        return collective.is_group_initialized(name)

    def sum(self, name: str) -> Any:
        x = np.full(3, collective.get_group_handle(name).rank + 1.0)
        return outcome(lambda: collective.allreduce(x, name)) or x.tolist()

    def calls_of_ray(self, name: str) -> Any:
        """Compare each call of Ray with NumPy; return the names of those that are wrong."""
        rank, size = collective.get_rank(name), collective.get_collective_group_size(name)
        everyone, wrong = range(size), []

        def check(what: str, found: Any, expected: Any) -> None:
            if found.dtype != expected.dtype or not np.array_equal(found, expected):
                wrong.append(f"{what}: {found!r}, not {expected!r}")

        for dtype in DTYPES:
            x, given = array(rank, dtype), [array(each, dtype) for each in everyone]
            collective.broadcast(x, 1, name)
            check(f"broadcast of {dtype}", x, given[1])
            x, blocks = array(rank, dtype), [np.empty(4, dtype) for _ in everyone]
            collective.allgather(blocks, x, name)
            check(f"allgather of {dtype}", np.concatenate(blocks), np.concatenate(given))
            if dtype in ("bool", "complex128"):
                continue
            for op in collective.types.ReduceOp:
                total = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}[op.name].reduce(
                    given, dtype=dtype
                )
                x = array(rank, dtype)
                collective.allreduce(x, name, op)
                check(f"allreduce {op.name} of {dtype}", x, total)
                x = array(rank, dtype)
                collective.reduce(x, 2, name, op)
                check(f"reduce {op.name} of {dtype}", x, total if rank == 2 else array(rank, dtype))
                blocks, block = [array(rank + each, dtype) for each in everyone], np.empty(4, dtype)
                collective.reducescatter(block, blocks, name, op)
                check(f"reducescatter {op.name} of {dtype}", block, _reduced(op.name, rank, everyone, dtype))
        x = np.empty(4)
        if rank == 0:
            collective.send(array(7), 2, name)
        if rank == 2:
            collective.recv(x, 0, name)
            check("recv", x, array(7))
        collective.barrier(name)
        return wrong

    def calls_of_meshdist(self, name: str) -> Any:
        group = meshdist.ray.get_group(name)
        rank, size = group.rank(), group.size()
        gathered = [np.empty(4) for _ in range(size)] if rank == 1 else None
        group.gather(array(rank), gathered, 1)
        block = np.empty(4)
        group.scatter(block, [array(each) for each in range(size)] if rank == 0 else None, 0)
        received = [np.empty(4) for _ in range(size)]
        group.all_to_all(received, [array(rank + 10 * each) for each in range(size)])
        objects = [None] * size
        group.all_gather_object(objects, {"rank": rank})
        flags = np.array([1 << rank])
        collective.allreduce(flags, name, meshdist.ReduceOp.BOR)
        x = array(rank)
        group.all_reduce(x, async_op=True).wait()
        return {
            "gather": None if gathered is None else np.array(gathered).tolist(),
            "scatter": block.tolist(),
            "all_to_all": np.array(received).tolist(),
            "objects": objects,
            "bor": flags.tolist(),
            "async": x.tolist(),
        }

    def mesh(self, name: str) -> Any:
        with meshdist.ray.use_world(name):
            mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            world = meshdist.get_world_size()
        inside = meshdist.is_initialized()
        return world, inside, mesh["tp"].all_reduce(np.array([meshdist_rank(name)])).tolist()

    def refused(self, name: str) -> dict[str, Any]:
        """Make the same wrong call on all ranks; return what each says."""
        group = collective.get_group_handle(name)
        x, rank, size = np.ones(3), collective.get_rank(name), collective.get_collective_group_size(name)
        return {
            "objects": outcome(lambda: collective.allreduce(np.array([None]), name)),
            "op": outcome(lambda: collective.allreduce(x, name, "mean")),
            "bool sum": outcome(lambda: collective.allreduce(np.ones(2, bool), name)),
            "two arrays": outcome(lambda: group.allreduce([x, x])),
            "part": outcome(lambda: group.send([x], type("Options", (), {"n_elements": 2, "dst_rank": 1})())),
            "shape": outcome(lambda: collective.allgather([np.ones(2)] * size, x, name)),
            "read-only": outcome(lambda: collective.allreduce(np.broadcast_to(np.ones(1), 3), name)),
            "no group": outcome(lambda: meshdist.ray.get_group("none")),
            "still works": self.sum(name),
            "rank": rank,
        }

    def other_backend(self) -> Any:
        class Other(BaseGroup):
            backend = classmethod(lambda cls: "OTHER")
            check_backend_availability = classmethod(lambda cls: True)

        Other.__abstractmethods__ = frozenset()
        collective.register_collective_backend("OTHER", Other)
        collective.init_collective_group(1, 0, "OTHER", "other")
        return outcome(lambda: meshdist.ray.get_group("other"))

    def different_sizes(self, name: str) -> Any:
        return outcome(lambda: self.raise_it(name))

    def raise_it(self, name: str) -> None:
        collective.allreduce(np.ones(2 + collective.get_rank(name)), name)

    def environment(self) -> Any:
        return {name: value for name, value in os.environ.items() if "SECRET" in name}

    def microseconds(self, name: str, elements: int, calls: int) -> float:
        x = np.ones(elements)
        collective.allreduce(x, name)
        began = time.perf_counter()
        for _ in range(calls):
            collective.allreduce(x, name)
        return (time.perf_counter() - began) / calls * 1e6

    def end(self) -> None:
        ray.actor.exit_actor()


def _reduced(op: str, rank: int, everyone: Sequence[int], dtype: str) -> Any:
    ufunc = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}[op]
    return ufunc.reduce([array(each + rank, dtype) for each in everyone], dtype=dtype)


def meshdist_rank(name: str) -> int:
    return meshdist.ray.get_group(name).rank()


def on_all(actors: Sequence[Any], method: str, *args: Any) -> list[Any]:
    return ray.get([getattr(actor, method).remote(*args) for actor in actors], timeout=TIMEOUT_S)


def make(actors: Sequence[Any], name: str, *args: Any) -> list[Any]:
    size = len(actors)
    made = [actor.make.remote(size, rank, name, *args) for rank, actor in enumerate(actors)]
    return ray.get(made, timeout=TIMEOUT_S)


def main(program: str) -> dict[str, Any]:
    said: dict[str, Any] = {"page": run_page(program)}
    a, b, c, d = actors = [Rank.remote() for _ in range(4)]
    said["made"] = make(actors[:3], "three")
    said["entries"] = _internal_kv_list("", namespace="meshdist")
    said["calls of Ray"] = on_all(actors[:3], "calls_of_ray", "three")
    said["calls of meshdist"] = on_all(actors[:3], "calls_of_meshdist", "three")
    said["refused"] = on_all(actors[:3], "refused", "three")
    said["other backend"] = ray.get(d.other_backend.remote(), timeout=TIMEOUT_S)
    said["secrets"] = on_all(actors, "environment")

    # Declared by the driver, and made by the first call of each actor; ranks in a different order.
    collective.create_collective_group([c, d], 2, [1, 0], "MESHDIST", "declared")
    said["declared"] = on_all([c, d], "sum", "declared")
    said["both groups"] = [on_all(actors[:3], "sum", "three"), on_all([c, d], "sum", "declared")]
    on_all([c, d], "destroy", "declared")
    said["one is destroyed"] = on_all(actors[:3], "sum", "three")

    # Again under the same name; an entry that a killed rank 0 has left is no hindrance.
    key = json.dumps([ray.get_runtime_context().namespace, "again"])
    _internal_kv_put(key, json.dumps(["127.0.0.1", 9, "left over"]).encode(), overwrite=True, namespace="meshdist")
    said["again"] = []
    for _ in range(3):
        make([b, d], "again")
        assert _internal_kv_get(key, namespace="meshdist") is None
        said["again"].append(on_all([b, d], "sum", "again"))
        on_all([b, d], "destroy", "again")

    said["experimental"] = _experimental([c, d]) if find_spec("torch") else None

    make(actors, "four")
    said["mesh"] = on_all(actors, "mesh", "four")
    said["times"] = [on_all(actors[:3], "microseconds", "three", *case) for case in ((1, 500), (131072, 50))]

    # What goes wrong.
    said["differ"] = _differ(actors[2:])
    said["caught"] = _caught([a, b])
    said["missing"] = [
        ray.get(a.make.remote(2, 0, "late", 0.5), timeout=TIMEOUT_S),
        ray.get(b.make.remote(2, 1, "later", 0.5), timeout=TIMEOUT_S),
        ray.get([each.make.remote(3, rank, "two of three", 0.5) for rank, each in enumerate((a, b))]),
    ]
    pending = [actor.sum.remote("four") for actor in (a, b)]
    on_all([c], "destroy", "four")
    said["destroyed"] = ray.get(pending, timeout=TIMEOUT_S)
    said["killed"] = _killed([a, b], c)
    make([a, b], "pair")
    pending = [a.sum.remote("pair")]
    b.end.remote()
    said["ended"] = ray.get(pending, timeout=TIMEOUT_S)
    return said


def _differ(pair: Sequence[Any]) -> list[Any]:
    make(pair, "differ")
    return on_all(pair, "different_sizes", "differ")


def _experimental(pair: Sequence[Any]) -> list[Any]:
    from ray.experimental.collective import create_collective_group, destroy_collective_group

    group = create_collective_group(pair, "MESHDIST")
    sums = on_all(pair, "sum", group.name)
    destroy_collective_group(group)
    return sums


def _caught(pair: Sequence[Any]) -> bool:
    """Return whether the error of an actor is one of meshdist in the driver."""
    make(pair, "caught")
    try:
        on_all(pair, "raise_it", "caught")
    except meshdist.DistBackendError:
        return True
    return False


def _killed(others: Sequence[Any], victim: Any) -> Any:
    pid = ray.get(victim.pid.remote(), timeout=TIMEOUT_S)
    began = time.monotonic()
    pending = [actor.sum.remote("three") for actor in others]
    ray.kill(victim)
    return {"pid": pid, "errors": ray.get(pending, timeout=TIMEOUT_S), "seconds": time.monotonic() - began}


if __name__ == "__main__":
    drive(main, runtime_env={"worker_process_setup_hook": "meshdist.ray.register"})
