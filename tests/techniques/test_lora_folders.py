"""LoRA from a Hugging Face folder to peft: checkpoints of adapters, resumed under another layout, merged, exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.hf import build_hf
from tests.hf.test_hf_round_trip import CONFIG, VOCABULARY
from tests.test_families import in_float64
from tests.test_train import run_train
from titanlite.build_llama import build_llama
from titanlite.checkpoint import export
from titanlite.checkpoint.adapters import hash_of_base, lora_of
from titanlite.checkpoint.export import model_options
from titanlite.checkpoint.loading import load_weights
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config.loader import ConfigError
from titanlite.hf.load import load_hf_weights
from titanlite.hf.names import hf_name, to_hf
from titanlite.model import Llama
from titanlite.techniques.lora import Adapters

LORA = """
[lora]
rank = 3
alpha = 12.0
"""
IN_FLOAT64 = ["--training.dtype=float64", "--checkpoint.interval=2", "--optimizer.eps=1e-8"]
TOLERANCE = 1e-11
LOGITS = 1e-12
"""Largest difference of logits, which are of size 1, in float64."""


@pytest.fixture
def folder(tmp_path: Path, assets: Any) -> Path:
    """A folder with `hf`, a small random model and its tokenizer, `text.txt` and `run.toml`."""
    build_hf("llama", vocab_size=VOCABULARY, max_position_embeddings=16).save_pretrained(tmp_path / "hf")
    assets.file.rename(tmp_path / "hf" / "tokenizer.json")
    text = Path(__file__).read_text().splitlines()
    (tmp_path / "text.txt").write_text("\n".join(line for line in text if line.strip()))
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path) + LORA)
    return tmp_path


def train(ranks: Any, folder: Path, n_ranks: int, *options: str, name: str = "run") -> Path:
    """Train on some ranks, and return the folder of the last checkpoint."""
    argv = [str(folder / "run.toml"), f"--job.dump_folder={folder / name}", *IN_FLOAT64, *options]
    assert set(ranks(n_ranks).run(run_train, argv=argv)) == {""}
    return max((folder / name / "checkpoint").glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))


def adapted(path: Path, base: Path) -> Llama:
    """Return the model of a Hugging Face folder with the adapters of a checkpoint, not merged, in float64."""
    reader = CheckpointReader(path)
    options = model_options(path, reader.state)
    model = build_llama(options, max_seq_len=16).double()
    Adapters(model, lora_of(reader), lambda: model).shard_weights(None, None)
    model.materialize(torch.device("cpu"))
    load_hf_weights(base, model, options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(reader.read(f"model.{name}"))
    return model


def merged(path: Path) -> Llama:
    """Return the model with the adapters of a checkpoint merged, in float64."""
    options = model_options(path, CheckpointReader(path).state)
    model = build_llama(options, max_seq_len=16).double()
    model.materialize(torch.device("cpu"))
    load_weights(path, model, options)
    return model


def of_peft(base: Path, adapters: Path, ours: Llama) -> Any:
    """Return transformers' model with peft's adapters, in float64."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    in_float64(model, ours)
    return PeftModel.from_pretrained(model, adapters).eval()


@torch.no_grad()
def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def test_adapters_are_saved_resumed_merged_and_exported(folder: Path, ranks: Any):
    train(ranks, folder, 1, "--training.steps=2")
    path = train(ranks, folder, 2, "--training.steps=4", "--parallelism.tensor_parallel_degree=2")
    assert path.name == "step-4"
    at_once = train(ranks, folder, 1, "--training.steps=4", name="once")
    reader, once = CheckpointReader(path), CheckpointReader(at_once)
    trained = {name for name in reader.shapes if name.startswith(("model.", "optimizer."))}
    assert trained == {name for name in once.shapes if name.startswith(("model.", "optimizer."))}
    assert all(".lora_a" in name or ".lora_b" in name for name in trained)
    assert sum(name.startswith("model.") for name in trained) == 3 * 7 * 2
    assert max(distance(reader.read(name), once.read(name)) for name in trained) < TOLERANCE
    assert reader.state["identity"]["lora.base"] == hash_of_base(str(folder / "hf"))
    b = "model.layers.1.attention.wq.lora_b"
    assert reader.read(b).abs().max() > 1e-3, "not trained"

    ours, tokens = adapted(path, folder / "hf"), torch.arange(32).view(2, 16)
    with torch.no_grad():
        logits = ours(tokens)
        assert distance(logits, merged(path)(tokens)) < LOGITS
        export.run(path, folder / "peft", None)
        theirs = of_peft(folder / "hf", folder / "peft", ours)
        assert distance(logits, theirs(tokens).logits) < LOGITS
        assert distance(logits, theirs.merge_and_unload()(tokens).logits) < LOGITS
    settings = json.loads((folder / "peft" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == f"{folder}/hf"
    assert settings["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]

    export.run(path, folder / "merged", "float32", merge=True)
    written = load_file(folder / "merged" / "model.safetensors")
    options = model_options(path, reader.state)
    for name, weight in merged(path).named_parameters():
        assert torch.equal(written[hf_name(name, options)], to_hf([name], [weight.detach()], options).float()), name
    base = load_file(folder / "hf" / "model.safetensors")
    changed = {name for name in base if not torch.equal(base[name], written[name])}
    assert len(changed) == 3 * 7


def test_adapters_of_another_base_are_rejected(folder: Path, ranks: Any):
    path = train(ranks, folder, 1, "--training.steps=1")
    file = folder / "hf" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.self_attn.q_proj.weight"] += 1
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"has other weights than those that the adapters in .*step-1 belong to"):
        export.run(path, folder / "out", None)
    argv = [str(folder / "run.toml"), *IN_FLOAT64, "--training.steps=2"]
    (message,) = ranks(1).run(run_train, argv=argv)
    assert "saved with lora.base = " in message
