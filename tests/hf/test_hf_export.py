"""Exported folders: transformers loads them with the same weights and logits, and one tensor at a time is in memory."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.helpers.cases import Case, cases
from tests.helpers.checkpoint import write_checkpoint
from tests.helpers.hf import (
    CORRECTION,
    CPU,
    FAMILIES,
    LOGITS_TOLERANCE,
    SEQ_LEN,
    draw_biases,
    draw_tokens,
    empty_model,
    expected_weights,
    model_options,
    save_hf,
)
from tests.parallel.test_parity import resolve
from tests.test_model import relative
from titanlite import build
from titanlite.checkpoint import export as export_command
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.exported_files import tokenizer_files
from titanlite.checkpoint.files import bytes_of
from titanlite.config import Config
from titanlite.config.loader import ConfigError
from titanlite.config.schema import Model
from titanlite.data.open import build_tokenizer
from titanlite.files import safetensors
from titanlite.hf.export import export, partition
from titanlite.hf.load import INDEX, SINGLE, load_hf_weights
from titanlite.hf.names import BALANCE_BIAS, named_weights, tensor_shapes
from titanlite.launch.cli import run_command
from titanlite.parallel import mesh

BF16, VOCABULARY = torch.bfloat16, 400


class Checkpoint:
    """What a CheckpointReader offers, of tensors in memory."""

    def __init__(self, weights: dict[str, Tensor], state: dict[str, Any] | None = None):
        self.weights = {f"model.{name}": weight for name, weight in weights.items()}
        self.state = state or {}
        self.shapes = {name: weight.shape for name, weight in self.weights.items()}
        self.shapes["optimizer.state.norm.weight.exp_avg"] = torch.Size([32])
        self.dtypes = {name: weight.dtype for name, weight in self.weights.items()}
        self.alive: list[tuple[str, weakref.ref]] = []

    def read(self, name: str) -> Tensor:
        alive = [each for each, tensor in self.alive if tensor() is not None]
        if any(each.endswith("experts.w1_bias") for each in self.weights):  # of gpt-oss, w1 and w3 are one tensor
            alive = [each for each in alive if each != name.replace("experts.w3", "experts.w1")]
        assert not alive, "a tensor is still in memory"
        tensor = self.weights[name].clone()
        self.alive = [*self.alive[-1:], (name, weakref.ref(tensor))]
        return tensor


def random_weights(options: Model, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return weights that are larger than initial ones."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: (torch.randn(shape, generator=generator) * 0.15 + (1 if "norm" in name else 0)).to(
            torch.float32 if name.endswith(BALANCE_BIAS) else dtype
        )
        for name, shape in tensor_shapes(options).items()
    }


def write(folder: Path, options: Model, weights: dict[str, Tensor], dtype: torch.dtype, **arguments: Any) -> int:
    return export(Checkpoint(weights), options, folder, dtype=dtype, max_seq_len=SEQ_LEN, **arguments)


def from_pretrained(folder: Path) -> Any:
    """Return transformers' model of a folder, all of whose tensors it must use and all of whose weights it must get."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("max_file_bytes", [20_000, 10**9], ids=["several files", "one file"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_same_model(family: str, max_file_bytes: int, tmp_path: Path):
    options = model_options(family)
    weights, out = random_weights(options), tmp_path / "out"
    n_files = write(out, options, weights, torch.float32, max_file_bytes=max_file_bytes, bos=1, eos=2)
    assert n_files == len(list(out.glob("*.safetensors")))
    assert (n_files == 1) == (max_file_bytes == 10**9)
    hf, model = from_pretrained(out), empty_model(options)
    expected = expected_weights(hf, model, options)
    assert expected.keys() == weights.keys()
    for name, tensor in named_weights(model).items():
        assert torch.equal(expected[name], weights[name]), name
        tensor.data.copy_(weights[name])
    with torch.no_grad():
        assert relative(model(draw_tokens()), hf(draw_tokens(), use_cache=False).logits) < LOGITS_TOLERANCE
    assert (hf.generation_config.bos_token_id, hf.generation_config.eos_token_id) == (1, 2)


def test_another_order_of_rows_would_show(tmp_path: Path, monkeypatch):
    from titanlite.hf import export as module

    monkeypatch.setattr(module, "to_hf", lambda names, tensors, options: tensors[0])
    options = model_options()
    weights = random_weights(options)
    write(tmp_path / "out", options, weights, torch.float32)
    model, hf = empty_model(options), from_pretrained(tmp_path / "out")
    model.load_state_dict(weights)
    with torch.no_grad():
        assert relative(model(draw_tokens()), hf(draw_tokens(), use_cache=False).logits) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_that_was_loaded_and_exported_is_the_same(family: str, dtype: torch.dtype, tmp_path: Path):
    save_hf(tmp_path / "in", family, dtype=dtype)
    options = model_options(family)
    model = empty_model(options, dtype)
    load_hf_weights(tmp_path / "in", model, options)
    write(tmp_path / "out", options, {name: p.detach() for name, p in named_weights(model).items()}, dtype)
    before, after = (load_file(tmp_path / folder / SINGLE) for folder in ("in", "out"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == (torch.float32 if name.endswith(CORRECTION) else dtype)
        assert torch.equal(tensor, after[name])


def test_files_and_their_index(tmp_path: Path):
    options = model_options()
    most, out = 10_000, tmp_path / "out"
    n_files = write(out, options, random_weights(options), BF16, max_file_bytes=most)
    index = json.loads((out / INDEX).read_text())
    names = [f"model-{number:05d}-of-{n_files:05d}.safetensors" for number in range(1, n_files + 1)]
    assert sorted(path.name for path in out.glob("*.safetensors")) == names
    assert set(index["weight_map"].values()) == set(names)
    sizes = {name: sum(t.nbytes for t in load_file(out / name).values()) for name in names}
    assert sum(sizes.values()) == index["metadata"]["total_size"]
    assert max(sizes.values()) <= most
    for name in names:
        inside = {tensor for tensor, file in index["weight_map"].items() if file == name}
        assert load_file(out / name).keys() == inside
    assert not (out / SINGLE).exists()


def test_partition():
    sizes = {"a": 4, "b": 6, "c": 1, "d": 30, "e": 2, "f": 9}
    assert partition(sizes, 10) == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert partition(sizes, 100) == [list(sizes)]


def test_tensors_begin_at_a_multiple_of_8_bytes(tmp_path: Path):
    for n_names in range(1, 9):
        tensors = {f"layers.{10**n}.ffn_norm.weight": ("F32", (3,)) for n in range(n_names)}
        file = tmp_path / f"{n_names}.safetensors"
        safetensors.write(file, tensors, (bytes_of(torch.ones(3)) for _ in tensors), {"format": "pt"})
        content = file.read_bytes()
        header = int.from_bytes(content[:8], "little")
        assert header % 8 == 0
        assert len(content) == 8 + header + n_names * 12
        assert all((tensor == 1).all() for tensor in load_file(file).values())


@pytest.mark.parametrize("has_settings", [True, False], ids=["with settings", "tokenizer.json alone"])
def test_the_tokenizer_is_copied(has_settings: bool, tmp_path: Path, assets):
    from transformers import AutoTokenizer

    ours = assets.open(bos_token="<s>", eos_token="</s>")
    if not has_settings:
        assets.settings.unlink()
    options = model_options(vocab_size=VOCABULARY)
    for tokenizer, out in ((assets.folder, tmp_path / "a"), (assets.file, tmp_path / "b")):
        files = tokenizer_files(build_tokenizer(str(tokenizer)), SEQ_LEN)
        write(out, options, random_weights(options), BF16, files=files)
        theirs = AutoTokenizer.from_pretrained(out)
        tokens = theirs("some text", add_special_tokens=False)["input_ids"]
        assert tokens == ours.encode(["some text"])[0].tolist()
        assert theirs.eos_token == ("</s>" if has_settings else None)


# What is rejected ----------------------------------------------------------------------------------------------------


def rejected(out: Path, *, options: Model | None = None, dtype: torch.dtype = torch.float32, **changes: Any) -> str:
    """Return the line of the ConfigError of an export, of weights with some changed; nothing may be left of it."""
    weights = {**random_weights(model_options()), **changes}
    weights = {name: weight for name, weight in weights.items() if weight is not None}
    left = set(out.parent.iterdir())
    with pytest.raises(ConfigError) as caught:
        write(out, options or model_options(), weights, dtype)
    assert set(out.parent.iterdir()) == left
    (line,) = caught.value.problems
    return line


def test_what_exists_is_not_overwritten(tmp_path: Path):
    (tmp_path / "out").mkdir()
    assert rejected(tmp_path / "out") == f"{tmp_path / 'out'}: exists; choose another folder"
    (tmp_path / "other.tmp").mkdir()
    assert "other.tmp: exists; left by a command that was ended" in rejected(tmp_path / "other")


@pytest.mark.parametrize("weight", [None, torch.ones(5)], ids=["missing", "another shape"])
def test_a_checkpoint_of_another_model_is_rejected(weight: Tensor | None, tmp_path: Path):
    line = rejected(tmp_path / "out", **{"norm.weight": weight})
    assert line.startswith("norm.weight: the checkpoint has ")
    assert "[model] options say shape [32]" in line


def test_another_number_of_layers_is_rejected(tmp_path: Path):
    line = rejected(tmp_path / "out", options=model_options(n_layers=4096))
    assert line.startswith("the checkpoint has 3 layers, and its [model] options say 4096")


def test_a_tensor_too_many_is_rejected(tmp_path: Path):
    line = rejected(tmp_path / "out", **{"extra.weight": torch.ones(5)})
    assert line.startswith("extra.weight: the checkpoint has shape [5], and its [model] options say no such tensor")


def test_numbers_beyond_float16_are_rejected(tmp_path: Path):
    large = torch.full((32,), 70000.0)
    assert "norm.weight has 70000.0, beyond its range" in rejected(
        tmp_path / "out", dtype=torch.float16, **{"norm.weight": large}
    )
    infinite = torch.full((32,), torch.inf)  # is infinite in the checkpoint, too
    weights = random_weights(model_options()) | {"norm.weight": infinite}
    write(tmp_path / "out", model_options(), weights, torch.float16)
    assert torch.equal(load_file(tmp_path / "out" / SINGLE)["model.norm.weight"], infinite.half())


def test_another_dtype_is_rejected(tmp_path: Path):
    assert "--dtype float64: expected one of float32, bfloat16, float16" in rejected(
        tmp_path / "out", dtype=torch.float64
    )


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, monkeypatch):
    def fail(self: Any, name: str) -> Tensor:
        raise ConfigError([f"{name}: damaged"])

    monkeypatch.setattr(Checkpoint, "read", fail)
    assert rejected(tmp_path / "out") == "model.tok_embeddings.weight: damaged"


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run's folder with the checkpoints of two steps."""
    options, run = model_options(vocab_size=VOCABULARY), tmp_path / "run"
    identity = {"seed": 42, "data": "x", **options.identity()}
    for step in (2, 10):
        weights = {f"model.{name}": weight * step for name, weight in random_weights(options, BF16).items()}
        write_checkpoint(run / "checkpoint" / f"step-{step}", weights, step=step, identity=identity)
    for name in ("step-12.tmp", "step-old"):
        (run / "checkpoint" / name).mkdir()
    (run / "config.toml").write_text('[model]\nhf_assets_path = ""\n[training]\nseq_len = 24\n')
    return run


def command(*arguments: Any) -> int:
    return run_command("export", [str(argument) for argument in arguments])


def test_the_command_exports_the_newest_checkpoint(run_folder: Path, tmp_path: Path, capsys):
    assert command(run_folder / "checkpoint", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert printed.splitlines() == [
        f"wrote {tmp_path / 'out'}: step-10, bfloat16, safetensors files: 1",
        "tokenizer: bytes, so there are no files of it",
    ]
    hf = from_pretrained(tmp_path / "out")
    assert torch.equal(
        hf.model.norm.weight, random_weights(model_options(vocab_size=VOCABULARY), BF16)["norm.weight"] * 10.0
    )
    assert hf.dtype == BF16
    assert hf.config.max_position_embeddings == 24
    assert (hf.config.bos_token_id, hf.config.eos_token_id) == (256, 257)


def save_on_a_rank(job: Config, folder: Path) -> dict[str, Tensor]:
    """Save a checkpoint of this layout's initial weights and of biases that balance experts, and return all in full."""
    layout = mesh.build_layout(job.parallelism, CPU)
    model, stages = build.build_model(job, layout, CPU)
    draw_biases(model)
    identity = {"seed": 1, "data": "x", **job.model.identity()}
    checkpointer = Checkpointer(folder, job.checkpoint, identity, job.comm)
    checkpointer.save(3, model, build.build_optimizer(job, model, stages.values()), {"data": {"next_sequence": 0}})
    checkpointer.confirm(4)
    checkpointer.close()
    tensors = named_weights(model).items()
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in tensors}


SHARDED: dict[str, dict[str, Any]] = {
    "qwen3": {"model__qk_norm": True, "model__head_dim": 16},
    "mixtral": {"model__moe__n_experts": 4, "model__moe__n_experts_per_token": 2, "model__moe__normalize_scores": True},
    "deepseek_v3, ep": {
        **{"model__n_kv_heads": 4, "model__norm_eps": 1e-6, "model__mla__kv_lora_rank": 8, "expert_parallel_degree": 2},
        **{"model__moe__n_experts": 4, "model__moe__n_experts_per_token": 2, "model__moe__n_shared_experts": 1},
        **{"model__moe__score_function": "sigmoid", "model__moe__balance_bias": True},
    },
    "deepseek_v3, without biases": {
        **{"model__n_kv_heads": 4, "model__norm_eps": 1e-6, "model__mla__kv_lora_rank": 8},
        **{"model__moe__n_experts": 4, "model__moe__n_experts_per_token": 2, "model__moe__n_shared_experts": 1},
        "model__moe__score_function": "sigmoid",
    },
    "olmoe, ep": Case(
        {"model__qk_norm": "all_heads", "model__moe__n_experts": 4, "expert_parallel_degree": 2}, always=True
    ),
}


@cases("name", SHARDED)
def test_a_checkpoint_of_a_sharded_run_is_exported(name: str, ranks, tmp_path: Path):
    settings = {**SHARDED[name], "training__dtype": "float32"}
    job = resolve(tmp_path, 4, {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2, **settings})
    weights, *_ = ranks(4).run(save_on_a_rank, job=job, folder=tmp_path / "run")
    assert command(tmp_path / "run" / "checkpoint", tmp_path / "out", "--max-seq-len", SEQ_LEN) == 0
    hf = from_pretrained(tmp_path / "out")
    expected = expected_weights(hf, empty_model(job.model), job.model)
    assert expected.keys() == weights.keys()
    assert all(torch.equal(expected[name], weight) for name, weight in weights.items())
    biases = [tensor for name, tensor in hf.state_dict().items() if name.endswith(CORRECTION)]
    assert [bool(each.any()) for each in biases] == [job.model.moe.balance_bias] * len(biases)


def test_the_command_exports_one_step_in_another_dtype(run_folder: Path, tmp_path: Path, capsys):
    (run_folder / "config.toml").unlink()
    arguments = [run_folder / "checkpoint" / "step-2", tmp_path / "out", "--dtype", "float32", "--max-seq-len", 48]
    assert command(*arguments) == 0
    wrote, tokenizer = capsys.readouterr().out.splitlines()
    assert wrote.endswith("out: step-2, float32, safetensors files: 1")
    assert tokenizer == f"tokenizer: none, since there is no model.hf_assets_path in {run_folder / 'config.toml'}"
    hf = from_pretrained(tmp_path / "out")
    expected = (random_weights(model_options(vocab_size=VOCABULARY), BF16)["norm.weight"] * 2.0).float()
    assert torch.equal(hf.model.norm.weight, expected)
    assert hf.config.max_position_embeddings == 48


def test_the_command_copies_the_tokenizer_of_the_run(run_folder: Path, tmp_path: Path, assets, capsys):
    (run_folder / "config.toml").write_text(f'[model]\nhf_assets_path = "{assets.folder}"\n[training]\nseq_len = 24\n')
    tokenizer = assets.open(bos_token="<s>", eos_token="<stop>")
    assert command(run_folder / "checkpoint" / "step-2", tmp_path / "out") == 0
    assert f"tokenizer: {assets.folder}\n" in capsys.readouterr().out
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == assets.file.read_bytes()
    hf = from_pretrained(tmp_path / "out")
    assert (hf.config.bos_token_id, hf.config.eos_token_id) == (tokenizer.bos, tokenizer.eos) == (0, 2)


def test_a_tokenizer_with_more_ids_than_rows_is_named_and_rejected_if_they_are_needed(
    run_folder: Path, tmp_path: Path, assets, capsys
):
    larger = json.loads(assets.file.read_text())
    larger["model"]["vocab"]["one more"] = VOCABULARY
    assets.file.write_text(json.dumps(larger))
    arguments = run_folder / "checkpoint", tmp_path / "out", "--tokenizer", assets.folder
    assert command(*arguments) == 0
    expected = f"{assets.folder}; the model has no rows for its 1 ids from {VOCABULARY} on\n"
    assert f"tokenizer: {expected}" in capsys.readouterr().out
    assets.settings.write_text(json.dumps({"eos_token": "one more"}))
    assert command(*arguments) == 2
    line = f'error: model.vocab_size = {VOCABULARY}: "EOS" has the token {VOCABULARY}: expected ids below {VOCABULARY}'
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "phrase"),
    [
        (lambda run: None, "no-such: expected a step-N folder, or a folder that contains one"),
        (lambda run: (run / "no-such").mkdir(), "no-such: expected a step-N folder, or a folder that contains one"),
    ],
    ids=["no folder", "an empty folder"],
)
def test_a_folder_without_checkpoints_is_one_line(spoil: Any, phrase: str, run_folder: Path, tmp_path: Path, capsys):
    spoil(run_folder)
    assert command(run_folder / "no-such", tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert phrase in line
    assert not (tmp_path / "out").exists()


def test_a_run_without_its_config_needs_the_sequence_length(run_folder: Path, tmp_path: Path, capsys):
    (run_folder / "config.toml").unlink()
    assert command(run_folder / "checkpoint", tmp_path / "out") == 2
    assert "error: --max-seq-len: expected 1 or more" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_line(run_folder: Path, tmp_path: Path, capsys):
    (tmp_path / "file").write_text("")
    assert command(run_folder / "checkpoint", tmp_path / "file" / "out") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be written" in line


@pytest.mark.parametrize(
    ("identity", "phrase"),
    [
        ({"dim": 3}, "lacks model."),
        ({**model_options().identity(), "dim": "x"}, 'model.dim = "x": '),
        ({**model_options().identity(), "n_layers": 0}, "model.n_layers = 0: "),
    ],
    ids=["few options", "a text", "no layers"],
)
def test_a_checkpoint_without_model_options_is_rejected(identity: Any, phrase: str):
    with pytest.raises(ConfigError) as caught:
        export_command.model_options(Path("step-1"), {"identity": identity})
    (line,) = caught.value.problems
    assert phrase in line
