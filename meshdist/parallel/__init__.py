"""Parallel training: pipelines of stages over an axis of a mesh."""

from __future__ import annotations

from meshdist.parallel.microbatches import merge_microbatches, split_microbatches
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

__all__ = [
    "Action",
    "PipelineCosts",
    "PipelineRunner",
    "PipelineStage",
    "PipelineStep",
    "PipelineTimeline",
    "Schedule",
    "ScheduleError",
    "Span",
    "dualpipe_v",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "merge_microbatches",
    "one_f_one_b",
    "split_microbatches",
    "zbv",
    "zero_bubble",
]
