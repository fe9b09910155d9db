"""A driver of Ray: trainers of Ray Train, that of the page and some whose workers fail and go on in a new world.

    python train_driver.py DIRECTORY PROGRAM

RAY_TRAIN_V2_ENABLED chooses the version of Train; the program, one of docs/ray.md, is run with version 2 alone.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from clusters_of_drivers import drive, outcome, run_page
from ray import train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig

import meshdist as dist
import meshdist.ray

if os.environ["RAY_TRAIN_V2_ENABLED"] == "1":
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
else:
    from ray.train.data_parallel_trainer import DataParallelTrainer


def train_fn(config: dict[str, Any]) -> None:
    context, checkpoint = train.get_context(), train.get_checkpoint()
    assert (dist.get_rank(), dist.get_world_size()) == (context.get_world_rank(), context.get_world_size())
    assert dist.get_node_local_rank() == context.get_local_rank()
    start = 0
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            start = int(Path(folder, "step").read_text()) + 1
    for step in range(start, 4):
        total = dist.all_reduce(np.array(dist.get_rank() + step)).item()
        if step == 2 and checkpoint is None and dist.get_rank() == 1:
            if config["how"] == "raise":
                raise ValueError("a bad batch")
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step").write_text(str(step))
            mine = Checkpoint.from_directory(folder) if dist.get_rank() == 0 else None
            train.report({"total": total, "step": step, "start": start}, checkpoint=mine)


def fit(how: str, max_failures: int) -> Any:
    with tempfile.TemporaryDirectory() as storage:
        trainer = DataParallelTrainer(
            train_fn,
            train_loop_config={"how": how},
            backend_config=meshdist.ray.MeshdistConfig(timeout=60),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=max_failures)),
        )
        metrics = trainer.fit().metrics
        return {name: metrics[name] for name in ("total", "step", "start")}


def main(program: str) -> dict[str, Any]:
    page = []
    if os.environ["RAY_TRAIN_V2_ENABLED"] == "1":
        with tempfile.TemporaryDirectory() as storage:
            page = run_page(program.replace("=storage", f"={storage!r}"))
    return {
        "page": page,
        "raise": outcome(lambda: fit("raise", 1)),
        "kill": outcome(lambda: fit("kill", 1)),
        "once too often": outcome(lambda: fit("raise", 0)),
    }


if __name__ == "__main__":
    drive(main)
