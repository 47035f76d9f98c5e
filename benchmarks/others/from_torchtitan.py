"""Load in titanlite a model that torchtitan 0.2.2 has exported as a Hugging Face folder, and compare the two.

    titan/bin/python -m benchmarks.others.from_torchtitan FOLDER [torchtitan's own options]  (alone or under torchrun)
    python -m benchmarks.others.from_torchtitan --compare EXPORTED FOLDER/step-N.safetensors

The first command runs in torchtitan's environment, on a CPU as torchtitan_cpu.py describes. torchtitan trains its debug
model, writes its own checkpoint at step 5 and, with checkpoint.last_save_in_hf, the last step as a Hugging Face folder.
Of both steps FOLDER/step-N.safetensors has what its model in memory is and does: all weights, tokens, and the logits
that it computes in float32. The checkpoint of step 5 is exported by torchtitan's script, of its repository:

    titan/bin/python scripts/checkpoint_conversion/convert_to_hf.py FOLDER/checkpoint/step-5 EXPORTED \\
        --model_name llama3 --model_flavor debugmodel

The second command writes the config.json that torchtitan does not, loads the folder as a run does, and prints whether
all weights are the same bits, the largest difference of the logits, and the loss of each.
"""

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

CONFIG = {
    **{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 16},
    **{"num_key_value_heads": 16, "intermediate_size": 768, "vocab_size": 2048, "rms_norm_eps": 1e-5},
    **{"rope_theta": 500_000, "max_position_embeddings": 131_072, "hidden_act": "silu", "tie_word_embeddings": False},
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
}
"""torchtitan's debugmodel in the words of Hugging Face."""


def train_and_record(folder: Path) -> None:
    """Train in torchtitan, and write what its model computes after steps 5 and 10."""
    options = ["--training.steps=10", "--training.seq_len=256", "--training.local_batch_size=8", "--debug.seed=1"]
    options += ["--training.mixed_precision_param=float32", "--lr_scheduler.warmup_steps=2", "--checkpoint.enable"]
    options += ["--checkpoint.interval=5", "--checkpoint.last_save_in_hf", f"--job.dump_folder={folder}"]
    options += ["--activation_checkpoint.mode=none"]  # checkpointing would change names of parameters
    sys.argv[1:2] = options

    from torchtitan import train

    from benchmarks.others import torchtitan_cpu  # now, since torchtitan reads its arguments when it is imported

    class Trainer(train.Trainer):
        def train_step(self, data_iterator: Any) -> None:
            super().train_step(data_iterator)
            if self.step in (5, 10):
                tokens = torchtitan_cpu.Text(256, 0, 1, seed=0).tokens[:1024].view(4, 256)
                with torch.no_grad():
                    logits = self.model_parts[0](tokens)
                for module in self.model_parts[0].modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()  # the optimizer's state is saved by the names of sharded parameters
                own = {name: p.detach() for name, p in torchtitan_cpu.named_parameters(self.model_parts).items()}
                recorded = {**torchtitan_cpu.full_tensors(own), "tokens": tokens, "logits": logits}
                if torch.distributed.get_rank() == 0:
                    save_file(recorded, folder / f"step-{self.step}.safetensors")

    torchtitan_cpu.train_llama(Trainer, torchtitan_cpu.build_dataloader, torchtitan_cpu.Metrics)


def compare(exported: Path, recorded: Path) -> None:
    """Print how far titanlite's model of an exported folder is from torchtitan's."""
    from titanlite import build, config
    from titanlite.checkpoint.loading import load_weights

    (exported / "config.json").write_text(json.dumps(CONFIG, indent=1))
    loaded = config.load(["debug", "--model.flavor=from_hf", f"--model.hf_assets_path={exported}"]).config
    model = build.meta_model(loaded)
    model.materialize(torch.device("cpu"))
    load_weights(exported, model, loaded.model)
    theirs = load_file(recorded)
    tokens, logits = theirs.pop("tokens"), theirs.pop("logits")
    same = {name: torch.equal(parameter, theirs[name]) for name, parameter in model.named_parameters()}
    assert same.keys() == theirs.keys()
    with torch.no_grad():
        own = model(tokens)
    losses = [functional.cross_entropy(each[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) for each in (own, logits)]
    print(
        f"{platform.machine()}, torch {torch.__version__}, {recorded}: the same bits in {sum(same.values())}", end=" "
    )
    print(f"of {len(same)} weights; logits up to {logits.abs().max():.3f}, difference at most", end=" ")
    print(f"{(own - logits).abs().max():.1e}; loss {losses[0]:.7f}, torchtitan's {losses[1]:.7f}")


if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        compare(*map(Path, sys.argv[2:4]))
    else:
        train_and_record(Path(sys.argv[1]))
