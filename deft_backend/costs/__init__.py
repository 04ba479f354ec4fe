"""Costs: how long partial attention takes on a GPU, as tables that policies plan with."""

from deft_backend.costs.cost_model import CostModel, CostModelError, FastTreeCoefficients
from deft_backend.costs.tile_costs import TileCosts

__all__ = ["CostModel", "CostModelError", "FastTreeCoefficients", "TileCosts"]
