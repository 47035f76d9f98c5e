"""Fingerprints of what a step computes, by which `titanlite diff` finds where two runs differ first."""
