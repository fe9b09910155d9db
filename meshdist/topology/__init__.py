"""The machine that ranks run on: what it is made of, where meshes are placed on it, and how long collectives take."""

from meshdist.topology.calibration import calibrate
from meshdist.topology.cost_model import CostModel
from meshdist.topology.curves import Curve
from meshdist.topology.link import Link
from meshdist.topology.part import Part
from meshdist.topology.placement import Placement
from meshdist.topology.planning import Candidate, Plan, plan
from meshdist.topology.topology import Topology

__all__ = ["Candidate", "CostModel", "Curve", "Link", "Part", "Placement", "Plan", "Topology", "calibrate", "plan"]
