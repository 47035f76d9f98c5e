"""Fingerprints of the tensors of a step, by which `titanlite diff` finds where two runs first differ."""
