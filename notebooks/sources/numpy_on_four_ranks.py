# %% [markdown]
# # NumPy on four ranks
#
# `meshdist.tensor` has arrays that are distributed over a mesh: each axis of the mesh shards a dimension, repeats the
# array, or leaves a reduction pending. NumPy's functions take them. Here four worker processes, arranged two by two,
# run the cells that begin with `%%mesh`; all of them execute every line.

# %%
# %load_ext meshdist

# %%
# %%mesh -n 4 --axes dp=2,tp=2
# from matplotlib import pyplot
# from meshdist.tensor import PlacementError, Shard, distribute_tensor, map_overlap, random
#
# x = distribute_tensor(np.arange(48.0).reshape(6, 8), mesh, {"dp": Shard(0)})  # sharded by rows; replicated along tp
# if rank == 0:
#     print(x)
#     x.show("text")

# %% [markdown]
# ## Pictures of arrays
#
# `x.show("plot")` draws each block with the ranks that hold it: in the colour of its rank, or with a band of the
# colours of several. It sends nothing, so one rank may call it alone. A product of matrices whose other dimensions are
# sharded is sharded along both:

# %%
# %%mesh
# w = distribute_tensor(np.ones((8, 6)), mesh, {"tp": Shard(1)})
# y = x @ w
# if rank == 0:
#     figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
#     for array, name, ax in zip((x, w, y), ("x", "w", "x @ w"), axes):
#         array.show("plot", ax=ax)
#         ax.set_title(f"{name}  {array.placements}", fontsize="small")

# %% [markdown]
# The numbers are those of NumPy, and nothing was sent: each rank had the blocks that it needed.

# %%
# %%mesh
# with mesh.account() as account:
#     y = x @ w
# whole = y.full()
# if rank == 0:
#     print(account)
#     print("as NumPy:", np.array_equal(whole, np.arange(48.0).reshape(6, 8) @ np.ones((8, 6))))

# %% [markdown]
# ## Pending sums
#
# If the dimension over which the product sums is sharded, each rank has a part of the sum. It stays pending through
# linear operations, and one collective computes it when it is needed.

# %%
# %%mesh
# columns = x.redistribute({"tp": Shard(1)})
# z = columns @ w.redistribute({"tp": Shard(0)})
# if rank == 0:
#     print("columns @ w", z.placements)
#     print("2 * z.T    ", (2 * z.T).placements)
#     figure, axes = pyplot.subplots(1, 2, figsize=(7.5, 3.6), layout="constrained")
#     z.show("plot", ax=axes[0])
# sharded = z.redistribute({"tp": Shard(0)})  # a reduce_scatter
# if rank == 0:
#     sharded.show("plot", ax=axes[1])

# %% [markdown]
# ## Sharded arrays stay where they are
#
# Shardings that do not match are an error, not a hidden transfer of a large array. The error says what to write.

# %%
# %%mesh
# try:
#     x + distribute_tensor(np.ones((6, 8)), mesh, {"dp": Shard(1)})
# except PlacementError as error:
#     if rank == 0:
#         print(error)

# %% [markdown]
# ## A plate of four ranks
#
# `map_overlap` calls a function on each rank's block, framed by its neighbours' cells. Five lines of NumPy become a
# heat equation on four ranks, here on a torus. The numbers of `random` do not depend on the mesh.

# %%
# %%mesh
# def step(u):
#     new = u.copy()
#     new[1:-1, 1:-1] += 0.2 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1])
#     return new
#
# u = random(0).standard_normal((60, 90), mesh=mesh, placements={"dp": Shard(0), "tp": Shard(1)})
# states = [u.full(root=0)]
# for _ in range(40):
#     u = map_overlap(step, u, 1, periodic=True)
# states.append(u.full(root=0))
# if rank == 0:
#     figure, axes = pyplot.subplots(1, 3, figsize=(11, 3), layout="constrained")
#     for state, title, ax in zip(states, ("at the start", "after 40 steps"), axes):
#         ax.imshow(state, cmap="RdBu", vmin=-abs(state).max(), vmax=abs(state).max())
#         ax.set_title(title, fontsize="small")
#         ax.axis("off")
#     u.show("plot", ax=axes[2])

# %% [markdown]
# [Arrays over a mesh](../docs/tensor.md) explains the rule of operations, lists the functions that work, and has
# tables for users of torch, JAX, Heat and Dask.

# %%
# %mesh stop
