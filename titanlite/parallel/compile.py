"""Apply torch.compile to each block: blocks have the same structure, so the first block's compiled code serves all."""

import functools

import torch

from titanlite.config.schema import Compile
from titanlite.loss import linear_cross_entropy
from titanlite.model import Llama
from titanlite.parallel.own_rules import RunsUncompiled
from titanlite.torch_workarounds import backend_without_random_states


def apply_compile(model: Llama, compile: Compile) -> None:
    """Compile the blocks and the loss of a model or a pipeline stage in place, without a graph break."""
    backend = backend_without_random_states(compile.backend)
    if "model" in compile.components:
        for block in model.layers.values():
            name = "forward"  # compile the method: FSDP's hooks on the block cannot be traced
            if isinstance(block.feed_forward, RunsUncompiled):
                name = "attend"
                block.feed_forward.compile_operators(compile.backend)
            setattr(block, name, torch.compile(getattr(block, name), backend=backend, fullgraph=True))
    if model.output is not None and "loss" in compile.components:
        compiled = torch.compile(linear_cross_entropy, backend=compile.backend, fullgraph=True)
        model.output.loss = functools.partial(model.output.loss, chunk_loss=compiled)
