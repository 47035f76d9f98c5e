"""Data: tokenizers, the token cache, sequence packing, streaming, and the loader, for any number of ranks."""
