# %% [markdown]
# # The collectives, pictured
#
# Every picture on this page is drawn from the arrays of four ranks, before and after one call; a row is a rank. Rank 0
# begins with `[1, 2, 3, 4]`, rank 1 with `[10, 20, 30, 40]`, and so on: each rank has a decimal place and a colour, so
# each number shows the ranks that were added up, and a sum has a band of their colours. `show` runs a program on four
# threads and draws the arrays that it returns; its code is in `collective_pictures.py`, beside this notebook.

# %%
import numpy as np
from collective_pictures import RANKS, numbers, show

import meshdist as dist

# %% [markdown]
# ## From one to all: broadcast, scatter
#
# `broadcast` copies the array of one rank to all others. `scatter` splits it into blocks, one for each rank.


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
# These calls do the same as `gather` and `reduce`, but every rank gets the result.


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
# ## A part for each rank: reduce_scatter, all_to_all
#
# `reduce_scatter` adds the arrays as `all_reduce` does, but each rank gets only one part of the sum. An `all_gather` of
# these parts completes an `all_reduce`; large ones are carried out this way. `all_to_all` is a transposition: rank i
# sends its piece j to rank j, and receives its piece i.


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
# A ring: each rank sends to the next one and receives from the previous one. `isend` and `irecv` return at once, so no
# rank has to go first.


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
# On a mesh of 2 x 2 ranks, the same calls run over a row or a column. Ranks 0 and 1 are the first row, ranks 2 and 3
# the second: a sum along "tp" is over a row, and a sum along "dp" over a column.


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
# `mesh.account()` counts the bytes that a rank must send at least. A dry run does so without the other ranks:

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
