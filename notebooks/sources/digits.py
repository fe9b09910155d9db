# %% [markdown]
# # The same training on one rank and on four
#
# A network of two layers learns handwritten digits: on one rank, with the batch split in two (data parallel, "dp"),
# with the hidden units split in two (tensor parallel, "tp"), and with both on a mesh of 2 x 2. It is one program, and
# its loss does not depend on the mesh.
#
# The functions of the network are in [examples/digits_network.py](../examples/digits_network.py);
# [examples/train_digits.py](../examples/train_digits.py) is the same as a script. Run this notebook in the folder
# `notebooks` of a clone of the repository.

# %%
import sys

import numpy as np
from matplotlib import pyplot

import meshdist as dist

sys.path.insert(0, "../examples")  # of the clone
import digits_network as digits

images, labels = digits.load_digits(np.random.default_rng(0), "float64")
figure, axes = pyplot.subplots(1, 10, figsize=(8, 1.2), layout="constrained")
for ax, image, label in zip(axes, images, labels, strict=False):
    ax.imshow(image.reshape(8, 8), cmap="Greys")
    ax.set(title=label, xticks=[], yticks=[])

# %% [markdown]
# ## What a rank holds
#
# On the mesh of 2 x 2, the ranks of a "tp" group have the same 120 images of the batch of 240, and half of the hidden
# units each; the ranks of a "dp" group have the same weights, and other images.


# %%
def shares():
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    w1, _, w2, _ = digits.first_weights(np.random.default_rng(0), tp.get_local_rank(), tp.size())
    rows = np.split(np.arange(digits.BATCH), mesh["dp"].size())[mesh["dp"].get_local_rank()]
    return mesh.get_coordinate(), f"images {rows[0]} to {rows[-1]}", w1.shape, w2.shape


for place, rows, first, second in dist.run(shares, 4):
    print(f"rank at {place}: {rows}, w1 {first}, w2 {second}")

# %% [markdown]
# ## A step
#
# There are two calls in a step. Along "tp", the parts of the logits are summed: each rank has multiplied its half of
# the hidden units. Along "dp", the gradients are averaged, all of them in one array. Along an axis of one rank, the
# call does nothing, so the program needs no special cases.


# %%
def train(shape, steps=80):
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    rng = np.random.default_rng(0)  # the same on all ranks
    images, labels = digits.load_digits(rng, "float64")
    weights = digits.first_weights(rng, tp.get_local_rank(), tp.size())
    velocity = [np.zeros_like(weight) for weight in weights]
    rows = np.split(np.arange(digits.BATCH), dp.size())[dp.get_local_rank()]
    losses = []
    for _ in range(steps):
        batch = rng.integers(digits.TRAIN_IMAGES, size=digits.BATCH)[rows]
        loss, gradients = digits.loss_and_gradients(weights, images[batch], labels[batch], tp.all_reduce)
        flat = dp.all_reduce(np.concatenate([[loss], *(gradient.ravel() for gradient in gradients)]), op="avg")
        losses.append(flat[0])
        pieces = np.split(flat[1:], np.cumsum([weight.size for weight in weights])[:-1])
        for weight, speed, piece in zip(weights, velocity, pieces, strict=True):
            speed[:] = digits.MOMENTUM * speed + piece.reshape(speed.shape)
            weight -= digits.LEARNING_RATE * speed
    held_out = np.arange(digits.TRAIN_IMAGES, len(labels))
    guesses = digits.forward(weights, images[held_out], tp.all_reduce)[1].argmax(axis=1)
    return losses, float(np.mean(guesses == labels[held_out]))


meshes = [(1, 1), (2, 1), (1, 2), (2, 2)]
runs = {shape: dist.run(train, shape[0] * shape[1], args=(shape,)) for shape in meshes}
for (dp, tp), ranks in runs.items():
    losses, accuracy = ranks[0]
    print(f"mesh {dp} x {tp}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {accuracy:.1%} of the held out digits right")

# %% [markdown]
# The loss curves coincide, up to rounding: the sums are computed in a different order.

# %%
figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
alone = np.array(runs[1, 1][0][0])
for (dp, tp), width in zip(meshes, (7, 5, 3, 1), strict=True):
    losses = np.array(runs[dp, tp][0][0])
    left.semilogy(losses, linewidth=width, label=f"{dp} x {tp}")
    if dp * tp > 1:
        right.semilogy(np.abs(losses / alone - 1) + 1e-17, label=f"{dp} x {tp}")
left.set(xlabel="step", ylabel="loss")
left.legend(title="mesh, dp x tp")
right.set(xlabel="step", ylabel="relative difference from 1 x 1", ylim=(1e-17, 1e-10))
right.legend(title="mesh, dp x tp")
pyplot.show()
# %%
worst = max(np.abs(np.array(ranks[0][0]) / alone - 1).max() for ranks in runs.values())
assert worst < 1e-10
all(losses == ranks[0][0] for ranks in runs.values() for losses, _ in ranks)  # all ranks know the same losses

# %% [markdown]
# ## On processes
#
# Ranks that are threads share one interpreter, which limits their speed. `%%mesh` runs a cell on worker processes;
# their variables persist to the next cell. `--send` and `--get` copy variables from and to this notebook.

# %%
# %load_ext meshdist

# %%
# %%mesh -n 4 --axes dp=2,tp=2 --send train --get result
# result = train((mesh["dp"].size(), mesh["tp"].size()))
# if rank == 0:
#     print(f"{world_size} processes: loss {result[0][-1]:.4f}")

# %%
bool(np.allclose(result[0][0], alone, rtol=1e-10, atol=0))

# %%
# %mesh stop
