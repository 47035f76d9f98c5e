"""The layout search recommends a parallel layout to train a model with on a given number of devices."""
