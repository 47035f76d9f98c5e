"""The layout search finds the fastest parallel layout to train a model on a given number of devices."""
