"""Generate text from a trained model: `titanlite generate`, and the samples that a training run logs."""
