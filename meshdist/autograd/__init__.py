"""Gradients over arrays on a mesh, and through collectives on plain arrays; on the package `autograd` of HIPS."""

from __future__ import annotations

try:
    import autograd as _hips
except ImportError as error:
    raise ImportError("meshdist.autograd needs the package autograd: pip install autograd", name="autograd") from error

from meshdist.autograd import array_boxes  # registers DTensors
from meshdist.autograd.array_moves import from_local, full, to_local
from meshdist.autograd.collective_primitives import vjp
from meshdist.autograd.collectives import all_gather, all_reduce, all_to_all, broadcast, copy, reduce_scatter
from meshdist.autograd.gradients import grad, value_and_grad
from meshdist.autograd.mapped_gradients import halo, local_map, map_overlap
from meshdist.autograd.messages import permute, recv, send

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "copy",
    "from_local",
    "full",
    "grad",
    "halo",
    "local_map",
    "map_overlap",
    "permute",
    "recv",
    "reduce_scatter",
    "send",
    "to_local",
    "value_and_grad",
    "vjp",
]


def __dir__() -> list[str]:
    return sorted(__all__)
