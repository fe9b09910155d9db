"""Gradients over arrays on a mesh, and through collectives on plain arrays; on the package `autograd` of HIPS."""

from __future__ import annotations

try:
    import autograd as _hips
except ImportError as error:
    raise ImportError(
        "meshdist.autograd needs the package autograd: pip install meshdist[autograd]", name="autograd"
    ) from error

from meshdist.autograd.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    copy,
    permute,
    recv,
    reduce_scatter,
    send,
    vjp,
)
from meshdist.autograd.gradients import grad, value_and_grad

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "copy",
    "grad",
    "permute",
    "recv",
    "reduce_scatter",
    "send",
    "value_and_grad",
    "vjp",
]
