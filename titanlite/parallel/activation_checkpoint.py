"""Activation checkpointing (AC): save few activations in a block's forward, and recompute all others in its backward
(arXiv:1604.06174; torch.utils.checkpoint). Losses and gradients stay the same, bit for bit. Only a block's `forward` is
replaced, so that parameters keep their names and FSDP's hooks run only once."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective_contexts

from titanlite.config.schema import ActivationCheckpoint
from titanlite.model import Llama
from titanlite.parallel.own_rules import RunsUncompiled
from titanlite.torch_workarounds import checkpointed_half

PRODUCTS = [operator.default for operator in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)]
PRODUCTS += [getattr(torch.ops.aten, name).default for name in ("_scaled_mm", "_grouped_mm", "_int_mm")]


def _saved_operators(option: str) -> list[Any]:
    """Return the operators whose results selective AC saves: attention, and under "op" also matrix products (D
    operations per element) and collectives except all-gathers (large results). Others, like norms, are cheap."""
    names = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention", "attention_math")
    saved = [getattr(torch.ops.aten, f"_scaled_dot_product_{name}") for name in names]
    if hasattr(torch.ops.titanlite, "tiled_attention"):  # the operator exists if its file was imported
        saved.append(torch.ops.titanlite.tiled_attention)
    if option != "attention":
        names = ("reduce_scatter_tensor", "all_reduce", "all_to_all_single")
        saved += [getattr(torch.ops._c10d_functional, name) for name in names]
        saved.append(torch.ops._c10d_functional_autograd.all_to_all_single)
    return [operator.default for operator in saved] + (PRODUCTS if option != "attention" else [])


def _every_second_mm() -> Any:
    """Return the contexts for a block's forward and for recomputing it. The forward saves the result of every
    odd-numbered matrix product."""
    saved, counts = set(_saved_operators("op")), {False: 0, True: 0}  # matrix products so far, by context.is_recompute

    def policy(context: SelectiveCheckpointContext, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        counts[context.is_recompute] += operator in PRODUCTS
        skipped = operator in PRODUCTS and counts[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if operator in saved and not skipped else CheckpointPolicy.PREFER_RECOMPUTE

    return selective_contexts(policy)


def apply_activation_checkpoint(model: Llama, activation_checkpoint: ActivationCheckpoint) -> None:
    """Apply AC to the blocks of a model or a pipeline stage, in place, before blocks are compiled. Full AC: every block
    saves its inputs only. Selective AC, "op": every block saves the results of slow operators. "every_second_mm": as
    "op", but only every second matrix product, as in torchtitan. "attention": every block saves its inputs and the
    result of attention. N: every N-th layer saves its inputs only; other layers have no AC."""
    mode, option = activation_checkpoint.mode, activation_checkpoint.selective_ac_option
    if mode == "none":
        return
    recompute: Callable[..., Any] = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    by_operator = mode == "selective" and not isinstance(option, int)
    if by_operator:
        save = functools.partial(selective_contexts, _saved_operators(option))
        recompute = functools.partial(recompute, context_fn={"every_second_mm": _every_second_mm}.get(option, save))
    for number, block in model.layers.items():
        if by_operator and isinstance(block.feed_forward, RunsUncompiled):
            # AC wraps both halves of the block. Only the first half, `attend`, is compiled, together with its AC.
            block.attend = checkpointed_half(recompute, block.attend)
            block.feed_forward.forward = _checkpointed(recompute, block.feed_forward.forward)
        elif mode == "full" or by_operator or int(number) % option == 0:
            block.forward = _checkpointed(recompute, block.forward)


def _checkpointed(recompute: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    def checkpointed_forward(*args: Any) -> Any:  # torch.compile needs a plain function
        return recompute(forward, *args)

    return checkpointed_forward
