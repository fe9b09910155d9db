"""Training on several ranks in plain NumPy or CuPy: gradients, optimizers, layers sharded over ranks, and pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshdist.parallel import communication_hooks
from meshdist.parallel.gradient_buckets import GradBucket
from meshdist.parallel.join_context import Joinable, JoinHook, uneven_inputs
from meshdist.parallel.microbatches import merge_microbatches, split_microbatches
from meshdist.parallel.model_averaging import (
    HierarchicalAverager,
    PeriodicAverager,
    average_parameters,
    broadcast_parameters,
)
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
from meshdist.parallel.pipeline_stages import PipelineStage, autograd_stage
from meshdist.parallel.pipeline_table import ScheduleError
from meshdist.parallel.pipeline_timeline import PipelineTimeline
from meshdist.parallel.reducer import GradientReducer
from meshdist.parallel.sharded_optimizer import ShardedOptimizer
from meshdist.parallel.step_times import ReducerStatistics, StepTimes

if TYPE_CHECKING:
    from meshdist.parallel.context_parallel import ring_attention, sequence_positions
    from meshdist.parallel.tensor_layers import column_parallel, layer_norm, row_parallel
    from meshdist.parallel.vocab_layers import vocab_parallel_cross_entropy, vocab_parallel_embedding

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
    "column_parallel",
    "communication_hooks",
    "dualpipe_v",
    "gpipe",
    "interleaved",
    "layer_norm",
    "looped_bfs",
    "merge_microbatches",
    "one_f_one_b",
    "ring_attention",
    "row_parallel",
    "sequence_positions",
    "split_microbatches",
    "uneven_inputs",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "zbv",
    "zero_bubble",
]


def __dir__() -> list[str]:
    return sorted(__all__)


# Imported at first use: these need the package autograd, which the rest does without.
_LAYERS = {
    "column_parallel": "tensor_layers",
    "layer_norm": "tensor_layers",
    "ring_attention": "context_parallel",
    "row_parallel": "tensor_layers",
    "sequence_positions": "context_parallel",
    "vocab_parallel_cross_entropy": "vocab_layers",
    "vocab_parallel_embedding": "vocab_layers",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LAYERS:
            raise AttributeError(f"module 'meshdist.parallel' has no attribute {name!r}")
        from importlib import import_module

        import_module("meshdist.autograd")  # which says what to install
        return getattr(import_module(f"meshdist.parallel.{_LAYERS[name]}"), name)
