"""Faults of processes, devices and numbers: how they are noticed, and how a run ends or continues after them."""
