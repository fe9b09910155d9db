"""GradientReducer beside one all_reduce of a flat array, and beside torch's DDP over Gloo; and what its hooks lose.

    meshrun -n 2 benchmarks/data_parallel.py

The first table is the time of a step's communication, for parameters of equal sizes. The gradients of GradientReducer
are in its buckets already, as those of the flat array are. For DDP (`gradient_as_bucket_view=True`) it is the time of a
backward pass less that of one inside `no_sync()`, for a loss that takes little time. The libraries take turns in the
same processes; the time of a call is that of the slowest rank. The table has the median of the turns, in microseconds,
and the median of the ratios within a turn. Without torch, its column is empty.

The second table is a training of examples/train_digits.py for some steps by each hook: the bytes that a rank sends at
least for the gradients of a step, the error of the average, relative to its norm, in the first step, and the loss.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from sidebyside.options import positive
from sidebyside.turns import Calls, join_torch, leave_torch, turns_of_meshdist

import meshdist as dist
from meshdist.parallel import GradientReducer
from meshdist.parallel import communication_hooks as hooks

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from digits_network import BATCH, LEARNING_RATE, TRAIN_IMAGES, first_weights, load_digits, loss_and_gradients

SIZES = {"1 MiB": 1 << 20, "4 MiB": 4 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
COLUMNS = ("flat", "reducer", "DDP")
NAMES = ("w1", "b1", "w2", "b2")
# The gradients of this network are small, so that the least compression is asked for.
HOOKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "fp16_compress": lambda: hooks.fp16_compress,
    "bf16_compress": lambda: hooks.bf16_compress,
    "quantization_pertensor": lambda: hooks.quantization_pertensor,
    "quantization_perchannel": lambda: hooks.quantization_perchannel,
    "power_sgd(rank=1)": partial(hooks.power_sgd, 1, 0, 1),
    "power_sgd(rank=2)": partial(hooks.power_sgd, 2, 0, 1),
    "power_sgd(rank=4)": partial(hooks.power_sgd, 4, 0, 1),
    "batched_power_sgd(rank=1)": partial(hooks.batched_power_sgd, 1, 0),
}


def of_meshdist(num_parameters: int, nbytes: int) -> Calls:
    """Return a step of GradientReducer, and one all_reduce of as many float32."""
    size = nbytes // 4 // num_parameters
    flat = np.ones(size * num_parameters, np.float32)
    reducer = GradientReducer({f"p{number}": np.ones(size, np.float32) for number in range(num_parameters)})
    names = list(reversed(reducer.gradients))

    def step() -> None:
        for name in names:
            reducer.ready(name)
        reducer.wait()

    return {"flat": lambda: dist.all_reduce(flat, "avg"), "reducer": step}


def of_torch(num_parameters: int, nbytes: int) -> Calls:
    """Return a backward pass of DDP, and one without communication."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    class Parameters(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            size = nbytes // 4 // num_parameters
            self.all = torch.nn.ParameterList(torch.ones(size) for _ in range(num_parameters))

        def forward(self, x: Any) -> Any:
            return sum(parameter[0] * x for parameter in self.all)

    model = DistributedDataParallel(Parameters(), gradient_as_bucket_view=True)
    x = torch.ones(())

    def synced() -> None:
        model(x).backward()

    def alone() -> None:
        with model.no_sync():
            model(x).backward()

    return {"DDP": synced, "DDP without communication": alone}


def show_times(num_parameters: int, turns: int, most_bytes: int, has_torch: bool) -> None:
    timed = turns_of_meshdist(warm_up=45, most_times=500)
    say(f"{dist.get_world_size()} ranks, {num_parameters} parameters; microseconds")
    say(f"{'':<10}" + "".join(f"{name:>10}" for name in COLUMNS) + f"{'flat/reducer':>14}{'DDP/reducer':>14}")
    for label, nbytes in SIZES.items():
        if nbytes > most_bytes:
            continue
        calls = of_meshdist(num_parameters, nbytes) | (of_torch(num_parameters, nbytes) if has_torch else {})
        rounds = timed.rounds(calls, turns)
        if has_torch:
            pairs = zip(rounds["DDP"], rounds.pop("DDP without communication"), strict=True)
            rounds["DDP"] = [synced - alone for synced, alone in pairs]
        row = "".join(f"{median(rounds[name]):>10.0f}" if name in rounds else f"{'':>10}" for name in COLUMNS)
        for name in ("flat", "DDP"):
            if name in rounds:
                pairs = zip(rounds[name], rounds["reducer"], strict=True)
                row += f"{median(other / mine for other, mine in pairs):>14.2f}"
        say(f"{label:<10}{row}")


def show_hooks(steps: int) -> None:
    say(f"\n{dist.get_world_size()} ranks, {steps} steps of train_digits.py in float32")
    say(f"{'hook':<28}{'bytes sent':>12}{'error':>10}{'loss':>10}")
    for name, make_hook in HOOKS.items():
        sent, error, loss = trained(make_hook(), steps)
        say(f"{name:<28}{sent:>12}{error:>10.1e}{loss:>10.4f}")


def trained(hook: Any, steps: int) -> tuple[int, float, float]:
    """Return the bytes sent in a step, the error of the average in the first, and the mean loss of the last batch."""
    rng = np.random.default_rng(0)
    images, labels = load_digits(rng, "float32")
    weights = dict(zip(NAMES, (array.astype("float32") for array in first_weights(rng, 0, 1)), strict=True))
    reducer = GradientReducer(weights, hook=hook)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    sent, error = 0, math.nan
    for step in range(steps):
        batch = np.array_split(rng.integers(TRAIN_IMAGES, size=BATCH), dist.get_world_size())[dist.get_rank()]
        loss, found = loss_and_gradients(list(weights.values()), images[batch], labels[batch], lambda partial: partial)
        gradients = dict(zip(NAMES, found, strict=True))
        with mesh.account() as account:
            for name in reversed(NAMES):
                reducer.ready(name, gradients[name])
            reducer.wait()
        if step == 0:
            sent = account.total().inside + account.total().between
            due = [dist.all_reduce(gradients[name], "avg") for name in NAMES]
            error = distance([reducer.gradients[name] for name in NAMES], due) / distance(due, [0] * len(due))
        for name in NAMES:
            weights[name] -= LEARNING_RATE * reducer.gradients[name]
    return sent, error, float(dist.all_reduce(np.array([loss]), "avg")[0])


def distance(some: list[Any], others: list[Any]) -> float:
    return math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in zip(some, others, strict=True)))


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=positive, default=21, help="how often the libraries take turns")
    parser.add_argument("--parameters", type=positive, default=16, help="number of parameters, of equal sizes")
    parser.add_argument("--most-bytes", type=positive, default=max(SIZES.values()))
    parser.add_argument("--steps", type=positive, default=300, help="steps of training by each hook")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    has_torch = join_torch()
    show_times(options.parameters, options.turns, options.most_bytes, has_torch)
    show_hooks(options.steps)
    if has_torch:
        leave_torch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
