"""Fingerprints of the tensors of a step, with which `titanlite diff` finds where two runs differ first."""
