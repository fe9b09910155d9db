"""Draws docs/images/profile.svg, what four ranks were at in two steps of examples/nbody_ring.py.

meshrun --nproc-per-node 4 docs/draw_profile.py
"""

import sys
from pathlib import Path

import numpy as np

import meshdist as dist

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "examples"))

from nbody_ring import pull_by_all  # noqa: E402

ring = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("ring",))
bodies = np.random.default_rng(ring.get_rank()).standard_normal((150, 4))
pull_by_all(ring, bodies, [])  # a group connects at its first call
ring.barrier()
with dist.profile() as p:
    for _ in range(2):
        pull_by_all(ring, bodies, [])
        ring.barrier()
timeline = p.merged()
if timeline is not None:
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "meshdist", "svg.fonttype": "path"})
    timeline.plot().figure.savefig(DOCS / "images" / "profile.svg", metadata={"Date": None})
dist.destroy_process_group()
