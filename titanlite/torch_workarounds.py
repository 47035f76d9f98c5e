"""Workarounds for faults of torch, one function or class per fault. Each docstring tells the faulty versions of torch,
the fault, and when to remove the workaround. config/torch_versions.py rejects options that an old torch cannot run."""

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
    """Return the torch.compile backend `name`, changed to treat all operators as deterministic. Torch treats attention
    as random even without dropout: on a CPU, recomputed blocks fail under TP, since torch 2.12 and 2.13 save a random
    state after a DTensor's mesh, where they expect no tensor. Remove this function when 2.14 is required. Uses the
    private partitioners.has_recomputable_rng_ops (tested with 2.11 to 2.15) and torch._dynamo.lookup_backend (2.13)."""
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
    """Return a function that calls `attend` through `recompute`. Each returned function has its own code object, since
    torch 2.11 confuses compiled functions that share one. Remove this function when torch 2.12 is required."""

    def checkpointed_attend(*args: Any) -> Any:
        return recompute(attend, *args)

    return checkpointed_attend


class NothingToReduce:
    """Gives fully_shard one buffer as input and output of a reduce-scatter over one rank, which then copies nothing.
    Torch 2.11 and 2.13 free the buffer on the compute stream before the reduce-scatter stream has read it. So this
    class keeps it until the compute stream waits for the other stream. `record_stream` would keep it until the device
    is done: 13 % more memory on an H200. Remove this class when fully_shard copies nothing on one rank."""

    input: Tensor | None = None
    kept: tuple[Tensor, Any] | None = None  # the last buffer, of any model, and the stream that reads it

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.input is None:
            self.release()
            self.input = torch.empty(*size, dtype=dtype, device=device)
            return self.input
        output, self.input = self.input, None
        NothingToReduce.kept = (output, torch.cuda.current_stream(output.device)) if output.is_cuda else None
        return output

    @staticmethod
    def release() -> None:
        if NothingToReduce.kept:
            torch.cuda.current_stream(NothingToReduce.kept[0].device).wait_stream(NothingToReduce.kept[1])
            NothingToReduce.kept = None


def gather_with(block: nn.Module, module: nn.Module) -> None:
    """Have FSDP gather the weights of `module`, a part of `block`, before the block's forward. Inside the block,
    activation checkpointing would repeat FSDP's operators, and the compiler would see them. Remove this function when
    fully_shard has an option for it. Uses the private handles of FSDP's two hooks (tested with 2.11 and 2.13)."""
    state = module._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = block.register_forward_pre_hook(state._pre_forward, with_kwargs=True)
    state._post_forward_hook_handle = block.register_forward_hook(state._post_forward)


def look_up(module: nn.Module, mesh: DeviceMesh, tokens_N: Tensor) -> Tensor:
    """Return the embeddings of this rank's shard of the sequence. Each rank looks up the tokens in its shard of the
    vocabulary, and a reduce-scatter over the sequence sums the results. RowwiseParallel is equivalent, but its backward
    allocates the full vocabulary's gradient on each rank (2.11 to 2.15). Remove this function when torch fixes it."""
    weight_VD = module.weight.to_local()
    local_N = tokens_N - mesh.get_local_rank() * len(weight_VD)  # row of each token in this rank's shard
    is_local_N = (local_N >= 0) & (local_N < len(weight_VD))
    x_ND = F.embedding(local_N.where(is_local_N, 0), weight_VD).where(is_local_N.unsqueeze(-1), 0)
    return DTensor.from_local(x_ND, mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local()


def ignore_warnings_of_views() -> None:
    """Hide fully_shard's warnings about modules whose output is a view (2.11 to 2.15). In-place operations would lose
    FSDP's hook, but this model has none. Remove this function when torch warns only of in-place operations."""
    warnings.filterwarnings("ignore", message=".* returned a view tensor", category=UserWarning)


def open_communicator(group: dist.ProcessGroup, zero: Tensor) -> None:
    """Have NCCL create the communicator of a pipeline's group now. Torch 2.13 creates it only when the first message is
    sent. Remove this function when the pipeline schedule opens the communicator."""
    dist.all_reduce(zero, group=group)


def round_casts_as_eager(enabled: bool) -> None:
    """Have inductor round values as eager code does where the backward repeats a cast of the forward. Otherwise, float8
    products with a scale per row can be NaN. Remove this function when PyTorch's issue 150859 is closed."""
    from torch._inductor import config  # imported here, since most runs compile nothing

    config.emulate_precision_casts = enabled


def eager_on_cpu(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context that runs compiled functions eagerly on a CPU, where inductor's code for the step of 8-bit Adam
    crashes the process (2.13, torchao 0.18). Remove this function when that code no longer crashes."""
    return torch.compiler.set_stance("force_eager") if device.type == "cpu" else contextlib.nullcontext()


def forget_meshes() -> None:
    """Clear DTensor's cache by a private function. In torch 2.13, the cache keeps destroyed process groups alive, with
    their files and threads. Remove this function when destroy_process_group clears the cache."""
    _clear_sharding_prop_cache()
