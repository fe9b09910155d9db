"""One rank of the launch that mesh_start.py times: a (2, 2, n / 4) mesh with all its groups, or none.

What it measured goes into a file of the directory that it is given, named after the rank.
"""

import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import meshdist as dist


class CountingStore(dist.TCPStore):
    """Counts the requests that go over the connection."""

    requests = 0

    def _request(self, *args: Any, **kwargs: Any) -> Any:
        self.requests += 1
        return super()._request(*args, **kwargs)


def make() -> dist.DeviceMesh:
    """Make the mesh, the groups of its axes, of its planes and of all of it."""
    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (2, 2, size // 4), mesh_dim_names=("pp", "dp", "tp"))
    mesh.get_all_groups()
    for plane in (("pp", "dp"), ("pp", "tp"), ("dp", "tp"), ("pp", "dp", "tp")):
        mesh[plane].flatten().get_group()
    return mesh


def main() -> None:
    """Join, make the mesh if "mesh" is asked for, and leave."""
    what, directory = sys.argv[1:]
    begin = perf_counter()
    store = CountingStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    dist.barrier()
    joined = perf_counter()
    before = store.requests
    mesh = make() if what == "mesh" else None
    made = perf_counter()
    found = {"join": joined - begin, "mesh": made - joined, "requests": store.requests - before}
    dist.barrier()
    before, begin = store.requests, perf_counter()
    for name in ("pp", "dp", "tp") if mesh is not None else ():
        mesh[name].all_reduce(np.ones(1))
    found |= {"first calls": perf_counter() - begin, "requests of first calls": store.requests - before}
    dist.barrier()
    dist.destroy_process_group()
    (Path(directory) / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
