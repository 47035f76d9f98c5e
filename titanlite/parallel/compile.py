"""torch.compile, a block at a time: blocks are alike, so what is compiled for one serves all."""

import functools
from collections.abc import Collection
from typing import Literal

import torch
import torch.distributed as dist

from titanlite.loss import linear_cross_entropy
from titanlite.model import Llama


def apply_compile(
    model: Llama,
    *,
    components: Collection[str],
    backend: Literal["inductor", "aot_eager"],
    async_tensor_group: dist.ProcessGroup | None,
) -> None:
    """Compile a model or a stage in place, without a graph break.

    Args:
        components: "model": every block; "loss": the output head and the loss.
        async_tensor_group: tensor-parallel ranks whose collectives inductor is to take apart and overlap with the
            matrix products before and after them (asynchronous tensor parallel; CUDA); None: leave them whole.
    """
    _keep_no_random_state()
    if async_tensor_group is not None:
        _overlap_tensor_parallel(async_tensor_group)
    for block in model.layers.values() if "model" in components else ():
        # Its forward and not the block, around which FSDP has its hooks, which cannot be traced.
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    if model.output is not None and "loss" in components:
        chunk_loss = torch.compile(linear_cross_entropy, backend=backend, fullgraph=True)
        model.output.loss = functools.partial(model.output.loss, chunk_loss=chunk_loss)


def _overlap_tensor_parallel(group: dist.ProcessGroup) -> None:
    """Private: torch._inductor.config._micro_pipeline_tp and symmetric memory (read in torch 2.11 and 2.13; run on
    neither, since both need CUDA)."""
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)


def _keep_no_random_state() -> None:
    """Tell the compiler that nothing in a block is random; checkpoint's `preserve_rng_state` does not reach it.

    Private: torch._functorch.partitioners.has_recomputable_rng_ops (tried on torch 2.11 to 2.15). Attention counts as
    random, for a dropout that is not there. The state kept for it on a CPU stands behind a DTensor's mesh among what
    the forward keeps, where 2.12 and 2.13 expect no tensor: recomputed blocks fail there under tensor parallel."""
    from torch._functorch import partitioners

    partitioners.has_recomputable_rng_ops = lambda _: False
