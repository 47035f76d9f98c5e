"""Compares an exported folder, as transformers loads it, with the checkpoint that it is from, block by block.

Both compute in float64, from the weights in the folder's dtype. Where transformers names float32 whatever the dtype, as
in norms, softmax and rotary embeddings, it computes in float64 here, so that only rounding differs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from titanlite.build_llama import build_llama
from titanlite.checkpoint.loading import load_weights
from titanlite.config.loader import ConfigError
from titanlite.config.schema import Model
from titanlite.data.tokenizer import Tokenizer
from titanlite.hf.load import EXPERT_DIMS
from titanlite.model import Llama

TOLERANCE = 1e-9
"""Largest difference of equal activations, relative to the largest one."""
N_SEQUENCES, LONGEST = 4, 64
"""Random sequences that are compared, at least, and tokens of each at most."""


class InFloat64(TorchFunctionMode):
    """Has torch's functions compute in float64 where they are asked for float32."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        function = Tensor.double if function is Tensor.float else function
        return function(*map(wide, arguments), **{key: wide(value) for key, value in (options or {}).items()})


def verify(checkpoint: Path, options: Model, out: Path, dtype: torch.dtype, max_seq_len: int) -> bool:
    """Print whether transformers computes from a folder what titanlite computes from the checkpoint, and the first
    block that drifts. Return whether it does. Raises ConfigError if transformers cannot load the folder."""
    length = min(max_seq_len, LONGEST)
    n_sequences = max(N_SEQUENCES, options.moe.n_experts // 4)  # several tokens for each expert
    tokens = torch.randint(options.vocab_size, (n_sequences, length), generator=torch.Generator().manual_seed(0))
    llama = load_llama(checkpoint, options, dtype, length)
    ours = recorded(llama.layers.values(), lambda: llama(tokens))
    ours[-1].square().mean().backward()
    with InFloat64(), torch.no_grad():
        hf = load_hf(out, has_experts=options.moe.n_experts > 0)
        (blocks,) = [each for each in hf.base_model.children() if isinstance(each, nn.ModuleList)]
        theirs = recorded(blocks, lambda: hf(tokens, use_cache=False).logits)
    if len(theirs) != len(ours):
        raise ConfigError([f"{out}: transformers has {len(theirs) - 2} blocks, and the checkpoint {len(ours) - 2}"])
    names = ["the embedding", *(f"layers.{number}" for number in llama.layers), "the output head or the norm before it"]
    differences = [relative(one.detach(), other) for one, other in zip(ours, theirs, strict=True)]
    drifting = next((name for name, own in zip(names, differences, strict=True) if not own < TOLERANCE), "none")
    if drifting == "none" and not torch.equal(hf.get_input_embeddings().weight, llama.tok_embeddings.weight):
        drifting = "the embedding, of tokens that were not compared"
    without = [name for name, each in llama.named_parameters() if not has_influence(each)]
    is_same = drifting == "none" and not without
    verdict = "the same" if is_same else "other" if drifting != "none" else "perhaps not the same"
    print(f"transformers computes {verdict} logits: {differences[-1]:.0e}; first block that drifts: {drifting}")
    print(f"compared: {tokens.numel()} random tokens in float64, differences relative to the largest logit")
    if without:
        shown = ", ".join(without[:3])
        print(f"no comparison of logits can tell: {len(without)} tensors have no influence on them, such as {shown}")
    return is_same


def has_influence(weight: nn.Parameter) -> bool:
    """Return whether the logits depend on a weight; on that of each expert, where experts are stacked."""
    gradient = torch.zeros(1) if weight.grad is None else weight.grad
    return bool(gradient.flatten(1).any(1).all() if gradient.dim() == EXPERT_DIMS else gradient.any())


def load_llama(checkpoint: Path, options: Model, dtype: torch.dtype, length: int) -> Llama:
    """Return the checkpoint's model in float64, its weights rounded to a dtype first, as the export rounds them."""
    rounded, llama = (build_llama(options, max_seq_len=length).to(kind) for kind in (dtype, torch.float64))
    for model in (rounded, llama):
        model.materialize(torch.device("cpu"))
    load_weights(checkpoint, rounded, options)
    llama.load_state_dict(rounded.state_dict())
    return llama


def load_hf(folder: Path, *, has_experts: bool) -> Any:
    """Return transformers' model of a folder in float64. Raises ConfigError if it lacks, or does not read, a tensor."""
    from transformers import AutoModelForCausalLM

    try:
        choices = {"dtype": torch.float64, "attn_implementation": "eager", "output_loading_info": True}
        choices |= {"experts_implementation": "eager"} if has_experts else {}  # grouped products have no float64
        model, info = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **choices)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError([f"{folder}: transformers cannot load it: {' '.join(str(error).split())[:300]}"]) from None
    if problems := {key: sorted(map(str, names))[:3] for key, names in info.items() if names}:
        raise ConfigError([f"{folder}: transformers loads other tensors than the folder has: {problems}"])
    return model.eval()


def recorded(blocks: Any, forward: Callable[[], Tensor]) -> list[Tensor]:
    """Return the input of the first block, the output of each block, and the logits of a forward."""
    found: list[Tensor] = []

    def record(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        found.extend(([] if found else [inputs[0]]) + [output[0] if isinstance(output, tuple) else output])

    hooks = [block.register_forward_hook(record) for block in blocks]
    logits = forward()
    for hook in hooks:
        hook.remove()
    return [*found, logits]


def relative(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest number of the first."""
    return float((one.flatten() - other.flatten()).abs().max() / one.abs().max())


def beginnings(trained: Tokenizer | None, exported: Tokenizer | None) -> str:
    """Return how the exported tokenizer begins a text in another way than the training's did; "" if it does not."""
    before, after = (each.prefix if each else [] for each in (trained, exported))
    if trained is None or before == after:
        return ""
    what = "no BOS" if not after else f"the tokens {after}"
    return f"the exported tokenizer begins a text with {what}, and training began each with {before}"
