"""Hugging Face's config.json, to options of [model] and back."""
