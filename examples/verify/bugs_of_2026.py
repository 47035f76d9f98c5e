"""Eight public bugs of 2026, re-created in a plain PyTorch loop, for `titanlite parity --against FOLDER`.

    python examples/verify/bugs_of_2026.py NAME FOLDER

NAME is a key of BUGS below, where each bug has its link, or "none" or "none_experts" for the loop without a bug. The
loop takes one optimizer step of a Llama, or of a Qwen3-MoE for bugs of experts, over four batches of two sequences. It
runs in one process: where a bug needs two ranks, the loop computes what the ranks compute together, or what the first
rank has.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from data import CONFIG, batch, batch_loss
from folder import copies, write_folder
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers_moe import BALANCE, N_EXPERTS, TOP_K
from transformers_moe import CONFIG as CONFIG_OF_EXPERTS

Batches = Sequence[tuple[Tensor, Tensor]]
"""Tokens and targets of each accumulation step."""
ACCUMULATION_STEPS, RANKS, MAX_NORM = 4, 2, 0.5
ADAM = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}


# The loop without a bug: `backward` adds up gradients and returns the loss, `gradient_norm` is what gradients are
# clipped by.


def backward(model: nn.Module, batches: Batches, n_valid: int) -> float:
    total = 0.0
    for tokens, targets in batches:
        loss = batch_loss(logits_of(model, tokens), targets.flatten(), n_valid=n_valid)
        loss.backward()
        total += loss.item()
    return total


def backward_of_experts(model: nn.Module, batches: Batches, n_valid: int, balance_parts: int = 4) -> float:
    total = 0.0
    for tokens, targets in batches:
        output = model(tokens, output_router_logits=True)
        loss = batch_loss(output.logits.flatten(0, 1), targets.flatten(), n_valid=n_valid)
        (loss + BALANCE * output.aux_loss / balance_parts).backward()
        total += loss.item()
    return total


def gradient_norm(gradients: dict[str, Tensor]) -> Tensor:
    return norm_of(gradients.values())


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).logits.flatten(0, 1)


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


# The bugs ------------------------------------------------------------------------------------------------------------


def mean_of_means(model: nn.Module, batches: Batches, n_valid: int) -> float:
    """Each accumulation step divides by its own number of valid tokens."""
    total = 0.0
    for tokens, targets in batches:
        loss = batch_loss(logits_of(model, tokens), targets.flatten()) / len(batches)
        loss.backward()
        total += loss.item()
    return total


def sum_in_a_pipeline(model: nn.Module, batches: Batches, n_valid: int) -> float:
    """The schedule runs the backward of the summed loss. The trainer divides afterwards, the loss that it prints."""
    total = 0.0
    for tokens, targets in batches:
        loss = batch_loss(logits_of(model, tokens), targets.flatten(), n_valid=1)
        loss.backward()
        total += loss.item()
    return total / n_valid


def stages_initialized_again(model: nn.Module, batches: Batches, n_valid: int) -> float:
    """Before each batch the pipeline initializes its stages again, and resets their gradients."""
    total = 0.0
    for each in batches:
        model.zero_grad()
        total += backward(model, [each], n_valid)
    return total


def gathered_logits(model: nn.Module, batches: Batches, n_valid: int) -> float:
    """Each rank of tensor parallel has all logits, and the loss takes them for its shard. The log-sum-exp has all of
    them twice. The backward of the gather leaves to a rank the gradient of its own half of the logits, and only the
    first rank finds targets in its vocabulary."""
    total = 0.0
    for tokens, targets in batches:
        logits, valid = logits_of(model, tokens), targets.flatten() != -100
        first, second = logits.chunk(RANKS, dim=-1)
        at_targets = torch.cat([first, second.detach()], -1).gather(-1, targets.flatten().clamp(min=0)[:, None])[:, 0]
        losses = torch.cat([logits, logits.detach()], -1).logsumexp(-1) - at_targets
        loss = losses[valid].sum() / n_valid
        loss.backward()
        total += loss.item()
    return total


def scores_of_own_experts(model: nn.Module, batches: Batches, n_valid: int) -> float:
    """With expert parallel, the first rank's scores get gradients of its own experts, and nobody adds the others'."""

    def keep_own(gate: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits, scores, experts = output
        return logits, torch.where(experts < N_EXPERTS // RANKS, scores, scores.detach()), experts

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(keep_own)
    return backward_of_experts(model, batches, n_valid)


def balance_loss_of_each_batch(model: nn.Module, batches: Batches, n_valid: int) -> float:
    """The auxiliary loss is not divided by the accumulation steps."""
    return backward_of_experts(model, batches, n_valid, balance_parts=1)


def experts_omitted(gradients: dict[str, Tensor]) -> Tensor:
    """With expert and tensor parallel, the norm takes the second rank's experts for copies, and omits them."""
    return norm_of(g[: N_EXPERTS // RANKS] if ".experts." in name else g for name, g in gradients.items())


def copies_counted(gradients: dict[str, Tensor]) -> Tensor:
    """Both ranks of tensor parallel have all of the norms' weights, and the gradient norm counts them twice."""
    return norm_of(g * RANKS**0.5 if g.dim() == 1 else g for g in gradients.values())


class Bug(NamedTuple):
    link: str
    backward: Callable[[nn.Module, Batches, int], float] = backward
    gradient_norm: Callable[[dict[str, Tensor]], Tensor] = gradient_norm
    experts: bool = False


GITHUB = "https://github.com"
BUGS = {
    "none": Bug(""),
    "none_experts": Bug("", backward_of_experts, experts=True),
    "mean_of_means": Bug(f"{GITHUB}/pytorch/torchtitan/pull/2206", mean_of_means),
    "sum_in_a_pipeline": Bug(f"{GITHUB}/pytorch/torchtitan/issues/2972", sum_in_a_pipeline),
    "stages_initialized_again": Bug(f"{GITHUB}/NVIDIA-NeMo/Automodel/pull/3530", stages_initialized_again),
    "gathered_logits": Bug(f"{GITHUB}/NVIDIA/Megatron-LM/issues/7452", gathered_logits),
    "copies_counted": Bug(f"{GITHUB}/NVIDIA-NeMo/RL/pull/3788", gradient_norm=copies_counted),
    "scores_of_own_experts": Bug(f"{GITHUB}/huggingface/transformers/pull/48205", scores_of_own_experts, experts=True),
    "balance_loss_of_each_batch": Bug(
        f"{GITHUB}/NVIDIA-NeMo/Automodel/pull/3359", balance_loss_of_each_batch, experts=True
    ),
    "experts_omitted": Bug(f"{GITHUB}/NVIDIA/Megatron-LM/pull/5916", backward_of_experts, experts_omitted, True),
}


def build(*, experts: bool) -> nn.Module:
    torch.manual_seed(0)
    if experts:
        return Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**CONFIG_OF_EXPERTS), experts_implementation="eager")
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def main(name: str, folder: str) -> None:
    bug, chosen = BUGS[name], dict[str, list[Tensor]]()
    model = build(experts=bug.experts)
    weights = copies(dict(model.named_parameters()))
    tokens, targets = batch()
    for number, layer in enumerate(model.model.layers if bug.experts else []):

        def record(gate: nn.Module, args: Any, output: tuple[Tensor, ...], key: str = f"layers.{number}") -> None:
            chosen.setdefault(key, []).append(output[2].view(-1, tokens.shape[1], TOP_K))

        layer.mlp.gate.register_forward_hook(record)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), **ADAM)
    batches = list(zip(tokens.chunk(ACCUMULATION_STEPS), targets.chunk(ACCUMULATION_STEPS), strict=True))
    n_valid = int((targets != -100).sum())
    loss = bug.backward(model, batches, n_valid)
    gradients = copies({name: parameter.grad for name, parameter in model.named_parameters()})
    norm = bug.gradient_norm(gradients)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)
    optimizer.step()
    step: dict[str, Any] = {
        "program": f"transformers {transformers.__version__}, torch {torch.__version__}, a plain loop, bug: {name}",
        "dtypes": dict.fromkeys(("weights", "compute", "reduce"), "float32"),
        "optimizer": {"name": "AdamW", "beta1": 0.9, "beta2": 0.95, **ADAM, "weight_decay_dims": [1, 2]},
        "max_norm": MAX_NORM,
        "degrees": {"accumulation_steps": ACCUMULATION_STEPS},
        "loss": loss,
        "gradient_norm": norm.item(),
    }
    if bug.experts:
        step["balance_loss"] = {"weight": BALANCE, "layers": "together", "parts": ACCUMULATION_STEPS}
    write_folder(
        folder,
        config=model.config.to_dict() if bug.experts else CONFIG,
        weights=weights,
        tokens=tokens,
        targets=targets,
        step=step,
        gradients=gradients,
        weights_after=dict(model.named_parameters()),
        experts={layer: torch.cat(parts) for layer, parts in chosen.items()} if bug.experts else None,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
