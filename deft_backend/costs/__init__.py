"""Costs: tables with the time of partial attention on a GPU; policies plan with them."""

from deft_backend.costs.cost_model import CostModel, CostModelError, FastTreeCoefficients, TileCosts

__all__ = ["CostModel", "CostModelError", "FastTreeCoefficients", "TileCosts"]
