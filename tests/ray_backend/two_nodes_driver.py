"""A driver of Ray: a job on two nodes, of which one is lost.

python two_nodes_driver.py DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from clusters_of_drivers import NO_CLUSTER
from ray.cluster_utils import Cluster
from until import until

import meshdist as dist
import meshdist.ray


def place() -> tuple[str, int, int]:
    dist.barrier()
    return ray.get_runtime_context().get_node_id(), dist.get_rank(), dist.get_node_local_rank()


def reduce_forever(began: str) -> None:
    Path(began, str(dist.get_rank())).touch()
    while True:
        dist.all_reduce(np.ones(3))


def lose_a_node(cluster: Cluster, node: Any) -> dict[str, Any]:
    lost_s: list[float] = []
    with tempfile.TemporaryDirectory() as began:

        def lose() -> None:
            until(lambda: len(os.listdir(began)) == 2, "both ranks run", 60)
            lost_s.append(time.monotonic())
            cluster.remove_node(node, allow_graceful=False)

        threading.Thread(target=lose, daemon=True).start()
        try:
            meshdist.ray.run(reduce_forever, 2, args=(began,), strategy="STRICT_SPREAD")
        except dist.DistError as error:
            return {"seconds": time.monotonic() - lost_s[0], "text": str(error), "type": type(error).__name__}
    raise AssertionError("the job did not fail")


def main(cluster: Cluster, node: Any) -> dict[str, Any]:
    spread = meshdist.ray.run(place, 4, num_cpus=0.5, strategy="SPREAD")
    lost = lose_a_node(cluster, node)
    until(lambda: sum(each["Alive"] for each in ray.nodes()) == 1, "Ray counts the lost node no more", 60)
    return {
        "spread": spread,
        "lost": lost,
        "no place": str(_error(lambda: meshdist.ray.run(place, 2, strategy="STRICT_SPREAD", start_timeout=0.5))),
    }


def _error(job: Any) -> BaseException:
    try:
        job()
    except dist.DistTimeoutError as error:
        return error
    raise AssertionError("the job did not fail")


if __name__ == "__main__":
    options = {"num_cpus": 2, "object_store_memory": 100 << 20}
    head = {**options, "include_dashboard": False, "temp_dir": sys.argv[1]}
    cluster = Cluster()
    try:
        cluster.add_node(**head)
        node = cluster.add_node(**options)
        ray.init(address=cluster.address, log_to_driver=False)
    except Exception as error:
        print(error)
        sys.exit(NO_CLUSTER)
    try:
        print(json.dumps(main(cluster, node)))
    finally:
        ray.shutdown()
        cluster.shutdown()
