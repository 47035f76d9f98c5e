"""Workarounds for faults and gaps of torch: a function or class for each, with the versions of torch that have it,
what goes wrong without it, and when to remove it. config/torch_versions.py rejects what old versions cannot do."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


@functools.cache
def backend_without_random_states(name: str) -> Callable[..., Any]:
    """Return a backend of torch.compile that takes nothing to be random. Without it attention is, for a dropout that is
    not there. On a CPU, 2.12 and 2.13 save its random state after a DTensor's mesh, where they expect no tensor, and
    with TP recomputed blocks fail. Remove when 2.14 is required. Private: partitioners.has_recomputable_rng_ops (tried
    on 2.11 to 2.15) and torch._dynamo.lookup_backend (tried on 2.13)."""
    from torch._functorch import partitioners  # imported here, since most runs compile nothing

    backend = torch._dynamo.lookup_backend(name)

    def compile_graph(*args: Any, **options: Any) -> Any:
        real, partitioners.has_recomputable_rng_ops = partitioners.has_recomputable_rng_ops, lambda _: False
        try:
            return backend(*args, **options)
        finally:
            partitioners.has_recomputable_rng_ops = real

    return compile_graph


def checkpointed_half(recompute: Callable[..., Any], attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that recomputes another, with code that no other such function has. 2.11 takes what it compiled
    for one function's code for another's. Remove when 2.12 is required."""

    def checkpointed_attend(*args: Any) -> Any:
        return recompute(attend, *args)

    return checkpointed_attend


class NothingToReduce:
    """Stands for the reduce-scatter of one rank, where fully_shard copies the gradients from a buffer to another. It
    takes both from here in turn, and gets the same one twice, so that there is nothing to copy.

    fully_shard asks for the input on the compute stream, whose allocator then owns the buffer, and for the output on
    the reduce-scatter stream. It lets go of the buffer before that stream has read it (2.11 and 2.13), so the allocator
    is told of that stream, or the compute stream could overwrite gradients before they are accumulated. Remove when
    fully_shard copies nothing on one rank.
    """

    buffer: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.buffer is None:
            self.buffer = torch.empty(*size, dtype=dtype, device=device)
            return self.buffer
        output, self.buffer = self.buffer, None
        if output.is_cuda:
            output.record_stream(torch.cuda.current_stream(output.device))
        return output


def gather_with(block: nn.Module, module: nn.Module) -> None:
    """Have FSDP gather the weights of a module of a block before the block. Before the module, activation checkpointing
    would run FSDP's operators again, and the compiler would see them. Remove when fully_shard has an option for it.
    Private: the handles of a module's two hooks (tried on 2.11 and 2.13)."""
    state = module._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = block.register_forward_pre_hook(state._pre_forward, with_kwargs=True)
    state._post_forward_hook_handle = block.register_forward_hook(state._post_forward)


def look_up(module: nn.Module, mesh: DeviceMesh, tokens_N: Tensor) -> Tensor:
    """Return the embeddings of this rank's shard of the sequence. Each rank looks up the tokens of its own shard of the
    vocabulary, and the sums over ranks are scattered over the sequence. RowwiseParallel does the same, but its backward
    allocates the gradient of the full vocabulary on each rank (2.11 to 2.15). Remove when it does not."""
    weight_VD = module.weight.to_local()
    local_N = tokens_N - mesh.get_local_rank() * len(weight_VD)  # index in this rank's shard
    is_local_N = (local_N >= 0) & (local_N < len(weight_VD))
    x_ND = F.embedding(local_N.where(is_local_N, 0), weight_VD).where(is_local_N.unsqueeze(-1), 0)
    return DTensor.from_local(x_ND, mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local()


def ignore_warnings_of_views() -> None:
    """Hide that fully_shard warns of each module whose output is a view, as in-place operations on it would lose a hook
    (2.11 to 2.15). Outputs of parallelized modules are views of DTensors, and the model has no in-place operation.
    Remove when torch warns of the operation."""
    warnings.filterwarnings("ignore", message=".* returned a view tensor", category=UserWarning)


def open_communicator(group: dist.ProcessGroup, zero: Tensor) -> None:
    """Have NCCL make the communicator of a pipeline's group. 2.13 makes it in mid-run, when the first message is sent.
    Remove when the schedule does it."""
    dist.all_reduce(zero, group=group)


def round_casts_as_eager(enabled: bool) -> None:
    """Have inductor round values that it casts again in a backward, or products of float8 with a scale per row can be
    NaN (pytorch 150859). Remove when that issue is closed."""
    from torch._inductor import config  # imported here, since most runs compile nothing

    config.emulate_precision_casts = enabled


def eager_on_cpu(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context without compiled code on a CPU, where inductor's code for the step of 8-bit Adam crashes the
    process (2.13, torchao 0.18). Remove when it does not."""
    return torch.compiler.set_stance("force_eager") if device.type == "cpu" else contextlib.nullcontext()


def forget_meshes() -> None:
    """Clear DTensor's cache (private; 2.13), which would keep process groups after their end, with files and threads.
    Remove when destroy_process_group does it."""
    _clear_sharding_prop_cache()
