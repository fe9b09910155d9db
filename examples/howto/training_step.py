"""Train a two-layer network on a mesh: rows of the batch along dp, hidden units along tp."""

import numpy as np

import meshdist as dist


def main() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    rng = np.random.default_rng(seed=0)  # the same numbers on every rank
    x, target = rng.random((8, 4)), rng.random((8, 2))
    w1, w2 = rng.standard_normal((4, 6)), rng.standard_normal((6, 2))

    # This rank's part: rows of the batch, columns of w1, and the rows of w2 that belong to these columns. shard returns
    # views. The weights are changed in place, so copy them: contiguous arrays, without the whole weights behind them.
    x, target = mesh.shard(x, {"dp": 0}), mesh.shard(target, {"dp": 0})
    w1, w2 = mesh.shard(w1, {"tp": 1}).copy(), mesh.shard(w2, {"tp": 0}).copy()

    for step in range(3):
        hidden = np.maximum(x @ w1, 0)  # half of the hidden units; nothing is sent
        output = tp.all_reduce(hidden @ w2)  # the sum of the partial products
        error = output - target
        loss = dp.all_reduce(np.array(np.square(error).mean()), op="avg")

        grad_output = 2 * error / error.size
        grad_hidden = (grad_output @ w2.T) * (hidden > 0)
        grad_w1, grad_w2 = x.T @ grad_hidden, hidden.T @ grad_output
        w1 -= 0.1 * dp.all_reduce(grad_w1, op="avg")
        w2 -= 0.1 * dp.all_reduce(grad_w2, op="avg")
        if mesh.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
