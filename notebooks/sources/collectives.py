# %% [markdown]
# # The collectives, pictured
#
# Every picture on this page is drawn from arrays: four ranks are run as threads, each makes one call, and what it held
# before and holds after is shown, a row for each rank. Rank 0 begins with `[1, 2, 3, 4]`, rank 1 with `[10, 20, 30,
# 40]`, and so on: each rank has a decimal place, so that a number says which ranks it is the sum of. The colours say
# the same.

# %%
import numpy as np
from matplotlib import pyplot
from matplotlib.patches import Rectangle

import meshdist as dist

RANKS = 4
COLOURS = ["#77aadd", "#ee8866", "#eedd88", "#44bb99"]


def numbers():
    """What the calling rank begins with."""
    return 10 ** dist.get_rank() * (1 + np.arange(RANKS))


def draw(ax, held, title):
    """Draw what each rank holds, a row for each, in the colours of the ranks that it comes from."""
    for row, values in enumerate(held):
        ax.text(-0.6, row, f"rank {row}", ha="right", va="center", color="#444444")
        for column, value in enumerate(values):
            origins = [rank for rank in range(RANKS) if value // 10**rank % 10]
            for number, rank in enumerate(origins):
                left, width = column - 0.45 + 0.9 * number / len(origins), 0.9 / len(origins)
                ax.add_patch(Rectangle((left, row - 0.42), width, 0.84, color=COLOURS[rank], linewidth=0))
            ax.text(column, row, str(value), ha="center", va="center", fontsize=8)
    width = max(map(len, held))
    ax.set(xlim=(-1.9, max(width, RANKS) - 0.4), ylim=(len(held) - 0.4, -0.6), aspect="equal")
    ax.set_title(title, fontsize="medium")
    ax.axis("off")


def show(name, program):
    """Run `program` on four ranks, which returns what the rank held before and what it holds after, and draw both."""
    results = dist.run(program, RANKS)
    before, after = ([np.ravel(held).tolist() for held in part] for part in zip(*results, strict=True))
    width = max(RANKS, *map(len, after))
    widths = [RANKS + 1.5, width + 1.5]
    figure = pyplot.figure(figsize=(0.6 * sum(widths), 2.3), layout="constrained")
    axes = figure.subplots(1, 2, width_ratios=widths)
    draw(axes[0], before, "before")
    draw(axes[1], after, f"after {name}")
    pyplot.show()
    return after


# %% [markdown]
# ## From one to all: broadcast, scatter
#
# `broadcast` copies the array of one rank to all others. `scatter` cuts it into pieces, and each rank gets one.


# %%
def program():
    x = numbers()
    before = x.copy()
    dist.broadcast(x, src=1)
    return before, x


after = show("broadcast(x, src=1)", program)
assert after == [[10, 20, 30, 40]] * 4


# %%
def program():
    x, piece = numbers(), np.zeros(1, int)
    dist.scatter(piece, np.split(x, RANKS) if dist.get_rank() == 1 else None, src=1)
    return x, piece


after = show("scatter(piece, pieces, src=1)", program)
assert after == [[10], [20], [30], [40]]

# %% [markdown]
# ## From all to one: gather, reduce
#
# `gather` collects the arrays of all ranks on one. `reduce` adds them up there, or combines them by another op: "max",
# "min", "product", "avg". The other ranks keep what they had.


# %%
def program():
    x = numbers()
    parts = [np.empty_like(x) for _ in range(RANKS)] if dist.get_rank() == 0 else None
    dist.gather(x, parts, dst=0)
    return x, [] if parts is None else np.concatenate(parts)


after = show("gather(x, parts, dst=0)", program)
assert after[0] == [10**rank * k for rank in range(4) for k in (1, 2, 3, 4)]


# %%
def program():
    x = numbers()
    before = x.copy()
    dist.reduce(x, dst=0)
    return before, x


after = show("reduce(x, dst=0)", program)
assert after[0] == [1111, 2222, 3333, 4444]

# %% [markdown]
# ## From all to all: all_gather, all_reduce
#
# The same, and every rank gets the result.


# %%
def program():
    x = numbers()
    return x, dist.all_gather_into_tensor(np.empty(RANKS * RANKS, int), x)


after = show("all_gather_into_tensor(out, x)", program)
assert after == [[10**rank * k for rank in range(4) for k in (1, 2, 3, 4)]] * 4


# %%
def program():
    x = numbers()
    before = x.copy()
    dist.all_reduce(x)
    return before, x


after = show("all_reduce(x)", program)
assert after == [[1111, 2222, 3333, 4444]] * 4

# %% [markdown]
# ## Each a part: reduce_scatter, all_to_all
#
# `reduce_scatter` adds up as `all_reduce` does, but each rank gets only its part of the sum: an `all_gather` of these
# parts would make an `all_reduce` of it, and that is how large ones are carried out. `all_to_all` is a transposition:
# rank i gives its piece j to rank j, and gets piece i of that one.


# %%
def program():
    x = numbers()
    return x, dist.reduce_scatter_tensor(np.empty(1, int), x)


after = show("reduce_scatter_tensor(part, x)", program)
assert after == [[1111], [2222], [3333], [4444]]


# %%
def program():
    x = numbers()
    return x, dist.all_to_all_single(np.empty_like(x), x)


after = show("all_to_all_single(out, x)", program)
assert np.array_equal(np.transpose(after), [[10**rank * k for k in (1, 2, 3, 4)] for rank in range(4)])

# %% [markdown]
# ## From one to another: send, recv
#
# A ring: everybody sends to the next rank and receives from the one before. `isend` and `irecv` begin at once, so
# nobody has to go first.


# %%
def program():
    x, rank = numbers(), dist.get_rank()
    received = np.empty_like(x)
    works = [dist.irecv(received, src=(rank - 1) % RANKS), dist.isend(x, dst=(rank + 1) % RANKS)]
    for work in works:
        work.wait()
    return x, received


after = show("isend to the next, irecv from the one before", program)
assert after == [[10 ** ((rank - 1) % 4) * k for k in (1, 2, 3, 4)] for rank in range(4)]

# %% [markdown]
# ## Along one axis of a mesh
#
# On a mesh of 2 x 2 ranks, the same calls concern a row or a column. Ranks 0 and 1 are the first row, 2 and 3 the
# second: along "tp" the rows add up, along "dp" the columns.


# %%
def along(axis):
    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = numbers()
        return x.copy(), mesh[axis].all_reduce(x)

    return program


along_tp = show('mesh["tp"].all_reduce(x)', along("tp"))
along_dp = show('mesh["dp"].all_reduce(x)', along("dp"))
assert along_tp == [[11, 22, 33, 44]] * 2 + [[1100, 2200, 3300, 4400]] * 2
assert along_dp == [[101, 202, 303, 404], [1010, 2020, 3030, 4040]] * 2

# %% [markdown]
# ## What they cost
#
# What a rank has to send, at least, for an array of n bytes on a group of four; `mesh.account()` counts it. A dry run
# does so without the other ranks:

# %%
with dist.dry_run(world_size=4, rank=1):
    mesh = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("four",))
    x, whole = np.zeros(250, np.float32), np.zeros(1000, np.float32)
    with mesh.account() as account:
        mesh.broadcast(whole, src=0)
        mesh.all_gather_into_tensor(whole, x)
        mesh.reduce_scatter_tensor(x, whole)
        mesh.all_reduce(whole)
        mesh.all_to_all_single(np.empty_like(whole), whole)
print(account)
