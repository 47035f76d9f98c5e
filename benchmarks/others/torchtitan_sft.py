"""Run torchtitan 0.3.0's config sft_debugmodel on a CPU, for published_curves.py.

    python -m benchmarks.others.torchtitan_sft --assets FOLDER --out FOLDER --seed N [--sequences 8] [--decay-norms]
                                               [--as-published]

The training is torchtitan's: its config, model, loader, optimizer and loop, in one process. It writes the weights that
it starts from into the folder --out, as its own adapter exports them to Hugging Face, and prints a JSON line with the
tokens and labels of every conversation, and one with loss, gradient norm and learning rate for every step.

Besides what torchtitan_device.py says, these things are replaced or set, because there is no GPU:

    attention     FlexAttention has no backward on a CPU: torch's scaled_dot_product_attention, with the same mask
    float32       instead of bfloat16, so that the losses can be compared with another program's to their last digits
    FSDP's sums   plain sums, as NCCL alone has the pre-multiplied ones
    CUDA graphs   off
    timeouts      of collectives are not shortened after the first step: torch 2.13 has no torch.distributed.set_timeout

The optimizer of torchtitan also decays the scales of norms. Here it does so with --decay-norms only.

--as-published takes back two things that torchtitan has changed since it published its losses (commit 04893dc). The
first token of an answer was no target. Documents ended where the inputs have EOS, which a conversation does not, so
attention was causal over all conversations of a sequence. Positions began at 0 in each, as now.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.others.torchtitan_device import ONE_RANK, patched_device

VERSION = "0.3.0"

if importlib.metadata.version("torchtitan") != VERSION:
    sys.exit(f"error: torchtitan is {importlib.metadata.version('torchtitan')}; this is for {VERSION}")
with patched_device():  # torchtitan's modules store the device type during import
    from torch.nn.attention.flex_attention import create_mask
    from torchtitan.components.loss import IGNORE_INDEX
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.llama3.config_registry import sft_debugmodel
    from torchtitan.trainer import Trainer


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: Any, **options: Any) -> tuple:
    """Compute FlexAttention's result from the same mask."""
    (n_sequences, _, n_tokens, _), device = q.shape, q.device
    mask = create_mask(block_mask.mask_mod, n_sequences, None, n_tokens, n_tokens, device=device)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options["scale"]), None


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple:
    """Compute causal attention over all documents of a sequence."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=options["scale"]), None


def without_first_target(tokenize: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that makes inputs and labels of a sample, whose first target is ignored."""

    def tokenize_sample(sample: Any) -> tuple[list[int], list[int]]:
        inputs, labels = tokenize(sample)
        labels[next(index for index, label in enumerate(labels) if label != IGNORE_INDEX)] = IGNORE_INDEX
        return inputs, labels

    return tokenize_sample


def configured(arguments: argparse.Namespace) -> Trainer.Config:
    """Return torchtitan's config, with this folder's data and what a CPU needs."""
    config = sft_debugmodel()
    config.hf_assets_path = str(arguments.assets)
    config.dump_folder = str(arguments.out / "torchtitan")
    config.dataloader.load_dataset_kwargs["data_files"] = str(arguments.assets / "data.json")
    config.training.local_batch_size = arguments.sequences
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.debug.seed = arguments.seed
    config.debug.enable_structured_logging = False
    if not arguments.decay_norms:
        (group,) = config.optimizer.param_groups
        options = group.optimizer_kwargs | {"weight_decay": 0.0}
        config.optimizer.param_groups.insert(0, dataclasses.replace(group, pattern="norm", optimizer_kwargs=options))
    return config


def export(trainer: Trainer, folder: Path) -> None:
    """Write the weights under the names of Hugging Face's Llama, with its config.json."""
    (model,) = trainer.model_parts
    model_config = trainer.model_config
    weights = trainer.config.model_spec.state_dict_adapter(model_config, None).to_hf(model.state_dict())
    full = {name: weight.full_tensor() if isinstance(weight, DTensor) else weight for name, weight in weights.items()}
    save_file({name: weight.contiguous() for name, weight in full.items()}, folder / "model.safetensors")
    layer = model_config.layers[0]
    rope = layer.attention.rope
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model_config.dim,
        "intermediate_size": layer.feed_forward.w1.out_features,
        "num_hidden_layers": len(model_config.layers),
        "num_attention_heads": layer.attention.n_heads,
        "num_key_value_heads": layer.attention.n_kv_heads or layer.attention.n_heads,
        "vocab_size": model_config.vocab_size,
        "rms_norm_eps": model_config.norm.eps,
        "tie_word_embeddings": model_config.enable_weight_tying,
        "rope_theta": rope.theta,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": rope.scaling_factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        },
        "max_position_embeddings": rope.max_seq_len,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True, help="data.json, and the tokenizer's two files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--decay-norms", action="store_true")
    parser.add_argument("--as-published", action="store_true")
    arguments = parser.parse_args()
    for name, value in ONE_RANK.items():
        os.environ.setdefault(name, value)
    FlexAttention.compiled_flex_attn = staticmethod(causal_attention if arguments.as_published else attention)
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group: None
    trainer = configured(arguments).build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    export(trainer, arguments.out)
    dataset = trainer.dataloader.dataset
    if arguments.as_published:
        dataset._tokenize_sample = without_first_target(dataset._tokenize_sample)
    conversations = [dataset._tokenize_sample(sample) for sample in dataset._original_data]
    print(json.dumps({"conversations": conversations}), flush=True)

    def log(step: int, loss: float, largest: float, norm: float, extra_metrics: dict[str, Any]) -> None:
        lr = next(value for name, value in extra_metrics.items() if name.startswith("lr/"))
        print(json.dumps({"step": step, "loss": loss, "norm": norm, "lr": lr}), flush=True)

    trainer.metrics_processor.log = log
    trainer.train()


if __name__ == "__main__":
    main()
