"""Techniques of the data: streaming, mixtures, best-fit packing, chat templates."""
