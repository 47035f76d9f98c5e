"""The weights of a base with the adapters of a checkpoint merged, to be exported."""

from pathlib import Path

import torch

from titanlite.build_llama import build_llama
from titanlite.checkpoint.loading import load_weights
from titanlite.checkpoint.tensors import model_tensors
from titanlite.config.schema import Model


class MergedReader:
    """Reads weights with the adapters of a checkpoint merged, as CheckpointReader reads full weights. It needs the host
    memory of the full model."""

    def __init__(self, path: Path, options: Model, dtype: torch.dtype):
        model = build_llama(options, max_seq_len=1).to(dtype)
        model.materialize(torch.device("cpu"))
        load_weights(path, model, options)
        self._tensors = model_tensors(model)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]
