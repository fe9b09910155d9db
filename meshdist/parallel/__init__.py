"""Training on several ranks in plain NumPy or CuPy: gradients, optimizers and parameters over the ranks of a group."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshdist.parallel import communication_hooks
    from meshdist.parallel.gradient_buckets import GradBucket
    from meshdist.parallel.join_context import Joinable, JoinHook, uneven_inputs
    from meshdist.parallel.model_averaging import HierarchicalAverager, PeriodicAverager
    from meshdist.parallel.parameter_trees import average_parameters, broadcast_parameters
    from meshdist.parallel.reducer import GradientReducer
    from meshdist.parallel.sharded_optimizer import ShardedOptimizer
    from meshdist.parallel.step_times import ReducerStatistics, StepTimes

# The module of each public name; it is imported when the name is used first.
_HOMES = {
    "GradBucket": "gradient_buckets",
    "GradientReducer": "reducer",
    "HierarchicalAverager": "model_averaging",
    "JoinHook": "join_context",
    "Joinable": "join_context",
    "PeriodicAverager": "model_averaging",
    "ReducerStatistics": "step_times",
    "ShardedOptimizer": "sharded_optimizer",
    "StepTimes": "step_times",
    "average_parameters": "parameter_trees",
    "broadcast_parameters": "parameter_trees",
    "uneven_inputs": "join_context",
}

__all__ = [
    "GradBucket",
    "GradientReducer",
    "HierarchicalAverager",
    "JoinHook",
    "Joinable",
    "PeriodicAverager",
    "ReducerStatistics",
    "ShardedOptimizer",
    "StepTimes",
    "average_parameters",
    "broadcast_parameters",
    "communication_hooks",
    "uneven_inputs",
]


def __getattr__(name: str) -> object:
    if name == "communication_hooks":
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
