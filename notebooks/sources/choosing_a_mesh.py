# %% [markdown]
# # Choosing a mesh for a cluster
#
# How should 64 ranks be arranged: 64 x 1, 16 x 4, 8 x 8? It depends on what the axes carry and on the ways between the
# ranks. A `Topology` describes the machine, a `CostModel` predicts what a collective takes on it, and `plan` tries all
# shapes. None of it needs a cluster, or ranks.

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
# The last axis of a mesh is kept inside hosts, where ways are short. So the axis that talks most goes last.

# %%
with dist.dry_run(world_size=16, rank=5, ranks_per_host=8):
    mesh = dist.init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
    ax = mesh.show("plot")

# %% [markdown]
# ## What a collective takes
#
# For small arrays it is the latency of each round that counts, for large ones the bandwidth of the slowest link:
# inside of a host, an all_reduce takes a quarter of the time that it takes between hosts. That of all 64 ranks takes
# hardly longer than that of one rank of each host: it sums inside of the hosts first.

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
# A larger "tp" makes the gradients of a rank fewer, but as long as it fits into a host that hardly helps: all eight
# GPUs of a host send theirs through one network link. Beyond a host, "tp" itself goes over the network. So at this
# size most shapes are about as good, and the last ones are to be avoided.
#
# ## From 8 to 8,192 ranks
#
# The same for clusters of all sizes: the best shape, what it takes, and what simple rules would take.

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
# On one host, data parallel training is best, and the gradients are summed quickly. From two hosts on they go over the
# network, and more ranks do not make it faster, until there are so many that the activations of a rank are few: from
# 128 ranks on, groups of "tp" that reach over several hosts pay. Neither of the simple rules finds that.
#
# What is predicted is communication alone, one call after the other; arithmetic, and what overlaps with it, are not in
# these numbers. On a running job, `meshdist.profile` shows what is.
#
# The shape that was chosen is a line of a script:
#
# ```
# mesh = dist.init_device_mesh("cpu", plan.best.shape, mesh_dim_names=("dp", "tp"), topology="auto")
# ```
