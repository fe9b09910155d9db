"""Average gradients over the ranks: one call for a dict of arrays."""

import numpy as np

import meshdist as dist
from meshdist import functional


def main() -> None:
    rank = dist.get_rank()
    rng = np.random.default_rng(seed=rank)  # each rank has its own data
    x = rng.standard_normal((64, 3))
    y = x @ np.array([1.0, -2.0, 0.5]) + 4.0

    params = {"weight": np.zeros(3), "bias": np.zeros(1)}  # the same on every rank
    for _ in range(100):
        error = x @ params["weight"] + params["bias"] - y
        grads = {"weight": x.T @ error / len(x), "bias": error.mean(keepdims=True)}
        grads = functional.all_reduce(grads, op="avg")
        for name, grad in grads.items():
            params[name] -= 0.1 * grad
    dist.check_replicated(params["weight"])  # raises if the ranks have drifted apart
    if rank == 0:
        print({name: param.round(2).tolist() for name, param in params.items()})


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
