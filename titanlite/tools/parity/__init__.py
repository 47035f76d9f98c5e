"""Parity tests: a config's parallel layout is compared with a single process that computes the same steps."""
