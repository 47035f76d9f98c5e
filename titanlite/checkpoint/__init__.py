"""Checkpoints: safetensors files and JSON, with a checksum of every byte. checkpointer.py saves and resumes, reader.py
reads under any layout, files.py and manifest.py are the format, convert.py reads torchtitan's checkpoints."""
