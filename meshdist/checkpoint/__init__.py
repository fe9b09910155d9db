"""Checkpoints: trees of arrays over a mesh, saved by all ranks, and loaded onto any mesh."""

from __future__ import annotations

from meshdist.checkpoint.loading import load
from meshdist.checkpoint.opening import latest
from meshdist.checkpoint.rank_agreement import CheckpointError
from meshdist.checkpoint.saving import PendingSave, save
from meshdist.checkpoint.tree_names import PerRank, per_rank

__all__ = ["CheckpointError", "PendingSave", "PerRank", "latest", "load", "per_rank", "save"]


def __dir__() -> list[str]:
    return sorted(__all__)
