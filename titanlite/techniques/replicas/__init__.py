"""Replica groups that may die, connected by torchft (torchft.py)."""
