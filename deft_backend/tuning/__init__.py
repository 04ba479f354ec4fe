"""Tuning: measures on this machine's GPU the costs that policies plan with."""
