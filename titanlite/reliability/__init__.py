"""Faults: what keeps a run, its files and its folders intact when processes, nodes or disks fail."""
