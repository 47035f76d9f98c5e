"""From a Hugging Face folder through training under a layout to an exported folder: the weights are those that
transformers gets from the same batches."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.helpers.hf import CORRECTION, build_hf
from tests.test_train import run_train
from titanlite import build, config
from titanlite.checkpoint import export
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config.loader import ConfigError

VOCABULARY, STEPS, LR = 400, 3, 1e-3
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "mixtral": {},
    "qwen3_moe": {},
    "olmoe": {},
}
FAMILIES |= {"deepseek_v3": {}, "deepseek_v3, yarn, no latent of queries": {}, "deepseek_v3, epsilon of Moonlight": {}}
FAMILIES |= {"gpt_oss": {}, "deepseek_v2": {}, "deepseek_v2, groups, yarn, no latent of queries": {}}
"""Settings of transformers that differ from those of tests/helpers/hf.py."""
CONFIG = """
[job]
dump_folder = "{folder}/run"
[model]
flavor = "from_hf"
hf_assets_path = "{folder}/hf"
[training]
dataset = "text"
dataset_path = "{folder}/text.txt"
text_sample_by = "line"
cache_folder = "{folder}/cache"
seq_len = 16
local_batch_size = 1
global_batch_size = 4
steps = 3
[optimizer]
lr = 1e-3
eps = 1e-3
[lr_scheduler]
warmup_steps = 0
decay_ratio = 0
[checkpoint]
enable = true
initial_load_path = "{folder}/hf"
"""
LAYOUTS: dict[str, tuple[str, ...]] = {
    "shard 2 x tp 2": ("--parallelism.tensor_parallel_degree=2",),
    "pp 2 x shard 2": (
        "--parallelism.pipeline_parallel_degree=2",
        "--training.local_batch_size=2",
        "--parallelism.pipeline_parallel_microbatch_size=1",
    ),
    "cp 2 x replicate 2": (
        "--parallelism.context_parallel_degree=2",
        "--parallelism.data_parallel_replicate_degree=2",
    ),
    "shard 2 x tp 2, ep": ("--parallelism.tensor_parallel_degree=2", "--parallelism.expert_parallel_degree=2"),
    "shard 4, ep": ("--parallelism.expert_parallel_degree=2",),
}
CASES = [
    ("llama", "shard 2 x tp 2"),
    ("qwen3", "shard 2 x tp 2"),
    ("llama", "pp 2 x shard 2"),
    ("llama", "cp 2 x replicate 2"),
    ("qwen3", "cp 2 x replicate 2"),
    ("mixtral", "pp 2 x shard 2"),
    ("mixtral", "shard 2 x tp 2"),
    ("qwen3_moe", "shard 4, ep"),
    pytest.param("olmoe", "shard 2 x tp 2, ep"),
    ("olmoe", "cp 2 x replicate 2"),
    ("deepseek_v3", "shard 4, ep"),
    ("deepseek_v3", "shard 2 x tp 2, ep"),
    ("deepseek_v3", "pp 2 x shard 2"),
    ("deepseek_v3, yarn, no latent of queries", "shard 2 x tp 2"),
    ("deepseek_v3, yarn, no latent of queries", "cp 2 x replicate 2"),
    ("gpt_oss", "shard 2 x tp 2, ep"),
    ("gpt_oss", "shard 2 x tp 2"),
    ("gpt_oss", "cp 2 x replicate 2"),
    ("deepseek_v3, epsilon of Moonlight", "shard 2 x tp 2"),
    ("deepseek_v2", "shard 2 x tp 2, ep"),
    ("deepseek_v2, groups, yarn, no latent of queries", "pp 2 x shard 2"),
]
TOLERANCE = 2e-6
"""Float32 rounds a gradient's terms to 6e-8 of their size, and a gradient is some 100 of them: about 6e-7 of the
largest gradients, whose size is about 1. With eps = 1e-3 Adam moves a weight by lr x g / (|g| + eps), so an error of
6e-7 in g is at most lr / eps = 1 times as large in the weight. It is so at each of 3 steps."""


def train_with_transformers(argv: list[str], folder: Path, family: str) -> None:
    """Take the steps of the config with transformers' model and torch's AdamW in one process, and save the weights."""
    job = config.check(config.load(argv), config.Launch.from_environment(n_devices=0))
    sequences, _, _ = build.build_data(job, builds_cache=True)
    model = build_hf(family, vocab_size=VOCABULARY, max_position_embeddings=16, **FAMILIES[family])
    named: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        named[parameter.dim() > 1 and not name.endswith("bias")].append(parameter)
    matrices, vectors = named[True], named[False]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, LR, betas=(0.9, 0.95), eps=1e-3)
    for step in range(STEPS):
        packed = [sequences[4 * step + i] for i in range(4)]
        tokens, targets = (torch.stack([torch.as_tensor(each[k]) for each in packed]) for k in (0, 1))
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), folder / "expected.pt")


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_three_steps_between_import_and_export_equal_transformers(
    family: str, layout: str, tmp_path: Path, ranks: Any, assets: Any
):
    from transformers import AutoModelForCausalLM

    original = build_hf(family, vocab_size=VOCABULARY, max_position_embeddings=16, **FAMILIES[family])
    original.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    assets.file.rename(tmp_path / "hf" / "tokenizer.json")
    text = Path(__file__).read_text().splitlines()
    (tmp_path / "text.txt").write_text("\n".join(line for line in text if line.strip()))
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path))
    argv = [str(tmp_path / "run.toml")]
    ranks(1).run(train_with_transformers, argv=argv, folder=tmp_path, family=family)
    untie = ["--model.tie_embeddings=false"] if "pp" in layout and "tie_word_embeddings" in FAMILIES[family] else []
    fixed = ["--model.moe.balance_bias_rate=0"] if "deepseek_v3" in family else []  # as in transformers
    assert set(ranks(4).run(run_train, argv=[*argv, *LAYOUTS[layout], *untie, *fixed])) == {""}
    export.run(tmp_path / "run" / "checkpoint", tmp_path / "out", None, None, None)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    assert trained.keys() == expected.keys()
    start = original.state_dict()
    for name, weight in expected.items():
        is_trained = (weight - start[name]).abs().max() > LR / 2
        assert is_trained != name.endswith(CORRECTION), f"{name}: trained {is_trained}"
        assert (trained[name] - weight).abs().max() < TOLERANCE, name


@pytest.mark.nightly
def test_a_damaged_folder_stops_every_rank(tmp_path: Path, ranks: Any, assets: Any):
    """A weight that is missing in the last file: only the ranks of the second pipeline stage open it."""
    original = build_hf("llama", vocab_size=VOCABULARY, max_position_embeddings=16)
    original.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    assets.file.rename(tmp_path / "hf" / "tokenizer.json")
    (tmp_path / "text.txt").write_text("some text\n" * 500)
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path))
    last = sorted((tmp_path / "hf").glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-8])
    argv = [str(tmp_path / "run.toml"), *LAYOUTS["pp 2 x shard 2"]]
    (message,) = set(ranks(4).run(run_train, argv=argv))
    assert message.startswith(f"{last}: cannot be read as safetensors (")


def test_a_folder_of_another_family_is_rejected(tmp_path: Path):
    build_hf("qwen3", vocab_size=VOCABULARY).save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(file.read_text().replace('"qwen3"', '"bloom"'))
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path))
    with pytest.raises(ConfigError, match=r"config\.json: model_type = \"bloom\""):
        config.load([str(tmp_path / "run.toml")])


@pytest.mark.nightly
def test_the_last_step_is_written_as_a_hugging_face_folder(tmp_path: Path):
    """In bytes, without a folder to start from; the second start finds nothing to do."""
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path))
    arguments = ["--model.flavor=debug", "--model.n_layers=1", "--model.hf_assets_path=", "--training.steps=1"]
    arguments += [
        "--checkpoint.initial_load_path=",
        "--checkpoint.last_save_in_hf",
        "--checkpoint.export_dtype=bfloat16",
    ]
    (tmp_path / "text.txt").write_text("some text\n" * 500)
    for exported in (True, False):
        command = [sys.executable, "-m", "titanlite.train", str(tmp_path / "run.toml"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert ("step-1-hf: step-1, bfloat16, safetensors files: 1" in done.stdout) == exported
    folder = tmp_path / "run" / "checkpoint"
    weight = load_file(folder / "step-1-hf" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(weight, CheckpointReader(folder / "step-1").read("model.norm.weight").bfloat16())
