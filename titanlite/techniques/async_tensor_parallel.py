"""Async tensor parallel on CUDA: inductor overlaps collectives with matrix products (not run on a GPU yet)."""

import warnings

import torch.distributed as dist


def enable_async_tensor_parallel(group: dist.ProcessGroup) -> None:
    """Have inductor overlap the collectives of tensor-parallel ranks. Uses private APIs of torch: _micro_pipeline_tp
    and symmetric memory (their source was read in torch 2.11, 2.13 and 2.15). Since torch 2.13,
    enable_symm_mem_for_group warns that it need not be called."""
    warnings.filterwarnings("ignore", message=".*enable_symm_mem_for_group", category=FutureWarning)
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)
