"""Arrays over a mesh: NumPy arrays with a placement for each axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

# Each registers what it computes.
from meshdist.tensor import (
    accumulations,
    array_drawing,
    array_reductions,
    assignment,
    averages,
    compared_calls,
    comparisons,
    contractions,
    convolutions,
    diagonals,
    differences,
    distinct_values,
    elementwise,
    fourier,
    histograms,
    indexing,
    joining,
    least_squares,
    linear_algebra,
    norms,
    order_statistics,
    selecting,
    set_operations,
    shaping,
    sorting,
    whole_arrays,
)
from meshdist.tensor.array_creation import arange, empty, eye, full, linspace, ones, zeros
from meshdist.tensor.dispatch import implicit_redistribution
from meshdist.tensor.distribution import distribute_tensor
from meshdist.tensor.dtensor import DTensor
from meshdist.tensor.halos import halo, map_overlap
from meshdist.tensor.mapping import local_map
from meshdist.tensor.placements import Partial, Placement, PlacementError, Replicate, Shard
from meshdist.tensor.random_numbers import Generator, random
from meshdist.tensor.summa import summa

__all__ = [
    "DTensor",
    "Generator",
    "Partial",
    "Placement",
    "PlacementError",
    "Replicate",
    "Shard",
    "arange",
    "distribute_tensor",
    "empty",
    "eye",
    "full",
    "halo",
    "implicit_redistribution",
    "linspace",
    "local_map",
    "map_overlap",
    "ones",
    "random",
    "summa",
    "zeros",
]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # for type checkers, a name that is not there is an error

    def __getattr__(name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import sys

        import numpy as np

        from meshdist._torch_names import no_attribute

        otherwise = ""
        if name in np.__all__:
            otherwise = f": NumPy's functions take arrays over a mesh; write `np.{name}`"
        elif hasattr(DTensor, name):
            otherwise = f": it is a method of DTensor; write `x.{name}(...)`"
        raise no_attribute(sys.modules[__name__], "tensor.", f"module {__name__!r}", name, __all__, otherwise=otherwise)
