"""Write the fingerprints of a transformers model's first training step, for `titanlite diff`.

    titanlite train RUN.toml --debug.fingerprint_freq=1 --training.steps=1     begins with the weights of a folder
    python examples/fingerprints/transformers_model.py OUTPUT RUN              the same step with transformers
    titanlite diff RUN OUTPUT

RUN is the dump folder of the first command. Its config names a Hugging Face folder in checkpoint.initial_load_path. The
step here has the same weights and batch, but the model, its loss and its gradients are transformers'. The update is not
computed. --change makes one thing wrong.
"""

import argparse
import functools
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from titanlite import build
from titanlite.config import Config, Launch, check, load
from titanlite.config.schema import Comm
from titanlite.data.loader import Batch, SequenceShard, collate
from titanlite.hf.names import from_hf, hf_name
from titanlite.launch.process_group import process_group
from titanlite.techniques.fingerprints import file
from titanlite.techniques.fingerprints.sketch import SIZE, fingerprint, scaled


def change(model: nn.Module, what: str) -> None:
    """Make one thing wrong."""
    if what == "rotary frequencies":
        model.model.rotary_emb.inv_freq.pow_(1.1)
    for layer in model.model.layers:
        if what == "norm epsilon":
            layer.input_layernorm.variance_epsilon = layer.post_attention_layernorm.variance_epsilon = 1e-2
        if what == "gate":  # act(up) * gate instead of act(gate) * up
            mlp = layer.mlp
            mlp.forward = lambda x, mlp=mlp: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))


def of_full(name: str, tensor: Tensor) -> Tensor:
    """Return the fingerprint of a full tensor: a matrix whose rows are tokens or outputs, or a vector."""
    matrix = tensor.detach().reshape(-1, tensor.shape[-1])
    return fingerprint(name, matrix, torch.arange(len(matrix)))


def take_step(config: Config, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the fingerprints of the forward and backward of one batch."""
    found = {
        f"input {name}": of_full(name, x.reshape(-1, 1)) for name, x in zip(batch._fields[:2], batch, strict=False)
    }

    def see(name: str, module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        found[f"forward {name}"] = of_full(name, hidden)
        hidden.register_hook(lambda gradient: found.update({f"backward {name}": of_full(name, gradient)}))

    base = model.model
    modules = {"tok_embeddings": base.embed_tokens, "norm": base.norm}
    modules |= {f"layers.{number}": layer for number, layer in enumerate(base.layers)}
    for name, module in modules.items():
        module.register_forward_hook(functools.partial(see, name))
    losses = nn.functional.cross_entropy(model(batch.tokens).logits.flatten(0, 1), batch.targets.flatten())
    losses.backward()
    found["forward loss"] = scaled(torch.ones(SIZE, dtype=torch.float64), losses.detach().double())
    own = dict(model.named_parameters())
    for name in build.parameter_sizes(config):
        weight = own[hf_name(name, config.model)]
        for phase, tensor in (("input", weight), ("gradient", weight.grad)):
            found[f"{phase} {name}"] = of_full(name, from_hf(name, tensor.detach(), config.model))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--change", choices=("rotary frequencies", "norm epsilon", "gate"), default="")
    arguments = parser.parse_args()
    launch = Launch(0, 0, 1, 1, n_devices=0)
    config = check(load([str(arguments.run / "config.toml")]), launch)
    with process_group(launch, Comm(trace_buf_size=0), ""):
        sequences = build.build_data(config, builds_cache=True).train
    indices = range(config.training.global_batch_size)
    batch = collate([sequences[index] for index in indices], SequenceShard(), document_mask=False, pin=False)
    dtype = getattr(torch, config.training.dtype)
    model = AutoModelForCausalLM.from_pretrained(config.checkpoint.initial_load_path, dtype=dtype)
    change(model, arguments.change)
    (described, _) = file.read(arguments.run, 1)
    file.write(arguments.output, described, take_step(config, model, batch))


if __name__ == "__main__":
    main()
