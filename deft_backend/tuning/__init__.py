"""Tuning: what attention takes on this machine's GPU, measured, for the policies to plan with."""
