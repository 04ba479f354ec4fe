"""How long the planners take: the host planner and the device planner."""
