"""Data: tokenizers, the token cache, sequence packing, streaming, and the loader, for any number of ranks."""

from titanlite.data.loader import Batch, Loader, Sequences, SequenceShard, n_validation_batches, validation_batches
from titanlite.data.open import open_sequences
from titanlite.data.packing import ValidationSequences

__all__ = ["Batch", "Loader", "SequenceShard", "Sequences", "ValidationSequences"]
__all__ += ["n_validation_batches", "open_sequences", "validation_batches"]
