"""Everything that `parallelize.parallelize` applies to a model, one file per technique, and the device mesh."""
