"""GradientReducer beside one all_reduce of a flat array, and beside torch's DDP over Gloo; and what its hooks lose.

    OMP_NUM_THREADS=1 meshrun -n 2 benchmarks/data_parallel.py --markdown benchmarks/RESULTS.md

The libraries take turns in the same processes. Without torch, its columns are empty.
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
from sidebyside import machine, report
from sidebyside.libraries import installed
from sidebyside.options import positive
from sidebyside.turns import Calls, join_torch, leave_torch, turns_of_meshdist

import meshdist as dist
from meshdist.parallel import GradientReducer
from meshdist.parallel import communication_hooks as hooks

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from digits_network import BATCH, LEARNING_RATE, TRAIN_IMAGES, first_weights, load_digits, loss_and_gradients

SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
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


def times(options: argparse.Namespace, has_torch: bool) -> dict[int, dict[str, list[float]]]:
    """Return the microseconds of each turn by size and column."""
    timed = turns_of_meshdist(warm_up=45, most_times=500)
    found = {}
    for nbytes in SIZES:
        if nbytes > options.most_bytes:
            continue
        calls = of_meshdist(options.parameters, nbytes) | (of_torch(options.parameters, nbytes) if has_torch else {})
        rounds = timed.rounds(calls, options.turns)
        if has_torch:
            pairs = zip(rounds["DDP"], rounds.pop("DDP without communication"), strict=True)
            rounds["DDP"] = [synced - alone for synced, alone in pairs]
        found[nbytes] = rounds
    return found


def row(nbytes: int, rounds: dict[str, list[float]]) -> list[str]:
    """Return the cells of one size."""
    cells = [report.duration(median(rounds[name]) / 1e6) if name in rounds else "" for name in COLUMNS]
    for name in ("flat", "DDP"):
        pairs = zip(rounds.get(name, ()), rounds["reducer"], strict=name in rounds)
        ratios = [other / mine for other, mine in pairs]
        cells.append(f"{median(ratios):.2f}" if ratios else "")
    return [report.size(nbytes), *cells]


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


METHOD = """\
The time of a step's communication on {ranks} ranks for {parameters} parameters of equal sizes, on the slowest rank: \
the median of {turns} turns; a ratio is the median of the ratios within a turn, above 1 GradientReducer is faster. \
"flat" is one all_reduce of as many float32. The gradients of GradientReducer are in its buckets already, as those \
of the flat array are. For DDP over Gloo (`gradient_as_bucket_view=True`) it is the time of a backward pass less \
that of one inside `no_sync()`, for a loss that takes little time."""
HOOKS_METHOD = """\
A training of `examples/train_digits.py` for {steps} steps in float32 by each hook: the bytes that a rank sends at \
least for the gradients of a step, the error of the average relative to its norm in the first step, and the loss at \
the end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=positive, default=21, help="how often the libraries take turns")
    parser.add_argument("--parameters", type=positive, default=16, help="number of parameters, of equal sizes")
    parser.add_argument("--most-bytes", type=positive, default=max(SIZES))
    parser.add_argument("--steps", type=positive, default=300, help="steps of training by each hook")
    report.add_output_options(parser)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    has_torch = join_torch()
    found = times(options, has_torch)
    by_hook = {name: trained(make_hook(), options.steps) for name, make_hook in HOOKS.items()}
    ranks = dist.get_world_size()
    if dist.get_rank() == 0:
        head = ["gradients", "flat", "GradientReducer", "DDP (gloo)", "flat / reducer", "DDP / reducer"]
        body = METHOD.format(ranks=ranks, **vars(options))
        body += "\n\n" + report.table(head, [row(*each) for each in found.items()])
        body += "\n\n" + HOOKS_METHOD.format(**vars(options))
        rows = [[name, str(sent), f"{error:.1e}", f"{loss:.4f}"] for name, (sent, error, loss) in by_hook.items()]
        body += "\n\n" + report.table(["hook", "bytes sent", "error", "loss"], rows)
        described = machine.describe(installed(["meshdist", *(["torch"] if has_torch else [])]))
        results = {"microseconds": found, "hooks": by_hook}
        report.publish(
            options, f"Data parallel, {ranks} ranks", described, body, results, ["meshrun", "-n", str(ranks)]
        )
    if has_torch:
        leave_torch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
