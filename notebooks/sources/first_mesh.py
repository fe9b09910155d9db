# %% [markdown]
# # A mesh in ten lines
#
# Four ranks, arranged two by two, average pictures of handwritten digits: the pictures are divided along one axis of
# the mesh, the columns of each picture along the other. Here the ranks are threads of this notebook, which
# `meshdist.run` starts. In a script started by `meshrun -n 4` they are processes, and the program is the
# same.
#
# Run this notebook in the folder `notebooks` of a clone of the repository: the pictures are in `examples/data`.

# %%
import numpy as np

import meshdist as dist

with np.load("../examples/data/digits.npz") as digits:  # of the clone
    fives = digits["images"][digits["labels"] == 5].astype(float)
fives.shape  # pictures of 8 by 8 pixels, from 0 (paper) to 16 (ink)

# %% [markdown]
# ## The program
#
# Every rank runs this function. `mesh["dp"]` is the rank's column of the mesh, `mesh["tp"]` its row, and a collective
# on one of them runs over these two ranks only. It works in place and returns its argument; the copies keep the
# earlier values for the pictures below.


# %%
def average():
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    pictures = np.split(fives, 2)[dp.get_local_rank()]  # the first 91 or the last 91
    halves = np.split(pictures, 2, axis=2)[tp.get_local_rank()]  # their left or their right columns
    mine = halves.mean(axis=0)
    ours = dp.all_reduce(mine.copy(), op="avg")  # the average half of all 182
    ink = tp.all_reduce(np.array([ours.sum()]))  # the ink of the whole average picture
    whole = tp.all_gather_into_tensor(np.empty((16, 4)), ours)  # left columns above, right columns below
    return {"place": mesh.get_coordinate(), "mine": mine, "ours": ours, "ink": ink, "whole": whole, "mesh": mesh}


ranks = dist.run(average, 4)
[rank["place"] for rank in ranks]

# %% [markdown]
# The mesh as rank 3 sees it. Its groups along "tp" are the rows, drawn in one colour each; its own is framed:

# %%
drawn = ranks[3]["mesh"].show("plot", axis="tp")
# %% [markdown]
# ## Along "dp": all_reduce
#
# Before, each rank holds the average of its own 91 half pictures, so the two ranks of a column differ. After
# `dp.all_reduce(..., op="avg")` both hold the average over all pictures, still for their half only. One row of pixels
# of each half:

# %%
for number, rank in enumerate(ranks):
    before, after = (np.array2string(rank[key][4], precision=2, floatmode="fixed") for key in ("mine", "ours"))
    print(f"rank {number} at {rank['place']}   before {before:26}   after {after}")

# %% [markdown]
# ## Along "tp": all_reduce
#
# Each rank can count the ink in its own half only. After `tp.all_reduce(...)`, a sum, the two ranks of a row know the
# ink of the whole picture. Both rows had the same pictures by then, so all four agree:

# %%
for number, rank in enumerate(ranks):
    print(f"rank {number} at {rank['place']}   before {rank['ours'].sum():6.2f}   after {rank['ink'][0]:6.2f}")

# %% [markdown]
# ## Along "tp": all_gather
#
# Now every rank holds both halves of the average five:


# %%
def draw(picture):
    shades = np.array(list(" .:-=+*#%@"))[(picture * 9 / 16).round().astype(int)]
    return "\n".join("".join(row) for row in shades.repeat(2, axis=1))


print(draw(np.hstack(np.split(ranks[3]["whole"], 2))))

# %% [markdown]
# Up to rounding, this is the result of one process with all pictures:

# %%
[np.allclose(np.hstack(np.split(rank["whole"], 2)), fives.mean(axis=0)) for rank in ranks]

# %% [markdown]
# In pictures: each rank's own average, the average after the all_reduce along "dp", and the result of the all_gather
# along "tp".

# %%
from matplotlib import pyplot

stages = {"mine": "its own 91 halves", "ours": 'after all_reduce along "dp"', "whole": 'after all_gather along "tp"'}
figure, rows = pyplot.subplots(3, 4, figsize=(8, 5.4), layout="constrained", gridspec_kw={"wspace": 0.1})
for (stage, title), axes in zip(stages.items(), rows, strict=True):
    for rank, ax in zip(ranks, axes, strict=True):
        picture = np.hstack(np.split(rank["whole"], 2)) if stage == "whole" else rank[stage]
        left = 4 * rank["place"][1] if stage != "whole" else 0
        ax.imshow(picture, cmap="Greys", vmin=0, vmax=16, extent=(left, left + picture.shape[1], 8, 0))
        ax.set(xlim=(0, 8), xticks=[], yticks=[])
    axes[0].set_ylabel(title, rotation=0, ha="right", va="center")
for rank, ax in zip(ranks, rows[0], strict=True):
    ax.set_title("(dp={}, tp={})".format(*rank["place"]), fontsize="medium")
