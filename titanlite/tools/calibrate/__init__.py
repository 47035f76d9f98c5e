"""Measure how fast the devices at hand are, for the planner. The command is `titanlite calibrate`."""
