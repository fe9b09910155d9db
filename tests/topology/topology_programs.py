"""What the ranks of processes run."""

import os

import numpy as np
from worlds import worker_rank

import meshdist
from meshdist.topology import Topology


def join_in_turns(port, size):
    """Join as a rank of one of two hosts, in turns."""
    os.environ["MESHDIST_HOST_ID"] = f"host {worker_rank() % 2}"
    store = meshdist.TCPStore("127.0.0.1", port, is_master=False, timeout=30)
    meshdist.init_process_group("gloo", store=store, rank=worker_rank(), world_size=size, timeout=30)


def place():
    """Return a mesh on the topology that is found, and a sum along its last axis."""
    mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), topology="auto")
    rank = np.array([float(mesh.get_rank())])
    return mesh.mesh.tolist(), list(Topology.find().hosts.values()), mesh["tp"].all_reduce(rank).item()


def calibrate(seconds, max_bytes):
    """Return what a calibration found."""
    cost = meshdist.calibrate(seconds, max_bytes=max_bytes)
    kinds = sorted({curve.members for curve in cost.curves})
    return kinds, [curve.seconds for curve in cost.curves], cost.predict("all_reduce", max_bytes, 2)
