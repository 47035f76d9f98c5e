"""Calibration: measure how fast the devices at hand are, for the plan.

timing.py times a call on all ranks. operators.py measures operators of a device, host.py the host that dispatches them,
collectives.py the communication of ranks. The command is `titanlite calibrate` (command.py). It writes a `Device` with
a `Measured` (metrics/devices.py), which tools/plan/measured_rates.py reads.
"""
