"""Conversion between Hugging Face's config.json and the options of [model]."""
