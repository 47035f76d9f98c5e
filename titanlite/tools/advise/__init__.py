"""The layout search: which parallel layout to train a model with on a given number of devices."""
