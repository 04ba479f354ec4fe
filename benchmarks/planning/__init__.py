"""Time of the planners: the host planner and the device planner."""
