"""Techniques for training data: streaming, mixtures, best-fit packing, chat templates."""
