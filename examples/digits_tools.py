"""Helpers of train_digits.py: the GPU, the timer, the progress display, the plot."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import meshdist as dist


def array_module(device: str) -> Any:
    """Return the array library of the training: NumPy, or for "cuda" CuPy with this rank's GPU selected."""
    if device == "cpu":
        return np
    try:
        import cupy
    except ImportError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: --device cuda needs CuPy: `pip install cupy-cuda12x` ({error})")
    try:
        num_gpus = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: --device cuda needs a GPU and its driver, CuPy finds none here ({error})")
    cupy.cuda.Device(dist.get_node_local_rank(0) % num_gpus).use()
    return cupy


@contextmanager
def timed(seconds: list[float], xp: Any) -> Iterator[None]:
    """Append the time of the block; on a GPU, until all enqueued work is done."""
    finish = (lambda: None) if xp is np else xp.cuda.get_current_stream().synchronize
    finish()
    started = perf_counter()
    yield
    finish()
    seconds.append(perf_counter() - started)


def progress(steps: int, losses: list[float]) -> Iterator[int]:
    """Count the steps that have no loss yet, up to `steps`, and show the newest loss.

    As a bar on a terminal, in about five lines elsewhere.
    """
    count: Any = range(len(losses) + 1, steps + 1)
    if terminal := sys.stderr.isatty():
        from tqdm import tqdm

        count = tqdm(count, unit="step", initial=len(losses), total=steps)
    for step in count:
        yield step
        if terminal:
            count.set_postfix_str(f"loss {losses[-1]:.4f}", refresh=False)
        elif step % math.ceil(steps / 5) == 0:
            print(f"step {step} of {steps}: loss {losses[-1]:.4f}", flush=True)


def plot(run: dict[str, Any], path: str) -> None:
    from matplotlib.figure import Figure  # without pyplot: drawn by Agg, no display needed

    figure = Figure(figsize=(7, 4), layout="constrained")
    figure.add_subplot(title=f"mesh {run['mesh']}", xlabel="step", ylabel="loss", yscale="log").plot(run["losses"])
    figure.savefig(path, dpi=150)
