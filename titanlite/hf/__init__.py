"""Hugging Face models: load weights (load.py), export weights and config (export.py), and convert names (names.py)."""
