"""titanlite: the smallest trainer that composes all of PyTorch's native parallelism on a Llama-style model."""

__version__ = "0.1.0"
