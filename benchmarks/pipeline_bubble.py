"""The bubble of pipelines as simulated and as measured, on stages that sleep and on stages that multiply matrices.

meshrun -n 4 benchmarks/pipeline_bubble.py --markdown benchmarks/RESULTS.md
OMP_NUM_THREADS=1 meshrun -n 2 benchmarks/pipeline_bubble.py --stages matmul --width 512

The simulation takes the median time of each stage and kind from the same steps, and of messages that a rank waited for.
Stages that sleep need no processors, so any number of ranks will do; for real stages there must be a core for each.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np
from sidebyside import machine, report
from sidebyside.libraries import installed
from sidebyside.options import positive

import meshdist as dist
from meshdist.parallel import (
    Action,
    PipelineCosts,
    PipelineRunner,
    PipelineStage,
    PipelineTimeline,
    Schedule,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zbv,
    zero_bubble,
)

KINDS = {"forward": "F", "backward_input": "I", "backward_weight": "W", "backward": "B"}


def sleeping(seconds: float) -> PipelineStage:
    """Return a stage whose forward pass and halves of the backward pass take equally long."""

    def forward(x: np.ndarray) -> tuple[np.ndarray, None]:
        time.sleep(seconds)
        return x, None

    def backward_input(_: None, dy: np.ndarray) -> tuple[np.ndarray, None]:
        time.sleep(seconds)
        return dy, None

    return PipelineStage(
        forward,
        backward=lambda saved, dy: (time.sleep(2 * seconds), (dy, None))[1],
        backward_input=backward_input,
        backward_weight=lambda rest: time.sleep(seconds),
    )


def multiplying(width: int) -> PipelineStage:
    """Return a linear stage."""
    w = np.eye(width)
    return PipelineStage(
        lambda x: (x @ w, x),
        backward_input=lambda x, dy: (dy @ w.T, (x, dy)),
        backward_weight=lambda rest: rest[0].T @ rest[1],
    )


def measured_costs(timelines: list[PipelineTimeline], num_stages: int) -> PipelineCosts:
    """Return the median time of each kind on each stage."""
    spans = [span for timeline in timelines for row in timeline.rows for span in row]
    costs = {}
    for name, kind in KINDS.items():
        times = [
            [span.end - span.begin for span in spans if (span.action.stage, span.action.kind) == (stage, kind)]
            for stage in range(num_stages)
        ]
        if all(times):
            costs[name] = [median(each) for each in times]
    return PipelineCosts(**costs, message=median(message_times(timelines)) if len(timelines[0].rows) > 1 else 0.0)


def message_times(timelines: list[PipelineTimeline]) -> list[float]:
    """Return the time from the end of a forward pass to the begin of the next stage's, where that rank was idle."""
    times = []
    for timeline in timelines:
        ends = {span.action: (rank, span.end) for rank, row in enumerate(timeline.rows) for span in row}
        for rank, row in enumerate(timeline.rows):
            idle_since = 0.0
            for (stage, kind, microbatch), begin, end in row:
                source, sent = ends.get(Action(stage - 1, kind, microbatch), (rank, 0.0))
                if kind == "F" and source != rank and sent > idle_since:
                    times.append(begin - sent)
                idle_since = end
    return times


METHOD = """\
A step of {count} micro-batches on {size} ranks with stages that {work}: the makespan and the share of it in which \
ranks are idle. The simulation takes the median time of each stage and kind from the same {steps} steps, and of \
messages that a rank waited for; "apart" is how far the measured makespan is from the simulated."""
WORK = {"sleep": "sleep for {seconds} s in each third of their work", "matmul": "multiply matrices of {width} columns"}


def compare(
    schedule: Schedule, mesh: dist.DeviceMesh, options: argparse.Namespace
) -> tuple[float, float, float, float]:
    """Return the makespan in seconds, simulated and measured, and the bubble, simulated and measured."""
    sleeps = options.stages == "sleep"
    number = schedule.stages_of(mesh.get_rank())
    stages = [sleeping(options.seconds) if sleeps else multiplying(options.width) for _ in number]
    runner = PipelineRunner(stages, schedule, mesh, loss=lambda y, target: (0.0, y))
    batch = np.ones((options.microbatches * options.width, options.width))
    timelines = []
    for _ in range(options.steps + 1):
        dist.barrier()
        runner.step(batch, batch, return_outputs=False)
        timelines.append(runner.timeline())
    del timelines[0]  # the first step exchanges shapes
    costs = measured_costs(timelines, schedule.num_stages)
    expected, bubble = schedule.simulate(costs), median(timeline.bubble for timeline in timelines)
    makespan_s = median(timeline.makespan for timeline in timelines)
    return expected.makespan, makespan_s, expected.bubble, bubble


def row(name: str, makespan: float, measured: float, bubble: float, measured_bubble: float) -> list[str]:
    """Return the cells of one schedule."""
    apart = f"{abs(measured / makespan - 1):.1%}"
    return [
        name,
        report.duration(makespan),
        report.duration(measured),
        apart,
        f"{bubble:.1%}",
        f"{measured_bubble:.1%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--stages", choices=["sleep", "matmul"], default="sleep")
    add("--microbatches", type=positive, default=8)
    add("--seconds", type=float, default=0.05, help="that a stage sleeps for each third of its work (default: 0.05)")
    add("--width", type=positive, default=16, help="rows of a micro-batch, and columns (default: 16)")
    add("--steps", type=positive, default=3)
    report.add_output_options(parser)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    builders = (gpipe, one_f_one_b, looped_bfs, interleaved, zero_bubble, zbv)
    schedules = [build(size, options.microbatches) for build in builders]
    found = {schedule.name: compare(schedule, mesh["pp"], options) for schedule in schedules}
    if dist.get_rank() == 0:
        work = WORK[options.stages].format(**vars(options))
        head = ["schedule", "simulated", "measured", "apart", "bubble, simulated", "bubble, measured"]
        body = METHOD.format(count=options.microbatches, size=size, work=work, steps=options.steps)
        body += "\n\n" + report.table(head, [row(name, *figures) for name, figures in found.items()])
        title = f"Pipelines, {size} ranks" + (", matrices" if options.stages == "matmul" else "")
        described = machine.describe(installed(["meshdist"]))
        report.publish(options, title, described, body, found, launcher=["meshrun", "-n", str(size)])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
