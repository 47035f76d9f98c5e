"""Calibration: measure how fast the devices at hand are, for the plan. The command is `titanlite calibrate`."""
