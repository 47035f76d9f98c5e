"""`titanlite diff` finds where two runs first differ, by their fingerprints."""
