"""Hugging Face models: weights in (load.py), weights and config out (export.py), and the names of both (names.py)."""
