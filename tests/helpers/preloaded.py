"""The ranks of pools are forked from a server that has imported this, so that each of them need not."""

import importlib

for name in (
    "torch._dynamo",
    "torch.distributed.pipelining",
    "transformers",
    "titanlite.build",
    "titanlite.parallel.pipeline",
    "titanlite.parallel.tensor",
    "titanlite.parallel.tiled_attention",
    "titanlite.techniques.low_bit_adam",
):
    importlib.import_module(name)
