"""The machine that ranks run on: its parts, the placement of meshes on it, and predicted times of collectives."""

from meshdist.topology.calibration import calibrate
from meshdist.topology.cost_model import CostModel
from meshdist.topology.curve import Curve
from meshdist.topology.part import Link, Part
from meshdist.topology.planning import Candidate, Plan, plan
from meshdist.topology.topology import Placement, Topology

__all__ = ["Candidate", "CostModel", "Curve", "Link", "Part", "Placement", "Plan", "Topology", "calibrate", "plan"]


def __dir__() -> list[str]:
    return sorted(__all__)
