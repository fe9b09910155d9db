# %% [markdown]
# # Choosing a mesh for a cluster
#
# How should 64 ranks be arranged: 64 x 1, 16 x 4, 8 x 8? It depends on the traffic of each axis and on the links
# between the ranks. A `Topology` describes the machine, a `CostModel` predicts the time of collectives on it, and
# `plan` tries all shapes. This needs neither a cluster nor ranks.

# %%
import numpy as np
from matplotlib import pyplot

import meshdist as dist
from meshdist.topology import Link

# %% [markdown]
# ## The machine
#
# Hosts of eight GPUs: 200 GB/s from each to the switch in its host, 50 GB/s from each host to the network. Real
# numbers come from a file, from `Topology.find()` in a running job, or from ten seconds of measurement
# (`meshdist.calibrate`).

# %%
links = {"gpu_link": Link(latency_s=2e-6, bandwidth=200e9), "network": Link(latency_s=8e-6, bandwidth=50e9)}


def cluster(ranks):
    return dist.Topology.uniform(-(-ranks // 8), min(ranks, 8), gpus=min(ranks, 8), **links)


print(cluster(32))
ax = cluster(16).draw()

# %% [markdown]
# ## Where a mesh lies on it
#
# The last axis of a mesh is kept inside hosts, where links are fast. So the axis with the most traffic goes last.

# %%
with dist.dry_run(world_size=16, rank=5, ranks_per_host=8):
    mesh = dist.init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
    ax = mesh.show("plot")

# %% [markdown]
# ## How long a collective takes
#
# For small arrays the latency of each round matters, for large ones the bandwidth of the slowest link: inside a host,
# an all_reduce takes a quarter of the time that it takes between hosts. An all_reduce over all 64 ranks takes hardly
# longer than one over one rank of each host, since it first sums inside the hosts.

# %%
cost = dist.CostModel(cluster(64))
sizes = 2.0 ** np.arange(10, 31)
groups = {"8 ranks of a host": range(8), "one of each of 8 hosts": range(0, 64, 8), "all 64": range(64)}
figure, ax = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
for name, group in groups.items():
    ax.loglog(sizes, [cost.predict("all_reduce", size, group) for size in sizes], label=name)
ax.set(xlabel="bytes of an all_reduce", ylabel="seconds, predicted", title="64 ranks on 8 hosts")
ax.legend()
pyplot.show()

# %% [markdown]
# ## The best shape
#
# A model of 14e9 parameters in 16-bit numbers, and batches of a fixed size. Along "dp" the gradients are summed once a
# step: as many bytes as a rank has parameters, so fewer with a larger "tp". Along "tp" the activations are summed four
# times in each of 32 layers, and there are fewer of them with a larger "dp".

# %%
parameters, layers, activations = 2 * 14e9, 32, 1e9


def gradients(size):
    return {"all_reduce": parameters / size["tp"]}


def blocks(size):
    return {"all_reduce": (activations / size["dp"], 4 * layers)}


volumes = {"dp": gradients, "tp": blocks}
plan = dist.plan(volumes, cluster(64))
print(plan)

# %%
figure, ax = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
places = sorted(plan, key=lambda candidate: candidate.shape[1])
names = ["{} x {}".format(*candidate.shape) for candidate in places]
along_dp = [candidate.axis_seconds["dp"] for candidate in places]
ax.bar(names, along_dp, label='along "dp": gradients')
ax.bar(names, [candidate.axis_seconds["tp"] for candidate in places], bottom=along_dp, label='along "tp": activations')
ax.set(xlabel="mesh, dp x tp", ylabel="seconds a step, predicted", title="64 ranks on 8 hosts")
ax.legend()
pyplot.show()

# %% [markdown]
# A larger "tp" reduces the gradients of each rank. As long as "tp" fits into a host, that hardly helps, as all eight
# GPUs of a host share one network link. Beyond a host, "tp" itself goes over the network. So at this size most shapes
# are about equally good; avoid the last ones.
#
# ## From 8 to 8,192 ranks
#
# The same for clusters of all sizes: the best shape and its time, and the times of two simple rules.

# %%
worlds = [8 * 2**k for k in range(11)]
plans = {ranks: dist.plan(volumes, cluster(ranks)) for ranks in worlds}
for ranks, found in plans.items():
    dp, tp = found.best.shape
    print(f"{ranks:5} ranks: {dp:4} x {tp:<3} {found.best.seconds:6.2f} s a step in communication")


# %%
def seconds(ranks, tp):
    return next(candidate.seconds for candidate in plans[ranks] if candidate.shape[1] == tp)


figure, ax = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
ax.loglog(worlds, [seconds(ranks, 1) for ranks in worlds], "--", label="data parallel alone, tp=1")
ax.loglog(worlds, [seconds(ranks, 8) for ranks in worlds], "-.", label="tp=8: a host")
ax.loglog(worlds, [found.best.seconds for found in plans.values()], "k", marker=".", label="the best shape")
ax.set_xscale("log", base=2)
ax.set_xticks(worlds, worlds, rotation=45)
ax.set(xlabel="ranks", ylabel="seconds a step, predicted")
ax.legend()
pyplot.show()

# %% [markdown]
# On one host, data parallel training is best, as gradients are summed quickly. From two hosts on, gradients go over
# the network, and more ranks are no faster until each rank has few activations: from 128 ranks on, "tp" groups that
# span several hosts are best. Neither of the simple rules finds that.
#
# The predictions are of communication alone, one call after the other, without arithmetic or overlap.
# `meshdist.profile` measures a running job.
#
# Use the chosen shape in a script:
#
# ```
# mesh = dist.init_device_mesh("cpu", plan.best.shape, mesh_dim_names=("dp", "tp"), topology="auto")
# ```
