"""The parallelisms that `parallelize.parallelize` applies to a model, one file for each, and the device mesh."""
