"""Train on, after ranks have died, from the last checkpoint: on the same mesh, or on another.

    meshrun -n 3:4 --max-restarts 3 examples/elastic_training.py --checkpoint runs --mesh 2x2,3x1 --die-at 3,5,8
    meshrun --nnodes 1:4 --rdzv-endpoint node1:29400 examples/elastic_training.py --checkpoint /shared/runs
    python examples/elastic_training.py

In the first command a rank is killed three times. meshrun starts the ranks again, the first time without the killed
one: four ranks on a mesh of 2x2 become three on 3x1, which continue from the newest checkpoint. The second is for
several hosts, which may leave and come. Without --mesh, `meshdist.plan` proposes the shape for the number of ranks. The
losses are those of the third command, one rank that nothing happens to: batches follow from the number of the step, and
first values from a seed.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

import numpy as np

import meshdist as dist
from meshdist.checkpoint import latest, load, save
from meshdist.tensor import DTensor, Shard, distribute_tensor

ROWS, INPUTS, HIDDEN, OUTPUTS, RATE = 24, 8, 12, 2, 0.1


def first_values(mesh: dist.DeviceMesh) -> dict[str, DTensor]:
    """Return the parameters: columns of the first layer along "tp", and rows of the second."""
    rng = np.random.default_rng(0)
    w1, w2 = rng.normal(size=(INPUTS, HIDDEN)) / 3, rng.normal(size=(HIDDEN, OUTPUTS)) / 3
    cut = distribute_tensor  # every rank has the whole already: nothing is sent
    return {
        "w1": cut(w1, mesh, {"tp": Shard(1)}, src_data_rank=None),
        "w2": cut(w2, mesh, {"tp": Shard(0)}, src_data_rank=None),
    }


def batch(mesh: dist.DeviceMesh, step: int) -> tuple[DTensor, DTensor]:
    """Return inputs and targets of a step, rows along "dp": the same rows on every mesh."""
    x = np.random.default_rng((1, step)).normal(size=(ROWS, INPUTS))
    target = np.stack([np.sin(x[:, 0] + x[:, 1]), x[:, 2] * x[:, 3]], axis=1)
    rows = {"dp": Shard(0)}
    return (
        distribute_tensor(x, mesh, rows, src_data_rank=None),
        distribute_tensor(target, mesh, rows, src_data_rank=None),
    )


def train_step(mesh: dist.DeviceMesh, w: dict[str, DTensor], step: int) -> float:
    """Change the parameters by one step of gradient descent; return the loss before it."""
    x, target = batch(mesh, step)
    h = np.tanh(x @ w["w1"])
    error = (h @ w["w2"]).redistribute({"dp": Shard(0)}) - target  # the sum over "tp"
    back = (error @ w["w2"].T) * (1 - h * h)
    gradients = {"w1": x.T @ back, "w2": h.T @ error}  # sums over "dp", not yet computed
    for name, gradient in gradients.items():
        w[name] -= gradient.redistribute(w[name].placements) * (RATE / ROWS)
    return float(np.mean(error * error))


def shape_for(num_ranks: int, meshes: str) -> tuple[int, ...]:
    """Return the shape of the mesh over all ranks: the one in `meshes` that has as many, or that of the best plan."""
    shapes = [tuple(map(int, mesh.split("x"))) for mesh in meshes.split(",") if mesh]
    if shapes:
        fitting = [shape for shape in shapes if np.prod(shape) == num_ranks]
        assert fitting, f"no mesh of --mesh {meshes} has {num_ranks} ranks"
        return fitting[0]
    traffic = {
        "dp": lambda size: {"all_reduce": 8 * (INPUTS + OUTPUTS) * HIDDEN / size["tp"]},  # gradients
        "tp": lambda size: {"all_reduce": 8 * ROWS * OUTPUTS / size["dp"]},  # activations
    }
    return dist.plan(traffic, num_ranks).best.shape


def train(mesh: dist.DeviceMesh, args: argparse.Namespace) -> list[float]:
    """Train up to `args.steps` from the newest checkpoint, if there is one; return the losses of all steps."""
    folder = Path(args.checkpoint)
    found = [latest(folder) if mesh.get_rank() == 0 else None]
    mesh.broadcast_object_list(found)  # all ranks decide alike
    state = {**first_values(mesh), "losses": []}
    if found[0] is not None:
        state = load(found[0], state, group=mesh)
    losses = state.pop("losses")
    if mesh.get_rank() == 0:
        shape = "x".join(map(str, mesh.shape))
        if len(losses) < args.steps:
            print(f"mesh {shape}: trains from step {len(losses) + 1} on", flush=True)
        else:
            print(f"mesh {shape}: all {len(losses)} steps are done in {found[0]}", flush=True)
    for step in range(len(losses), args.steps):
        losses.append(train_step(mesh, state, step))
        save(folder, {**state, "losses": losses}, step=step + 1, keep=2, asynchronous=True, group=mesh)
        if mesh.get_rank() == mesh.size() - 1 and step + 1 == death_in_this_start(args):
            os.kill(os.getpid(), signal.SIGKILL)
    return losses


def death_in_this_start(args: argparse.Namespace) -> int | None:
    """Return the step after which a rank is to die; meshrun tells how often it has started the ranks again."""
    steps = [int(step) for step in args.die_at.split(",") if step]
    start = int(os.environ.get("RESTART_COUNT", "0"))
    return steps[start] if start < len(steps) else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on from the last checkpoint after ranks have died.")
    parser.add_argument("--mesh", default="", metavar="DPxTP,...", help="shapes of the mesh (default: that of a plan)")
    parser.add_argument("--steps", type=int, default=12, help="(default: %(default)s)")
    parser.add_argument("--checkpoint", metavar="DIR", help="a folder that all ranks share (default: a temporary one)")
    parser.add_argument("--die-at", default="", metavar="STEPS", help="after which steps a rank kills itself")
    args = parser.parse_args()
    dist.init_process_group()
    with tempfile.TemporaryDirectory() as temporary:
        folders = [args.checkpoint or temporary]
        dist.broadcast_object_list(folders, src=0)  # each rank has made a temporary one
        args.checkpoint = folders[0]
        shape = shape_for(dist.get_world_size(), args.mesh)
        losses = train(dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")), args)
        dist.destroy_process_group()  # the last save has ended when this returns
    if os.environ.get("RANK", "0") == "0":
        print(f"mesh {'x'.join(map(str, shape))}:", *(f"{loss:.12f}" for loss in losses))


if __name__ == "__main__":
    main()
