"""Activation checkpointing: forget what a block computed in its forward and compute it again for its backward
(arXiv:1604.06174; torch.utils.checkpoint). The numbers stay the same, bit for bit.

A block's `forward` is replaced, not the block, so parameters keep their names. Hooks of the block itself, such as
FSDP's, lie around `forward` and run once.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titanlite.model import Llama

Mode = Literal["none", "full", "selective", "memory_budget"]


def _saved_operators() -> set[Any]:
    """What "op" keeps: results that take long to compute for their size. Matrix products take D operations an element
    and attention T, a collective waits for other ranks; all else (norms, rotations, SwiGLU's product, casts) reads
    memory once and is computed again. A gather is not kept: its result is as many times larger than what it was
    made of as there are ranks, and its ranks have just met for the same layer's backward."""
    aten, collectives = torch.ops.aten, torch.ops._c10d_functional
    return {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._scaled_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_attention_math.default,
        torch.ops.titanlite.context_attention.default,
        collectives.reduce_scatter_tensor.default,
        collectives.all_reduce.default,
    }


def _policy(
    saved: set[Any], _: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE


def apply_activation_checkpoint(model: Llama, *, mode: Mode, option: Literal["op"] | int, budget: float) -> None:
    """Checkpoint the blocks of a model or a stage in place, before they are compiled.

    Args:
        mode: full: every block keeps its inputs only. selective: see `option`. memory_budget: the compiler decides,
            within `budget`. none: nothing is forgotten.
        option: "op": every block keeps the results of its expensive operations; N: every N-th block keeps its inputs
            only, the others everything.
        budget: what share of the activations the compiler keeps, from 0 (inputs only) to 1 (all).
    """
    _give_compiler_a_budget(budget if mode == "memory_budget" else 1.0)
    if mode in ("none", "memory_budget"):
        return
    recompute: Callable[..., Any] = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if mode == "selective" and option == "op":
        policy = functools.partial(_policy, _saved_operators())
        recompute = functools.partial(
            recompute, context_fn=functools.partial(create_selective_checkpoint_contexts, policy)
        )
    for number, block in model.layers.items():
        if mode == "full" or option == "op" or int(number) % option == 0:
            block.forward = _recomputing(recompute, block.forward)


def _recomputing(recompute: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function rather than a partial one, so that it can be compiled."""

    def recomputing_forward(*args: Any) -> Any:
        return recompute(forward, *args)

    return recomputing_forward


def _give_compiler_a_budget(budget: float) -> None:
    """Private: torch._functorch.config.activation_memory_budget (tried on torch 2.11 to 2.15). It holds for what the
    process compiles from now on.

    A DTensor's mesh is an input of its graph since 2.12, and the partitioner wants to know its size; a mesh is on no
    device. 2.13 and later can be told so; 2.12 cannot, which is why tensor parallel with a budget is refused there."""
    functorch = torch._functorch.config
    functorch.activation_memory_budget = budget
    if hasattr(functorch, "unsafe_treat_script_objects_as_zero_size"):
        functorch.unsafe_treat_script_objects_as_zero_size = True
