# %% [markdown]
# # A transformer on four ranks
#
# A small language model learns to write like the documentation of this project. The batch is split along "dp", the
# heads and hidden units along "tp", the layers along "pp". The losses are the same on every mesh.
#
# This notebook uses the functions of [examples/train_transformer.py](../examples/train_transformer.py), so run it in
# the folder `notebooks` of a clone of the repository.

# %%
import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # the ranks are threads already

import numpy as np
from matplotlib import pyplot

import meshdist as dist
from meshdist.parallel import autograd_stage, zero_bubble

sys.path.insert(0, "../examples")  # of the clone
import train_transformer as example
import transformer_network as networks
import transformer_tools as tools

text = tools.load_text()
print(len(text), "characters, among them:")
print(text[1000:1300].astype(np.uint8).tobytes().decode())

# %% [markdown]
# A batch has sequences of the text and, as targets, the same sequences shifted by one character. It is drawn with the
# step as the seed, so all ranks know the whole batch and take their rows.

# %%
tokens, following = tools.batch_of(text, step=1, size=2, context=32, seed=0)
for sequence in (tokens[0], following[0]):
    print(repr(sequence.astype(np.uint8).tobytes().decode()))

# %% [markdown]
# ## What a rank holds
#
# On a mesh with two ranks along "tp" and two along "pp", a rank has half of the layers, and half of the heads and
# hidden units of each. Each parameter is drawn with its name as the seed, so each rank computes its block without
# communication.

# %%
sizes = {"width": 32, "heads": 4, "layers": 4, "context": 32}


def blocks():
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
    network = networks.Network(mesh["tp"], **sizes)
    parameters = networks.parameters_of(network, mesh["pp"].get_local_rank(), 2)
    drawn = {name: networks.first_values(network, name, one, "float64") for name, one in parameters.items()}
    return mesh.get_coordinate(), {
        name: networks.block_of(network, parameters[name], whole).shape for name, whole in drawn.items()
    }


for place, shapes in dist.run(blocks, 4):
    some = [name for name in shapes if "." not in name or name.endswith((".0.qkv", ".2.qkv", ".0.out", ".2.out"))]
    print(place, f"{len(shapes)} blocks:", ", ".join(f"{name} {shapes[name]}" for name in some))

# %% [markdown]
# ## A stage
#
# A stage of the pipeline is a function of its parameters and its input. `autograd_stage` makes the backward pass,
# in two halves, since the stage before waits for the gradient of the input only.


# %%
def one_stage():
    mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    network = networks.Network(mesh["tp"], **sizes)
    parameters = networks.parameters_of(network, 1, 2)  # the second of two stages
    values = {name: networks.first_values(network, name, one, "float64") for name, one in parameters.items()}
    stage = autograd_stage(network.stage(1, 2), values)
    logits, saved = stage.forward(np.random.default_rng(0).standard_normal((64, 32)))
    loss, dy = network.loss(logits, following)
    dx, rest = stage.backward_input(saved, dy)
    gradients = stage.backward_weight(rest)
    return f"logits {logits.shape}, loss {loss:.3f}, dx {dx.shape}, gradients of {len(gradients)} parameters"


print(*dist.run(one_stage, 1))

# %% [markdown]
# ## Three meshes, one run


# %%
def train(mesh, *options):
    shape = tuple(map(int, mesh.split("x")))
    small = ["--dtype", "float64", "--width", "32", "--context", "32", "--batch", "8", "--sample", "0"]
    args = example.parser().parse_args([*small, *options])
    return dist.run(
        lambda: example.train(dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp", "pp")), args),
        int(np.prod(shape)),
    )[0]


options = {"1x1x1": [], "2x2x1": ["--zero"], "1x2x2": ["--schedule", "zero-bubble", "--sequence-parallel"]}
runs = {mesh: train(mesh, "--steps", "5", *more) for mesh, more in options.items()}

# %%
for mesh, run in runs.items():
    difference = max(np.abs(np.subtract(run["losses"], runs["1x1x1"]["losses"])))
    print(f"{mesh}: loss {run['losses'][-1]:.6f}, as on one rank: {difference < 1e-12}")

# %%
figure, ax = pyplot.subplots(figsize=(7, 2.6), layout="constrained")
for (mesh, run), width in zip(runs.items(), (9, 5, 1.5), strict=True):
    ax.plot(run["losses"], linewidth=width, label=mesh)
ax.set(xlabel="step", ylabel="loss")
ax.legend()
pyplot.show()

# %% [markdown]
# ## The pipeline
#
# On 1 x 2 x 2, two stages share the work of four micro-batches. This is the schedule that was run, drawn as if all its
# parts took equally long:

# %%
figure, ax = pyplot.subplots(figsize=(9, 1.8), layout="constrained")
zero_bubble(2, 4).show("plot", ax=ax)
pyplot.show()

# %% [markdown]
# ## What it writes
#
# After a few more steps, the model knows which letters are frequent, and how long words are. The script with its usual
# sizes and 300 steps, `meshrun -n 4 examples/train_transformer.py --mesh 2x2x1`, writes words.

# %%
run = train("1x1x1", "--steps", "60", "--sample", "60", "--lr", "1e-2")
print(f"loss {run['losses'][-1]:.2f}")
print(run["sample"])
