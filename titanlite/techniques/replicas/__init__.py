"""Replica groups that may die: every step together (torchft.py), or every few steps (diloco.py)."""
