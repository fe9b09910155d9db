"""Compare each point with all others: the blocks of points travel around a ring."""

import numpy as np

import meshdist as dist


def main() -> None:
    ring = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ring",))
    rng = np.random.default_rng(seed=ring.get_rank())
    mine = rng.random((50, 2))

    nearest = np.full(len(mine), np.inf)
    block = mine
    for step in range(ring.size()):  # after this step, each rank has seen step + 1 blocks
        apart = np.linalg.norm(mine[:, None] - block[None], axis=2)
        if step == 0:
            np.fill_diagonal(apart, np.inf)  # not the distance to itself
        nearest = np.minimum(nearest, apart.min(axis=1))
        if step < ring.size() - 1:
            block = ring.shift(block)  # to the next rank; returns the block of the one before
    closest = ring.all_reduce(np.array(nearest.min()), op="min")
    if ring.get_rank() == 0:
        print(f"the two closest of {50 * ring.size()} points are {closest:.4f} apart")


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
