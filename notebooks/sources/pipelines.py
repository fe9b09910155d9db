# %% [markdown]
# # Pipelines, drawn
#
# A model that is too large for one rank is split into stages. While the second stage works on the first micro-batch,
# the first stage works on the second one. The order of the forward and backward passes of all ranks is the *schedule*.
# This notebook draws schedules, finds what is wrong with one made by hand, and trains a network of four stages.

# %%
import numpy as np
from matplotlib import pyplot

import meshdist as dist
from meshdist.parallel import (
    PipelineCosts,
    PipelineRunner,
    PipelineStage,
    Schedule,
    ScheduleError,
    gpipe,
    interleaved,
    one_f_one_b,
    zbv,
    zero_bubble,
)

schedules = [gpipe(4, 8), one_f_one_b(4, 8), zero_bubble(4, 8)]
figure, axes = pyplot.subplots(3, 1, figsize=(10, 6), layout="constrained")
for ax, schedule in zip(axes, schedules, strict=True):
    schedule.show("plot", ax=ax)

# %% [markdown]
# A backward pass takes twice as long as a forward pass. The white areas are the *bubble*, the time in which ranks have
# nothing to do. 1F1B has the same bubble as GPipe, and keeps fewer activations. ZB-H1 splits the backward pass into two
# halves: the next rank waits for the gradient of the input only, and the gradient of the weights fills gaps.

# %%
for schedule in (*schedules, interleaved(4, 8), zbv(4, 8)):
    timeline = schedule.simulate()
    print(f"{schedule.name:16} bubble {timeline.bubble:5.1%}   activations {timeline.peak_activations}")

# %% [markdown]
# ## More micro-batches, or more stages on each rank
#
# The bubble of 1F1B is (p - 1) / (m + p - 1) for p ranks and m micro-batches. With v stages on each rank it is shorter.

# %%
counts = [4, 8, 16, 32, 64]
builders = {
    "1F1B": one_f_one_b,
    "interleaved, 2 stages": interleaved,
    "interleaved, 4 stages": lambda p, m: interleaved(p, m, 4),
    "ZB-H1": zero_bubble,
    "ZB-V": zbv,
}
figure, ax = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
for name, build in builders.items():
    ax.plot(counts, [100 * build(4, m).simulate().bubble for m in counts], marker="o", label=name)
ax.set(xlabel="micro-batches", ylabel="bubble in %", xscale="log", xticks=counts, xticklabels=counts, ylim=(0, None))
ax.legend()
pyplot.show()

# %% [markdown]
# What if a stage is slower than the others, or messages take time? `simulate` takes the costs.

# %%
even, uneven = [1.0] * 4, [1.0, 1.0, 1.0, 1.5]
for name, each in (("even", even), ("a slow last stage", uneven)):
    for message in (0.0, 0.5):
        timeline = one_f_one_b(4, 8).simulate(PipelineCosts(each, each, each, message=message))
        print(f"{name}, messages of {message}: {timeline.makespan:g}, idle {[f'{b:.0%}' for b in timeline.bubbles]}")

# %% [markdown]
# ## A schedule by hand
#
# A schedule has a row for each rank, and an action in each cell: stage, kind, micro-batch. This one looks harmless, but
# rank 1 takes the micro-batches in a different order from that in which rank 0 sends them:

# %%
try:
    Schedule(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"]).check()
except ScheduleError as error:
    print(error)

# %%
Schedule(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"], name="by hand").check()

# %% [markdown]
# ## A network of four stages
#
# A stage is any two functions, forward and backward. Four ranks with a layer each learn the sine; the losses are those
# of one process.


# %%
def layer(number):
    rng = np.random.default_rng(number)
    w = rng.normal(size=(1 if number == 0 else 16, 1 if number == 3 else 16)) * (2.0 if number == 0 else 0.4)
    b = rng.normal(size=w.shape[1])

    def forward(x):
        y = np.tanh(x @ w + b)
        return y, (x, y)

    def backward(saved, dy):
        x, y = saved
        dz = dy * (1 - y * y)
        return dz @ w.T, [x.T @ dz, dz.sum(axis=0)]

    return [w, b], PipelineStage(forward, backward)


def loss(y, target):
    return np.mean((y - target) ** 2), 2 * (y - target) / y.size


def train(schedule, steps=150):
    mesh = dist.init_device_mesh("cpu", (schedule.num_ranks,), mesh_dim_names=("pp",))
    mine = schedule.stages_of(mesh.get_rank())
    weights, stages = zip(*map(layer, mine), strict=True)
    runner = PipelineRunner(stages, schedule, mesh["pp"], loss=loss)
    x = np.linspace(-3, 3, 64).reshape(-1, 1)
    x = x[np.random.default_rng(0).permutation(64)]  # each micro-batch from all of the range
    losses = []
    for _ in range(steps):
        step = runner.step(x, 0.9 * np.sin(x))
        losses.append(np.mean(step.losses) if step.losses else None)
        for stage, arrays in zip(mine, weights, strict=True):
            for array, gradient in zip(arrays, step.gradients[stage], strict=True):
                array -= 0.1 * gradient
    return losses


alone = dist.run(train, 1, args=(Schedule(["0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0"]),))[0]
pipeline = dist.run(train, 4, args=(one_f_one_b(4, 4),))[3]
print(f"one process {alone[-1]:.6f}, four ranks {pipeline[-1]:.6f}")
assert np.allclose(alone, pipeline)

# %%
figure, ax = pyplot.subplots(figsize=(7, 2.6), layout="constrained")
ax.semilogy(alone, linewidth=5, color="#dddddd", label="one process")
ax.semilogy(pipeline, linewidth=1, label="four ranks, 1F1B")
ax.set(xlabel="step", ylabel="loss")
ax.legend()
pyplot.show()
