"""Checkpoints: safetensors files and JSON (files.py, manifest.py), saved by checkpointer.py and read by reader.py."""
