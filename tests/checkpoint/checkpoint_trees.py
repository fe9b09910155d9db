"""Trees to save, and random ones; programs that ranks run."""

import math

import numpy as np
from array_layouts import random_layout, random_shape
from worlds import report

import meshdist
from meshdist.checkpoint import load, per_rank, save
from meshdist.tensor import DTensor, Shard, distribute_tensor

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "uint16", "int64", "bool")
DTYPES += ("complex64", "complex128", "float8_e4m3b11fnuz")


def dtype_named(name):
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def whole_arrays(seed, count=12):
    """Return arrays of any shape and dtype, 0-d and empty ones too."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for number in range(count):
        dtype = dtype_named(DTYPES[number % len(DTYPES)])
        array = rng.integers(0, 2 if dtype.kind == "b" else 100, random_shape(rng)).astype(dtype)
        arrays[f"x{number}"] = array + dtype.type(1j) * array if dtype.kind == "c" else array
    return arrays


def mesh_of(shape):
    return meshdist.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])


def placed(arrays, mesh, seed, pending=True):
    """Return the arrays as DTensors of any layout, nested and unequal cuts and pending sums too."""
    rng = np.random.default_rng((seed, *mesh.shape))
    tree = {}
    for name, array in arrays.items():
        ops = ("sum",) if pending and array.dtype in (np.float64, np.int64) else ()
        layout = random_layout(rng, array.shape, mesh.shape, ops)
        tree[name] = distribute_tensor(array, mesh, layout.placements, src_data_rank=None)
    return tree


def tree_of(arrays, mesh, seed):
    """Return a tree of everything: arrays over a mesh, plain ones, one of each rank, small values."""
    rank = mesh.get_rank()
    return {
        "model": placed(arrays, mesh, seed),
        "plain": [arrays["x0"], (arrays["x1"], np.float32(0.5))],
        "own": per_rank(np.arange(rank + 1)),
        "epoch": 3,
        "losses": [1.5, math.inf],
        "name": "run",
    }


def save_random(directory, shape, seed, options):
    return str(save(directory, tree_of(whole_arrays(seed), mesh_of(shape), seed), **options))


def load_random(directory, shape, seed, other_seed):
    """Load onto a mesh with layouts of its own, and whole; return how what was loaded differs from what was saved."""
    arrays, mesh = whole_arrays(seed), mesh_of(shape)
    like = tree_of({name: np.zeros_like(array) for name, array in arrays.items()}, mesh, other_seed)
    del like["own"]
    found = load(directory, like, strict=False)
    wrong = [name for name in arrays if not same(found["model"][name].full(), arrays[name])]
    wrong += [name for name in arrays if found["model"][name].layout is not like["model"][name].layout]
    wrong += [str(x) for x in found["plain"][:1] if not same(x, arrays["x0"])]
    if not isinstance(found["model"]["x0"], DTensor) or type(found["plain"][1][1]) is not np.float32:
        wrong.append("kinds")
    if (found["epoch"], found["losses"], found["name"]) != (3, [1.5, math.inf], "run"):
        wrong.append("values")
    whole = load(directory)
    wrong += [f"whole {name}" for name in arrays if not same(whole["model"][name], arrays[name])]
    wrong += [f"of rank {n}" for n, array in enumerate(whole["own"]) if not same(array, np.arange(n + 1))]
    if mesh.size() <= len(whole["own"]):
        own = per_rank(np.zeros(mesh.get_rank() + 1, int))
        mine = load(directory, {"own": own}, strict=False)["own"].array
        wrong += [] if same(mine, np.arange(mesh.get_rank() + 1)) else ["own"]
    return wrong


def same(found, expected):
    return found.dtype == expected.dtype and found.shape == expected.shape and found.tobytes() == expected.tobytes()


def save_steps(directory, first, format, asynchronous=False):
    """Save one step after the other and say so once; the process is killed meanwhile."""
    mesh = mesh_of((meshdist.get_world_size(),))
    for step in range(first, first + 1000):
        w = DTensor.from_callback(
            (300, 2000), np.float32, mesh, [Shard(step % 2)], lambda index, step=step: full(index, step)
        )
        tree = {"w": w, "b": np.full(1000, step), "step": step}
        save(directory, tree, step=step, keep=3, format=format, asynchronous=asynchronous)
        if step == first:
            report(step)


def full(index, step):
    return np.full([part.stop - part.start for part in index], step, np.float32)
