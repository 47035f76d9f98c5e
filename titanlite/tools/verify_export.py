"""Compare an exported folder, as transformers loads it, with the checkpoint that it was exported from, block by block.

Both models compute in float64, from weights rounded to the folder's dtype. Norms, softmax and rotary embeddings of
transformers always compute in float32; InFloat64 makes them compute in float64, so only float64 rounding differs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from titanlite.build_llama import build_llama
from titanlite.checkpoint.average_reader import AverageReader
from titanlite.config.hf.values import read_json_object
from titanlite.config.loader import ConfigError
from titanlite.data.open import build_tokenizer
from titanlite.hf.load import EXPERT_DIMS
from titanlite.model import Llama
from titanlite.tools.generate.folder import ModelFolder, open_folder

TOLERANCE = 1e-9  # largest difference between activations that count as equal, relative to the largest activation
N_SEQUENCES, LONGEST = 4, 64
"""The least number of random sequences that are compared, and the largest number of tokens in each of them."""


class InFloat64(TorchFunctionMode):
    """Makes torch's functions compute in float64 where the caller asks for float32 by a dtype argument or .float()."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        function = Tensor.double if function is Tensor.float else function
        return function(*map(wide, arguments), **{key: wide(value) for key, value in (options or {}).items()})


def verify(checkpoint: Path, out: Path, ema: bool = False) -> bool:
    """Compare the logits of an exported folder with those of the checkpoint (of its averaged weights if `ema`), and the
    BOS tokens that the two tokenizers put before a text. Print the result, and return whether all are equal."""
    own, exported = open_folder(checkpoint), open_folder(out)
    is_same = compare(own, exported, ema, read_json_object(out / "config.json").get("max_position_embeddings", LONGEST))
    path = own.value("model", "hf_assets_path")
    if path is None or not (out / "tokenizer.json").is_file():
        print(f"tokenizer: not compared, since {out if path is not None else own.path} has none")
        return is_same
    before, after = build_tokenizer(path).prefix, build_tokenizer(str(out)).prefix
    what = f"the tokens {after}" if after else "no BOS"
    wrong = f"the exported tokenizer begins a text with {what}, and training began each with {before}"
    print("tokenizer: begins a text as in training" if before == after else wrong)
    return is_same and before == after


def compare(own: ModelFolder, exported: ModelFolder, ema: bool, max_seq_len: int) -> bool:
    """Compare logits; print the first block that differs. Raises ConfigError if transformers cannot load `exported`."""
    options, out = own.options, exported.path
    length = options.learned_positions or min(max_seq_len, LONGEST)
    n_sequences = max(N_SEQUENCES, options.moe.n_experts // 4)  # enough tokens for every expert
    tokens = torch.randint(options.vocab_size, (n_sequences, length), generator=torch.Generator().manual_seed(0))
    llama = load_llama(own, exported.dtype, length, ema)
    ours = recorded(llama.layers.values(), lambda: llama(tokens))
    ours[-1].square().mean().backward()
    with InFloat64(), torch.no_grad():
        hf = load_hf(out, has_experts=options.moe.n_experts > 0)
        (blocks,) = [each for each in hf.base_model.children() if isinstance(each, nn.ModuleList)]
        theirs = recorded(blocks, lambda: hf(tokens, use_cache=False).logits)
    if len(theirs) != len(ours):
        raise ConfigError([f"{out}: transformers has {len(theirs) - 2} blocks, and the checkpoint {len(ours) - 2}"])
    names = ["the embedding", *(f"layers.{number}" for number in llama.layers), "the output head or the norm before it"]
    pairs = [(one.detach(), other.view_as(one)) for one, other in zip(ours, theirs, strict=True)]
    differences = [float((one - other).abs().max() / one.abs().max()) for one, other in pairs]
    drifting = [name for name, difference in zip(names, differences, strict=True) if not difference < TOLERANCE]
    if not torch.equal(hf.get_input_embeddings().weight, llama.tok_embeddings.weight):
        drifting.append("the embedding, of tokens that were not compared")
    without = [name for name, each in llama.named_parameters() if not has_influence(each)]
    verdict = "other" if drifting else "perhaps not the same" if without else "the same"
    first = (drifting or ["none"])[0]
    print(f"transformers computes {verdict} logits: {differences[-1]:.0e}; first block that drifts: {first}")
    print(f"compared: {tokens.numel()} random tokens in float64, differences relative to the largest logit")
    if without:
        shown = f"{len(without)} tensors have no influence on them, such as {', '.join(without[:3])}"
        print(f"no comparison of logits can tell: {shown}")
    return verdict == "the same"


def has_influence(weight: nn.Parameter) -> bool:
    """Return whether the logits depend on a weight; for stacked experts, on the weight of each expert."""
    gradient = torch.zeros(1) if weight.grad is None else weight.grad
    return bool(gradient.flatten(1).any(1).all() if gradient.dim() == EXPERT_DIMS else gradient.any())


def load_llama(folder: ModelFolder, dtype: torch.dtype, length: int, ema: bool) -> Llama:
    """Return the checkpoint's model in float64, with weights rounded to `dtype` as in an export."""
    llama = build_llama(folder.options, max_seq_len=length).to(torch.float64)
    llama.materialize(torch.device("cpu"))
    folder.load(llama)
    average = AverageReader(folder.path) if ema else None
    for name, weight in llama.named_parameters():
        weight.data.copy_((average.read(f"model.{name}") if average else weight).to(dtype))
    return llama


def load_hf(folder: Path, *, has_experts: bool) -> Any:
    """Return transformers' model of a folder in float64. Raises ConfigError if its tensors are not the folder's."""
    from transformers import AutoModelForCausalLM

    try:
        choices = {"dtype": torch.float64, "attn_implementation": "eager", "output_loading_info": True}
        choices |= {"experts_implementation": "eager"} if has_experts else {}  # torch's grouped products lack float64
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
