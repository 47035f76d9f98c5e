"""Everything that `parallelize.parallelize` applies to a model, one file a technique, and the mesh under it."""
