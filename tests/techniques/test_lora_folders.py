"""LoRA from a Hugging Face folder to peft: checkpoints of adapters, resumed under another layout, merged, exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.checkpoint import change_manifest
from tests.helpers.hf import build_hf
from tests.hf.test_hf_round_trip import CONFIG, VOCABULARY
from tests.test_families import in_float64
from tests.test_train import run_train
from titanlite import build, config
from titanlite.build_llama import build_llama
from titanlite.checkpoint import export
from titanlite.checkpoint.adapters import hash_of_base, lora_of
from titanlite.checkpoint.export import model_options
from titanlite.checkpoint.loading import load_weights
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config.loader import ConfigError
from titanlite.files.durable import checksum
from titanlite.hf import peft
from titanlite.hf.names import hf_name, to_hf
from titanlite.model import Llama
from titanlite.parallel import mesh
from titanlite.techniques.lora import Adapters
from titanlite.tools.checkpoint import average
from titanlite.tools.generate import command as generate
from titanlite.tools.parity.reference import trace_of

LORA = """
[lora]
rank = 3
alpha = 12.0
"""
IN_FLOAT64 = ["--training.dtype=float64", "--checkpoint.interval=2", "--optimizer.eps=1e-8"]
FIXED = {"deepseek_v3": ["--model.moe.balance_bias_rate=0"]}
TOLERANCE = 1e-11
LOGITS = 1e-12
"""Largest difference of logits, which are of size 1, in float64."""


@pytest.fixture
def folder(tmp_path: Path, assets: Any) -> Path:
    return folder_of("llama", tmp_path, assets)


def folder_of(family: str, tmp_path: Path, assets: Any) -> Path:
    """Return a folder with `hf`, a small random model and its tokenizer, `text.txt` and `run.toml`."""
    vocab_size = VOCABULARY + (family != "llama")  # some families' tokenizers have an EOS of their own
    build_hf(family, vocab_size=vocab_size, max_position_embeddings=16).save_pretrained(tmp_path / "hf")
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
    """Return the model of a base with the adapters of a checkpoint, not merged, in float64."""
    reader = CheckpointReader(path)
    options = model_options(path, reader.state)
    model = build_llama(options, max_seq_len=16).double()
    Adapters(model, lora_of(reader), lambda: model).shard_weights(None, None)
    model.materialize(torch.device("cpu"))
    load_weights(base, model, options)
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

    has_experts = any(".experts." in name for name, _ in ours.named_modules())
    loop = {"experts_implementation": "eager"} if has_experts else {}  # transformers' other ones lack float64
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, **loop)
    in_float64(model, ours)
    return PeftModel.from_pretrained(model, adapters).eval()


@torch.no_grad()
def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@torch.no_grad()
def distances_of_logits(path: Path, folder: Path) -> list[float]:
    """Export the adapters of a checkpoint to folder/peft. Return how far three models are from the one with adapters:
    the merged model, peft's, and peft's after its own merge."""
    export.run(path, folder / "peft", None)
    ours, tokens = adapted(path, folder / "hf"), torch.arange(32).view(2, 16)
    theirs = of_peft(folder / "hf", folder / "peft", ours)
    logits = [merged(path)(tokens), theirs(tokens).logits, theirs.merge_and_unload()(tokens).logits]
    return [distance(ours(tokens), each) for each in logits]


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

    assert max(distances_of_logits(path, folder)) < LOGITS
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


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "qwen3_moe", "olmoe"])
def test_adapters_of_experts_are_saved_resumed_merged_and_exported(
    family: str, tmp_path: Path, assets: Any, ranks: Any
):
    folder, options = folder_of(family, tmp_path, assets), ['--lora.targets=["wo", "experts"]', *FIXED.get(family, [])]
    train(ranks, folder, 1, "--training.steps=2", *options)
    path = train(ranks, folder, 2, "--training.steps=4", "--parallelism.expert_parallel_degree=2", *options)
    at_once = train(ranks, folder, 1, "--training.steps=4", *options, name="once")
    reader, once = CheckpointReader(path), CheckpointReader(at_once)
    of_experts = [name for name in reader.shapes if ".experts.adapters." in name and name.startswith("model.")]
    assert max(distance(reader.read(name), once.read(name)) for name in of_experts) < TOLERANCE
    updates = [reader.read(name).flatten(1).abs().amax(1) for name in of_experts if name.endswith(".lora_b")]
    assert min(map(torch.min, updates)) > 1e-4, "an expert is not trained"

    assert max(distances_of_logits(path, folder)) < LOGITS
    export.run(path, folder / "merged", "float32", merge=True)
    exported = build_llama(model_options(path, reader.state), max_seq_len=16)
    exported.materialize(torch.device("cpu"))
    load_weights(folder / "merged", exported, model_options(path, reader.state))
    expected = dict(merged(path).named_parameters())
    for name, weight in exported.named_parameters():
        assert torch.equal(weight, expected[name].float()), name


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ('["wo", "experts.w1", "experts.w3"]', "of experts, peft takes adapters of w2 or of all three weights; export"),
        (
            '["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]',
            "w1.weight: peft takes such adapters, in a model",
        ),
    ],
)
def test_adapters_that_peft_takes_for_others_are_rejected(
    targets: str, message: str, tmp_path: Path, assets: Any, ranks: Any, monkeypatch: pytest.MonkeyPatch
):
    """Without the rejection, peft loads these adapters without an error, and computes other logits."""
    folder = folder_of("deepseek_v3", tmp_path, assets)
    path = train(ranks, folder, 1, "--training.steps=1", f"--lora.targets={targets}", *FIXED["deepseek_v3"])
    with pytest.raises(ConfigError, match=message):
        export.run(path, folder / "peft", None)
    monkeypatch.setattr(peft, "_check_targets", lambda names: None)
    ours, *theirs = distances_of_logits(path, folder)
    assert ours < LOGITS
    assert min(theirs) > 1e-3


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
    assert "with the same weights in checkpoint.initial_load_path" in message
    weights["model.layers.0.self_attn.q_proj.weight"] -= 1
    save_file(weights, file, metadata={"format": "pt"})
    (message,) = ranks(1).run(run_train, argv=[*argv, "--lora.rank=0"])
    assert "saved with lora.rank = 3, and this run has no lora.rank; resume with the same, or start" in message


# Merged under other layouts, and other bases -------------------------------------------------------------------------


def load_merged(argv: list[str], path: Path) -> dict[str, Tensor]:
    """Load a checkpoint of adapters into the shards of a model without adapters. Return the full weights."""
    job = config.check(config.load(argv), config.Launch.from_environment(n_devices=0))
    model = build.build_stage(job, mesh.build_layout(job.parallelism, torch.device("cpu")), None, torch.device("cpu"))
    model.materialize(torch.device("cpu"))
    load_weights(path, model, job.model)
    return trace_of("weight", dict(model.named_parameters()))


def test_adapters_are_merged_into_shards(folder: Path, ranks: Any):
    """Tensor parallel and FSDP shard a weight; each rank merges its shard of the adapter."""
    path = train(ranks, folder, 1, "--training.steps=2")
    argv = [str(folder / "run.toml"), *IN_FLOAT64, "--lora.rank=0", "--parallelism.tensor_parallel_degree=2"]
    sharded = ranks(4).run(load_merged, argv=argv, path=path)[0]
    once = trace_of("weight", dict(merged(path).named_parameters()))
    assert sharded.keys() == once.keys()
    assert max(distance(sharded[name], once[name]) for name in once) < LOGITS


@pytest.mark.nightly
def test_the_base_may_be_a_checkpoint_and_adapters_the_start_of_another_run(folder: Path, ranks: Any):
    base = train(ranks, folder, 1, "--training.steps=1", "--lora.rank=0", name="base")
    path = train(ranks, folder, 1, "--training.steps=2", f"--checkpoint.initial_load_path={base}")
    tokens = torch.arange(32).view(2, 16)
    assert distance(adapted(path, base)(tokens), merged(path)(tokens)) < LOGITS
    start = f"--checkpoint.initial_load_path={path}"
    again = train(ranks, folder, 1, "--training.steps=1", "--lora.rank=0", "--optimizer.lr=1e-20", start, name="again")
    assert distance(merged(again)(tokens), merged(path)(tokens)) < LOGITS


@pytest.mark.nightly
def test_what_has_no_adapter_to_export_is_rejected(folder: Path, ranks: Any):
    base = train(ranks, folder, 1, "--training.steps=1", "--lora.rank=0", name="base")
    with pytest.raises(ConfigError, match=r"--merge: .*step-1 has full weights, and no adapters"):
        export.run(base, folder / "out", None, merge=True)
    seeded = train(ranks, folder, 1, "--training.steps=1", "--checkpoint.initial_load_path=none")
    with pytest.raises(ConfigError, match=r"its adapters belong to weights that were drawn from debug.seed"):
        export.run(seeded, folder / "out", None)
    with pytest.raises(ConfigError, match=r"--verify: .*has adapters \(LoRA\), which are no model without a base"):
        export.run(seeded, folder / "out", None, verifies=True)
    with pytest.raises(ConfigError, match=r"has adapters \(LoRA\), and the product of the means of A and B is not"):
        average([folder / "mean", seeded, base])


def test_adapters_of_another_shape_are_rejected(folder: Path, ranks: Any):
    path = train(ranks, folder, 1, "--training.steps=1")
    state = json.loads((path / "state.json").read_text())
    state["identity"]["lora.rank"] = 4
    content = json.dumps(state).encode()
    (path / "state.json").write_bytes(content)
    change_manifest(path, lambda manifest: manifest["files"].update({"state.json": described(content)}))
    with pytest.raises(ConfigError, match=r"the adapter of layers.0.attention.wq.weight has shapes \[\[32, 3\]"):
        export.run(path, folder / "out", None)


def described(content: bytes) -> dict[str, Any]:
    """Return the entry of a JSON file in a manifest."""
    return {"bytes": len(content), "xxh3_64": checksum(content)}


@pytest.mark.nightly
def test_a_base_is_merged_in_the_type_that_it_was_frozen_in(folder: Path, ranks: Any):
    """A base of float32 numbers, frozen in bfloat16: merged weights are those of the adapted model."""
    path = train(ranks, folder, 1, "--training.steps=2", "--lora.base_dtype=bfloat16")
    weight = load_file(folder / "hf" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(merged(path).norm.weight, weight.bfloat16().double())
    assert not torch.equal(merged(path).norm.weight, weight.double())


@pytest.mark.nightly
def test_a_fine_tuning_run_under_three_parallelisms(folder: Path, ranks: Any, capsys: Any):
    """Trained under tp 2 x pp 2 x shard 2 in float32, merged, exported, verified and generated from."""
    layout = ["--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2"]
    layout += ["--parallelism.data_parallel_shard_degree=2", "--training.local_batch_size=2", "--lora.rank=8"]
    layout += ["--parallelism.pipeline_parallel_microbatch_size=1", "--training.dtype=float32", "--optimizer.lr=1e-2"]
    path = train(ranks, folder, 8, *layout, "--training.steps=30", "--checkpoint.last_save_in_hf")
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss_metrics/global_avg_loss"] for record in records if "loss_metrics/global_avg_loss" in record]
    # Measured: 0.41, and 0.13 with a learning rate of 1e-12, since batches differ.
    assert sum(losses[-2:]) / 2 < sum(losses[:2]) / 2 - 0.25
    export.run(path, folder / "merged", None, merge=True)
    written, tensors = load_file(folder / "merged" / "model.safetensors"), merged(path)
    options = model_options(path, CheckpointReader(path).state)
    for name, weight in tensors.named_parameters():
        difference = distance(written[hf_name(name, options)], to_hf([name], [weight.detach()], options))
        assert difference < 1e-6, name
    texts = []
    capsys.readouterr()  # drops the lines of the export
    for place in (path, folder / "merged"):
        assert generate.main([str(place), "def ", "--max-new-tokens=8"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
