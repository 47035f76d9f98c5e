"""Calibration: how fast the devices at hand are, for the plan.

timing.py times a call on all ranks, operators.py measures what one device computes, host.py what the host needs to
dispatch it, collectives.py what ranks send to each other. The command is `titanlite calibrate` (command.py), and what
it writes is a `Device` with a `Measured` (metrics/devices.py), which tools/plan/measured_rates.py reads.
"""
