"""Export of a checkpoint's LoRA adapters as a folder of Hugging Face's peft: adapter_config.json and
adapter_model.safetensors. Rows of B have the same order as the base weight's rows in transformers (names.py)."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint.adapters import adapters_of
from titanlite.checkpoint.files import bytes_of
from titanlite.checkpoint.manifest import DTYPE_NAMES
from titanlite.config.loader import ConfigError
from titanlite.config.schema import Lora, Model
from titanlite.files import safetensors
from titanlite.files.new_folder import new_folder
from titanlite.hf.export import write_json
from titanlite.hf.names import hf_tensors, is_stacked, is_transposed, tensor_shapes, to_hf


def _check_targets(names: Collection[str]) -> None:
    """Raise ConfigError for adapters, in a model with experts, that peft 0.21 takes for those of other layers."""
    merge, of_experts = "export the merged model with --merge", {name[-2:] for name in names if ".experts." in name}
    if of_experts not in (set(), {"w2"}, {"w1", "w2", "w3"}):
        raise ConfigError([f"lora.targets: of experts, peft takes adapters of w2 or of all three weights; {merge}"])
    if dense := [name for name in names if ".feed_forward.w" in name]:
        raise ConfigError([f"{dense[0]}: peft takes such adapters, in a model with experts, for theirs; {merge}"])


def export_adapters(reader: Any, options: Model, lora: Lora, out: Path, *, base: str, dtype: torch.dtype) -> int:
    """Write adapters and return their number. `base` is the folder of the base weights, `reader` a CheckpointReader.
    Raises ConfigError if `out` exists, or for an adapter that peft lacks."""
    shapes, tensors, modules = tensor_shapes(options), dict[str, tuple[str, torch.Size]](), list[str]()
    adapters = adapters_of(reader, lora, shapes)
    if options.moe.n_experts:
        _check_targets(adapters)
    there = {name: (names, ours) for names, ours in hf_tensors(options, shapes).items() for name in ours}
    for name, pair in adapters.items():
        own, together = there[name]
        if len(together) > 1 or is_transposed(name, options) or is_stacked(name, options):
            problem = f"{name}: {own[0]} of transformers contains other weights too, or is transposed"
            raise ConfigError([f"{problem}, so peft has no such adapter; export the merged model with --merge"])
        of_a, of_b = (reader.shapes[each][-2:] for each in pair)
        for module in (each.removesuffix(".weight") for each in own):  # transformers has a module for each expert
            modules.append(module)
            tensors[f"base_model.model.{module}.lora_A.weight"] = DTYPE_NAMES[dtype], of_a[::-1]
            tensors[f"base_model.model.{module}.lora_B.weight"] = DTYPE_NAMES[dtype], of_b

    def contents() -> Iterator[memoryview]:
        for name, pair in adapters.items():
            stacked = (each.reshape(-1, *each.shape[-2:]).to(dtype) for each in map(reader.read, pair))
            for a_IR, b_OR in zip(*stacked, strict=True):
                yield from (bytes_of(each.contiguous()) for each in (a_IR.T, to_hf([name], [b_OR], options)))

    short = {module.rpartition(".")[2] for module in modules}
    with new_folder(out) as folder:
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "bias": "none"}
        config |= {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0, "use_rslora": False}
        config |= {"base_model_name_or_path": str(Path(base).resolve())}
        config["target_modules"] = sorted(modules if options.moe.n_experts else short)
        write_json(folder / "adapter_config.json", config)
        safetensors.write(folder / "adapter_model.safetensors", tensors, contents(), metadata={"format": "pt"})
    return len(modules)
