"""titanlite export: a folder is compared with its checkpoint, and says what it is."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.cases import cases
from tests.helpers.checkpoint import write_checkpoint
from tests.helpers.config import problems
from tests.helpers.hf import FAMILIES, SEQ_LEN, empty_model, model_options
from tests.hf.test_hf_export import VOCABULARY, command, random_weights, write
from tests.test_families_by_options import FAMILIES as BY_OPTIONS
from tests.test_model import SMALL, section
from titanlite.checkpoint.exported_files import model_card
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.config.schema import Model
from titanlite.hf.export import export
from titanlite.hf.load import SINGLE
from titanlite.tools import export as export_command
from titanlite.tools.verify_export import verify


def save(folder: Path, options: Model, dtype: torch.dtype = torch.float32, **changes: Tensor) -> None:
    """Write a checkpoint, step-2, and the exported folder out."""
    weights = random_weights(options) | changes
    loads = {name: each for name, each in empty_model(options).named_buffers() if name.endswith(".router.load")}
    identity = {"seed": 1, "data": "x", **options.identity()}
    tensors = {f"model.{name}": weight for name, weight in {**weights, **loads}.items()}
    step = folder / "run" / "checkpoint" / "step-2"
    write_checkpoint(step, tensors, step=2, identity=identity, config={})
    export(CheckpointReader(step), options, folder / "out", dtype=dtype, max_seq_len=SEQ_LEN)


def verified(folder: Path, capsys: Any) -> tuple[bool, str, str]:
    """Return whether the folder is equal, the difference, and the first block that drifts."""
    capsys.readouterr()
    is_same = verify(folder / "run" / "checkpoint", folder / "out")
    found = re.match(
        r"transformers computes (.+) logits: (\S+); first block that drifts: (.+)", capsys.readouterr().out
    )
    assert (found[1] == "the same") == is_same
    return is_same, found[2], found[3]


@cases("family", [*FAMILIES, *BY_OPTIONS], always=["llama", "mixtral", "gpt2"])
def test_transformers_computes_the_logits_of_the_checkpoint(family: str, tmp_path: Path, capsys):
    options = model_options(family) if family in FAMILIES else section({**SMALL, **BY_OPTIONS[family]})
    save(tmp_path, options)
    is_same, difference, drifting = verified(tmp_path, capsys)
    assert (is_same, drifting) == (True, "none")
    assert float(difference) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_are_rounded_to_the_dtype_of_the_folder_first(dtype: torch.dtype, tmp_path: Path, capsys):
    save(tmp_path, model_options(), dtype)
    assert verified(tmp_path, capsys)[0]


def test_the_average_is_compared_if_it_was_exported(tmp_path: Path, capsys):
    options, folder = model_options(), tmp_path / "run" / "checkpoint" / "step-2"
    weights, averages = random_weights(options), {name: each + 0.01 for name, each in random_weights(options).items()}
    tensors = {f"model.{name}": each for name, each in weights.items()}
    tensors |= {f"optimizer.state.{name}.ema": each for name, each in averages.items()}
    identity = {"seed": 1, "data": "x", **options.identity()}
    write_checkpoint(folder, tensors, step=2, identity=identity, config={})
    write(tmp_path / "out", options, averages, torch.float32)
    assert verify(folder, tmp_path / "out", ema=True)
    assert verified(tmp_path, capsys)[0] is False


def swapped(name: str) -> Callable[[Path], None]:
    """Return a function that swaps two rows of a tensor of a folder. Names, shapes and dtypes stay."""

    def change(out: Path) -> None:
        tensors = load_file(out / SINGLE)
        tensors[name] = tensors[name][[1, 0, *range(2, len(tensors[name]))]]
        save_file(tensors, out / SINGLE, metadata={"format": "pt"})

    return change


def set_in_config(**values: Any) -> Callable[[Path], None]:
    def change(out: Path) -> None:
        file = out / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


HEAD = "the output head or the norm before it"
CHANGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "q": (swapped("model.layers.1.self_attn.q_proj.weight"), "layers.1"),
    "k": (swapped("model.layers.0.self_attn.k_proj.weight"), "layers.0"),
    "feed-forward": (swapped("model.layers.2.mlp.down_proj.weight"), "layers.2"),
    "norm of a layer": (swapped("model.layers.1.post_attention_layernorm.weight"), "layers.1"),
    "last norm": (swapped("model.norm.weight"), HEAD),
    "head": (swapped("lm_head.weight"), HEAD),
    "embedding": (swapped("model.embed_tokens.weight"), "the embedding"),
    "rope_theta": (set_in_config(rope_theta=5e5, rope_parameters=None), "layers.0"),
    "epsilon": (set_in_config(rms_norm_eps=1e-4), "layers.0"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_folder_that_was_changed_differs_and_the_first_block_is_named(name: str, tmp_path: Path, capsys):
    change, block = CHANGED[name]
    save(tmp_path, model_options())
    change(tmp_path / "out")
    is_same, difference, drifting = verified(tmp_path, capsys)
    assert not is_same
    assert drifting == block
    assert float(difference) > 1e-6


def test_the_embedding_of_a_token_that_was_not_drawn_is_compared(tmp_path: Path, capsys):
    options = model_options(vocab_size=20_000)
    save(tmp_path, options)
    swapped("model.embed_tokens.weight")(tmp_path / "out")
    assert verified(tmp_path, capsys)[::2] == (False, "the embedding, of tokens that were not compared")


def test_logits_that_cannot_differ_are_not_called_the_same(tmp_path: Path, capsys):
    """An output projection of zeros hides what attention computes, and so any permutation of its weights."""
    zeros = {"layers.1.attention.wo.weight": torch.zeros(32, 32)}
    save(tmp_path, model_options(), **zeros)
    swapped("model.layers.1.self_attn.q_proj.weight")(tmp_path / "out")
    assert not verify(tmp_path / "run" / "checkpoint", tmp_path / "out")
    out = capsys.readouterr().out
    assert out.startswith("transformers computes perhaps not the same logits: ")
    assert "first block that drifts: none\n" in out
    assert "4 tensors have no influence on them, such as layers.1.attention_norm.weight" in out


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command_verifies_what_it_writes_and_what_is_there(tmp_path: Path, assets, capsys):
    assets.open(bos_token="<s>", eos_token="</s>")
    save(tmp_path, model_options(vocab_size=VOCABULARY))
    settings = f'[model]\nhf_assets_path = "{assets.folder}"\n[training]\nseq_len = 24\n'
    (tmp_path / "run" / "config.toml").write_text(settings)
    checkpoint, out = tmp_path / "run" / "checkpoint", tmp_path / "new"
    for wrote in (True, False):
        assert command(checkpoint, out, "--verify") == 0
        printed = capsys.readouterr().out
        assert "transformers computes the same logits: " in printed
        assert printed.endswith("tokenizer: begins a text as in training\n")
        assert (f"wrote {out}: " in printed) == wrote
    swapped("model.layers.1.self_attn.q_proj.weight")(out)
    assert command(checkpoint, out, "--verify") == 1
    assert "other logits: " in capsys.readouterr().out


def test_a_tokenizer_that_adds_no_bos_is_named(tmp_path: Path, assets, capsys):
    assets.open(bos_token="<s>", eos_token="</s>")
    save(tmp_path, model_options(vocab_size=VOCABULARY))
    settings = f'[model]\nhf_assets_path = "{assets.folder}"\n[training]\nseq_len = 24\n'
    (tmp_path / "run" / "config.toml").write_text(settings)
    assert command(tmp_path / "run" / "checkpoint", tmp_path / "new") == 0
    file = tmp_path / "new" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": None}))
    capsys.readouterr()
    assert command(tmp_path / "run" / "checkpoint", tmp_path / "new", "--verify") == 1
    line = "the exported tokenizer begins a text with no BOS, and training began each with [0]\n"
    assert capsys.readouterr().out.endswith(line)


# The files beside the model ------------------------------------------------------------------------------------------


def test_the_settings_of_the_tokenizer_are_complete(tmp_path: Path, assets, capsys):
    from transformers import AutoTokenizer

    assets.open(bos_token="<s>", eos_token="</s>")
    save(tmp_path, model_options(vocab_size=VOCABULARY))
    assert (
        command(tmp_path / "run" / "checkpoint", tmp_path / "new", "--tokenizer", assets.folder, "--max-seq-len", 48)
        == 0
    )
    settings = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
    assert settings == {
        **{"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 48},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    loaded = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert loaded("some text")["input_ids"][0] == 0
    assert loaded.model_max_length == 48


def test_the_dtype_of_the_source_stays(tmp_path: Path, capsys):
    save(tmp_path, model_options())
    source = tmp_path / "source"
    write(source, model_options(), random_weights(model_options()), torch.bfloat16)
    arguments = tmp_path / "run" / "checkpoint", "--source", source
    assert command(*arguments, tmp_path / "a") == 0
    assert f"wrote {tmp_path / 'a'}: step-2, bfloat16" in capsys.readouterr().out
    assert command(*arguments, tmp_path / "b", "--dtype", "float32") == 0
    assert f"wrote {tmp_path / 'b'}: step-2, float32" in capsys.readouterr().out


def test_the_model_card_says_what_the_model_is_from(tmp_path: Path):
    run, source = tmp_path / "run", tmp_path / "source"
    (run / "checkpoint").mkdir(parents=True)
    source.mkdir()
    (source / "config.json").write_text('{"_name_or_path": "org/base"}')
    (source / "README.md").write_text("---\ntags: [a]\nlicense: apache-2.0\n---\n# Base\n")
    rows = [
        {"step": 1, "loss_metrics/global_avg_loss": 5.5},
        {"step": 2, "loss_metrics/global_avg_loss": 4.5, "validation_metrics/global_avg_loss": 4.25},
        {"step": 3, "loss_metrics/global_avg_loss": 3.5},
    ]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + 'null\n{"step": "x"}\n{"step": 2, "lo'
    )
    (run / "config.toml").write_text('[training]\ndataset = "json"\ndataset_path = "a.jsonl"\n')
    config = {"training": {"dataset": "json", "dataset_path": "a.jsonl"}}
    path = run / "checkpoint" / "step-2"
    card = model_card(path, "mine", config, source).decode()
    head = 'library_name: "transformers"\ntags: ["titanlite"]\nbase_model: "org/base"\nlicense: "apache-2.0"'
    assert card.startswith(f"---\n{head}\n---\n\n# mine\n")
    for line in (
        "Trained with titanlite 0.1.0 for 2 steps, on a.jsonl.",
        "- base model: org/base",
        "- license of the base model: apache-2.0",
        "- loss: 4.5000 nats per token, at step 2",
        "- validation: 4.2500 nats per token, at step 2",
        'dataset_path = "a.jsonl"',
    ):
        assert f"\n{line}\n" in card
    (source / "README.md").unlink()
    card = model_card(path, "mine", config, source).decode()
    assert '\nlicense: "other"\n' in card
    assert "- license of the base model: not stated there; look it up before you publish\n" in card
    for odd in ({"training": 3}, {"training": {"datasets": 3}}, {"training": {"datasets": [3]}}):
        assert "on data that is not known." in model_card(path, "mine", odd, None).decode()
    assert "average (EMA)" in model_card(path, "mine", config, source, ema=True).decode()
    card = model_card(path, "mine", config | {"lora": {"rank": 4, "alpha": 8.0}}, source).decode()
    assert "- base model: org/base, with adapters (LoRA, rank 4, alpha 8.0) merged\n" in card
    for without in ({"lora": {"rank": 0}}, {"lora": 3}):
        assert "LoRA" not in model_card(path, "mine", config | without, source).decode()
    card = model_card(path.with_name("step-2.unconfirmed"), "mine", {}, None).decode()
    assert "for 2 steps" in card
    assert "average (EMA)" not in card
    assert "\nlicense:" not in card
    assert "- base model: none, initial weights were random\n" in card


def test_a_folder_that_is_no_export_is_not_compared(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (message,) = problems(lambda: export_command.main([str(tmp_path), str(tmp_path / "out"), "--verify"]))
    assert message.startswith(f"--verify: {tmp_path / 'out'} exists and has no config.json; name an exported folder")
