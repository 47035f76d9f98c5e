"""Text from a model, and its loss on a dataset: the commands `titanlite generate` and `titanlite eval`, and the samples
that a training run logs."""
