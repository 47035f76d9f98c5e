"""Async tensor parallel (async TP): inductor decomposes the collectives, and overlaps them with the matrix products
before and after them. It needs CUDA, and has run on none yet."""

import warnings

import torch.distributed as dist


def enable_async_tensor_parallel(group: dist.ProcessGroup) -> None:
    """Have inductor overlap the collectives of tensor-parallel ranks.

    Private: _micro_pipeline_tp and symmetric memory (read in 2.11, 2.13 and 2.15). 2.13 and later warn that the latter
    need not be enabled.
    """
    warnings.filterwarnings("ignore", message=".*enable_symm_mem_for_group", category=FutureWarning)
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)
