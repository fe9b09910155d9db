"""Simulate gravitating bodies with a ring pipeline: blocks of bodies travel while forces are computed.

    meshrun -n 4 examples/nbody_ring.py --bodies 400

Every rank has one block of bodies. The force on them depends on all other bodies, but not at the same time. In each of
world_size steps, a rank sends its current block to the next rank, receives another from the previous rank, and computes
with the current block meanwhile. So a rank holds three blocks at a time, and communication overlaps computation.
"""

import argparse
from collections.abc import Callable
from time import perf_counter

import numpy as np

import meshdist as dist

Array = np.ndarray
SOFTENING = 0.05  # keeps the force finite where two bodies meet


def pull(on: Array, by: Array) -> Array:
    """Return the acceleration of bodies `on` by the bodies `by`: (len(on), 3) from rows of x, y, z and mass."""
    away = by[None, :, :3] - on[:, None, :3]
    weights = by[:, 3] * (np.square(away).sum(axis=2) + SOFTENING**2) ** -1.5
    return np.einsum("ij,ijk->ik", weights, away)


def pull_by_all(ring: dist.DeviceMesh, mine: Array, waits: list[float]) -> Array:
    """Return the acceleration of this rank's bodies by those of all ranks.

    Args:
        ring: A mesh of one axis; blocks go from each rank to the next, from the last one to the first.
        mine: This rank's bodies.
        waits: Gets the seconds that were spent waiting for blocks.
    """
    size, me = ring.size(), ring.get_local_rank()
    here, coming = mine.copy(), np.empty_like(mine)
    acceleration = np.zeros((len(mine), 3))
    for step in range(size):
        works = []
        if step < size - 1:
            works = [ring.irecv(coming, src=(me - 1) % size), ring.isend(here, dst=(me + 1) % size)]
        acceleration += pull(mine, here)
        began = perf_counter()
        for work in works:
            work.wait()
        waits.append(perf_counter() - began)
        here, coming = coming, here
    return acceleration


def energy(bodies: Array, velocities: Array) -> float:
    """Return the kinetic and potential energy of all bodies."""
    apart = bodies[:, None, :3] - bodies[None, :, :3]
    near = (np.square(apart).sum(axis=2) + SOFTENING**2) ** -0.5
    np.fill_diagonal(near, 0.0)
    return float(bodies[:, 3] @ (np.square(velocities).sum(axis=1) - near @ bodies[:, 3]) / 2)


def leapfrog(bodies: Array, velocities: Array, steps: int, dt: float, accelerate: Callable[[Array], Array]) -> None:
    """Move the bodies, and change their velocities, in place."""
    velocities += dt / 2 * accelerate(bodies)
    for step in range(1, steps + 1):
        bodies[:, :3] += dt * velocities
        velocities += (dt if step < steps else dt / 2) * accelerate(bodies)


def main() -> None:
    parser = argparse.ArgumentParser(description="Move bodies that attract each other.")
    parser.add_argument("--bodies", type=int, default=240, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="(default: %(default)s)")
    args = parser.parse_args()

    dist.init_process_group()
    ring = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ring",))
    size, me = ring.size(), ring.get_local_rank()
    if args.bodies % size:
        raise ValueError(f"--bodies must be a multiple of the number of ranks, {size}, got {args.bodies}")
    rng = np.random.default_rng(seed=0)  # the same on every rank
    whole = np.column_stack([rng.standard_normal((args.bodies, 3)), np.full(args.bodies, 1 / args.bodies)])
    velocities = 0.3 * np.cross(whole[:, :3], [0.0, 0.0, 1.0])  # around the middle
    first = energy(whole, velocities)
    mine, mine_velocities = np.split(whole, size)[me].copy(), np.split(velocities, size)[me].copy()

    waits: list[float] = []
    ring.barrier()
    began = perf_counter()
    leapfrog(mine, mine_velocities, args.steps, 0.01, lambda bodies: pull_by_all(ring, bodies, waits))
    seconds = perf_counter() - began

    moved = ring.all_gather_into_tensor(np.empty_like(whole), mine)
    moved_velocities = ring.all_gather_into_tensor(np.empty_like(velocities), mine_velocities)
    share = ring.all_reduce(np.array(sum(waits) / seconds), op="avg").item()
    leapfrog(whole, velocities, args.steps, 0.01, lambda bodies: pull(bodies, bodies))
    worst = float(np.abs(moved - whole).max())
    if me == 0:
        print(f"{args.bodies} bodies, {args.steps} steps, a ring of {size}: {args.steps / seconds:.1f} steps/s")
        print(f"{share:.0%} of the time waiting for blocks; {len(mine)} bodies a block, three blocks a rank")
        print(f"energy {first:.6f} before, {energy(moved, moved_velocities):.6f} after")
        print(f"largest difference from one process: {worst:.1e}")
    dist.destroy_process_group()
    if worst > 1e-10:
        raise SystemExit("the bodies are in the wrong places")


if __name__ == "__main__":
    main()
