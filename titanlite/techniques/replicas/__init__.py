"""Replica groups, any of which may fail, connected by torchft (torchft.py)."""
