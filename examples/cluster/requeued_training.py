"""A training that ends early when SIGUSR2 says that its time is up, and goes on where it was when it is started again.

    sbatch examples/cluster/slurm_requeue.sbatch examples/cluster/requeued_training.py --checkpoint runs
    meshrun -n 4 examples/cluster/requeued_training.py --checkpoint runs

Batches follow from the number of the step, so the losses are the same as in an uninterrupted run.
"""

import argparse
import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import meshdist as dist
from meshdist.checkpoint import latest, load, save

ROWS, WEIGHTS, RATE = 48, 8, 0.2


class TimeUp:
    """Whether SIGUSR2 has come."""

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGUSR2, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's rows of the inputs and targets of a step."""
    rng = np.random.default_rng((1, step))
    x = rng.normal(size=(ROWS, WEIGHTS))
    y = x @ np.arange(WEIGHTS) + rng.normal(size=ROWS)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return x[mine], y[mine]


def train(folder: Path, num_steps: int, save_every: int, time_up: TimeUp) -> int:
    """Train up to `num_steps`, or until the time is up; return how many steps are done."""
    state: dict[str, Any] = {"w": np.zeros(WEIGHTS), "step": 0}
    if latest(folder) is not None:  # before the first save, which all ranks take part in
        state = load(folder, state)
    w, step = state["w"], state["step"]
    while step < num_steps:
        x, y = batch(step)
        error = x @ w - y
        # The gradient, the loss, and how many ranks have had the signal: it reaches them at different times.
        sums = dist.all_reduce(np.array([*(x.T @ error), error @ error, time_up.came]))
        w -= RATE / ROWS * sums[:WEIGHTS]
        step += 1
        is_last = step == num_steps or sums[-1] > 0
        if is_last or step % save_every == 0:
            save(folder, {"w": w, "step": step}, step=step, keep=3, asynchronous=not is_last)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {sums[WEIGHTS] / ROWS:.12f}", flush=True)
        if is_last:
            break
    return step


def main() -> None:
    """Train, and print the loss at each checkpoint."""
    parser = argparse.ArgumentParser(description="Train on from the last checkpoint; end early on SIGUSR2.")
    parser.add_argument("--steps", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--checkpoint", default="runs", help="a folder that all ranks share (default: %(default)s)")
    args = parser.parse_args()
    time_up = TimeUp()
    dist.init_process_group()
    step = train(Path(args.checkpoint), args.steps, args.save_every, time_up)
    if dist.get_rank() == 0:
        print(f"{step} of {args.steps} steps are done")
        if step < args.steps and "REQUEUE_FILE" in os.environ:
            Path(os.environ["REQUEUE_FILE"]).touch()  # asks slurm_requeue.sbatch to start the job again
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
