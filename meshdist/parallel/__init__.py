"""Training on several ranks in plain NumPy or CuPy: gradients, optimizers and parameters of a group, and pipelines."""

from __future__ import annotations

from meshdist.parallel import communication_hooks
from meshdist.parallel.autograd_stage import autograd_stage
from meshdist.parallel.gradient_buckets import GradBucket
from meshdist.parallel.join_context import Joinable, JoinHook, uneven_inputs
from meshdist.parallel.microbatches import merge_microbatches, split_microbatches
from meshdist.parallel.model_averaging import HierarchicalAverager, PeriodicAverager
from meshdist.parallel.parameter_trees import average_parameters, broadcast_parameters
from meshdist.parallel.pipeline_actions import Action
from meshdist.parallel.pipeline_builders import (
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from meshdist.parallel.pipeline_runner import PipelineRunner, PipelineStep
from meshdist.parallel.pipeline_schedules import Schedule
from meshdist.parallel.pipeline_simulation import PipelineCosts, Span
from meshdist.parallel.pipeline_stages import PipelineStage
from meshdist.parallel.pipeline_table import ScheduleError
from meshdist.parallel.pipeline_timeline import PipelineTimeline
from meshdist.parallel.reducer import GradientReducer
from meshdist.parallel.sharded_optimizer import ShardedOptimizer
from meshdist.parallel.step_times import ReducerStatistics, StepTimes

__all__ = [
    "Action",
    "GradBucket",
    "GradientReducer",
    "HierarchicalAverager",
    "JoinHook",
    "Joinable",
    "PeriodicAverager",
    "PipelineCosts",
    "PipelineRunner",
    "PipelineStage",
    "PipelineStep",
    "PipelineTimeline",
    "ReducerStatistics",
    "Schedule",
    "ScheduleError",
    "ShardedOptimizer",
    "Span",
    "StepTimes",
    "autograd_stage",
    "average_parameters",
    "broadcast_parameters",
    "communication_hooks",
    "dualpipe_v",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "merge_microbatches",
    "one_f_one_b",
    "split_microbatches",
    "uneven_inputs",
    "zbv",
    "zero_bubble",
]
