"""Tuning: measure the costs that policies plan with, on this machine's GPU."""
