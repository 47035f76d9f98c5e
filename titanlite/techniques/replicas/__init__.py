"""Replica groups, any of which may die, connected by torchft (torchft.py)."""
