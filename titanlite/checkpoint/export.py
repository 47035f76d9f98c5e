"""Write a checkpoint as a Hugging Face folder. The run's config.toml, and the folder of the released model that the run
started from, supply what the checkpoint lacks. tools/export.py has the command `titanlite export`."""

import types
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from titanlite.build_llama import build_llama
from titanlite.checkpoint.adapters import base_of, dtype_of, lora_of
from titanlite.checkpoint.average_reader import AverageReader
from titanlite.checkpoint.exported_files import model_card, tokenizer_files
from titanlite.checkpoint.folder import state_of
from titanlite.checkpoint.initial_weights import step_folders
from titanlite.checkpoint.loading import load_weights
from titanlite.checkpoint.reader import CheckpointReader
from titanlite.checkpoint.tensors import model_tensors
from titanlite.config.hf.values import how_to_download, read_json_object
from titanlite.config.loader import ConfigError, read_toml, show
from titanlite.config.schema import SEEDED, Checkpoint, Model
from titanlite.data.open import build_tokenizer
from titanlite.data.tokenizer import Rows


def run(
    checkpoint: Path,
    out: Path,
    dtype: str | None,
    tokenizer: Path | None = None,
    source: str | None = None,
    max_seq_len: int | None = None,
    ema: bool = False,
    merge: bool = False,
    verifies: bool = False,
) -> None:
    """Export a checkpoint and print what was written. `verifies` is the option --verify, for which an export of
    adapters alone is an error. Raises ConfigError if the checkpoint cannot be exported."""
    from titanlite.hf.export import export  # imported here: hf/ imports checkpoint/
    from titanlite.hf.load import HF_DTYPES
    from titanlite.hf.peft import export_adapters

    path = step_folders(checkpoint)[-1]
    reader: Any = AverageReader(path) if ema else CheckpointReader(path)
    options, lora = model_options(path, reader.state), lora_of(reader)
    kind = getattr(torch, dtype) if dtype else dtype_of(reader)
    if bool(lora) != merge:
        if merge:
            raise ConfigError([f"--merge: {path} has full weights, and no adapters (LoRA); leave it out"])
        if verifies:
            raise ConfigError([f"--verify: {path} has adapters (LoRA), which are no model without a base; add --merge"])
        n_adapters = export_adapters(reader, options, lora, out, base=base_of(reader), dtype=kind)
        print(f"wrote {out}: {path.name}, {str(kind).removeprefix('torch.')}, adapters for peft: {n_adapters}")
        return
    config_file = config_file_of_run(path)
    config = read_config(config_file)
    released = folder_of_source(source, config)
    before = read_json_object(released / "config.json") if released else {}
    lengths = [value_of_run(config, "training", "seq_len"), before.get("max_position_embeddings")]
    max_seq_len = max_seq_len or max([0, *filter(lambda length: type(length) is int, lengths)])
    if max_seq_len < 1:
        raise ConfigError([f"--max-seq-len: expected 1 or more, since there is no training.seq_len in {config_file}"])
    assets = value_of_run(config, "model", "hf_assets_path") if tokenizer is None else str(tokenizer)
    files = {"README.md": model_card(path, out.name, config, released, ema=ema)}
    bos, eos, origin = None, None, f"none, since there is no model.hf_assets_path in {config_file}"
    if isinstance(assets, str):
        bos, eos, origin, own_files = _tokenizer(assets, options.vocab_size, max_seq_len)
        files |= own_files
    before_dtype = before.get("dtype") or before.get("torch_dtype")
    if not dtype and before_dtype in HF_DTYPES.values():
        kind = getattr(torch, before_dtype)
    if merge:
        reader = _merged(path, options, kind)
    origins = {"source": released, "files": files, "bos": bos, "eos": eos}
    n_files = export(reader, options, out, dtype=kind, max_seq_len=max_seq_len, **origins)
    print(f"wrote {out}: {path.name}, {'EMA, ' * ema}{str(kind).removeprefix('torch.')}, safetensors files: {n_files}")
    print(f"tokenizer: {origin}")
    if released:
        after = read_json_object(out / "config.json")
        changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        print(f"config.json: that of {released}{', except for ' if changed else ''}{', '.join(changed)}")


def _tokenizer(assets: str, vocab_size: int, max_seq_len: int) -> tuple[int | None, int, str, dict[str, Any]]:
    """Return a tokenizer's BOS id, EOS id, description and files. Raises ConfigError if BOS or EOS has no row."""
    rows = Rows(vocab_size, f"model.vocab_size = {vocab_size}", "name the run's with --tokenizer")
    built, origin = build_tokenizer(assets).fit(rows), assets or "bytes, so there are no files of it"
    if built.vocab_size > rows.n:
        origin += f"; the model has no rows for its {built.vocab_size - rows.n} ids from {rows.n} on"
    return built.bos, built.eos, origin, tokenizer_files(built, max_seq_len) if assets else {}


def _merged(path: Path, options: Model, dtype: torch.dtype) -> Any:
    """Return a reader of a checkpoint's base weights, after its LoRA adapters were merged into them in host memory."""
    model = build_llama(options, max_seq_len=1).to(dtype)
    model.materialize(torch.device("cpu"))
    load_weights(path, model, options)
    tensors = model_tensors(model)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return types.SimpleNamespace(shapes=shapes, read=tensors.__getitem__)


def export_last_step(dump_folder: Path, options: Checkpoint) -> None:
    """Export the checkpoint of the last step (training.steps in the run's config.toml) to step-N-hf beside it. Do
    nothing if that checkpoint is missing or step-N-hf exists. Raises ConfigError if the export is impossible."""
    step = value_of_run(read_config(dump_folder / "config.toml"), "training", "steps")
    checkpoint, out = (dump_folder / options.folder / f"step-{step}{end}" for end in ("", "-hf"))
    if checkpoint.exists() and not out.exists():
        merge = lora_of(CheckpointReader(checkpoint)) is not None
        run(checkpoint, out, None if options.export_dtype == "auto" else options.export_dtype, merge=merge)


def folder_of_source(choice: str | None, config: dict[str, Any]) -> Path | None:
    """Return the folder of the released model that a run started from; None if it started from initial weights.
    `choice` is the value of --source, or None if it is not given. Raises ConfigError if there is no config.json."""
    path = choice or value_of_run(config, "checkpoint", "initial_load_path")
    if choice is None and isinstance(path, str) and state_of(Path(path)):  # path is the checkpoint of another run
        from_hf = value_of_run(config, "model", "flavor") == "from_hf"
        path = value_of_run(config, "model", "hf_assets_path") if from_hf else SEEDED
    if not isinstance(path, str) or path in ("", SEEDED):
        return None
    if not (Path(path) / "config.json").is_file():
        problem = f"{path}: has no config.json, and the exported one has its keys{how_to_download(Path(path))}"
        raise ConfigError([f"{problem}; name that folder with --source, or --source {SEEDED} for a new config.json"])
    return Path(path)


def model_options(path: Path, state: dict[str, Any]) -> Model:
    """Return the section [model] in a checkpoint's state. Raises ConfigError if an option is missing or wrong."""
    identity, fields = state["identity"], Model.model_fields
    if identity.get("own.block"):
        raise ConfigError([f"{path}: has weights of own blocks (--own), which only train, plan and parity build"])
    if missing := sorted(key for key, field in fields.items() if field.is_required() and key not in identity):
        problem = f"{path}: lacks model.{missing[0]}; expected a checkpoint that this version of titanlite can resume"
        raise ConfigError([problem])
    try:
        sections = {
            name: {key.partition(".")[2]: value for key, value in identity.items() if key.startswith(f"{name}.")}
            for name in ("moe", "mla")
        }
        return Model.model_validate({key: identity[key] for key in fields if key in identity} | sections)
    except ValidationError as error:
        key, value = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["input"]
        raise ConfigError([f"{path}: model.{key} = {show(value)}: {error.errors()[0]['msg']}"]) from None


def config_file_of_run(path: Path) -> Path:
    """Return the path of the config.toml of the run that saved a step-N folder."""
    return path.resolve().parents[1] / "config.toml"


def read_config(file: Path) -> dict[str, Any]:
    """Return the contents of a run's config.toml; {} if the file is missing. Raises ConfigError if it is damaged."""
    return read_toml(str(file)) if file.is_file() else {}


def value_of_run(config: dict[str, Any], section: str, key: str) -> Any:
    """Return a value of a run's config.toml; None if it lacks the section or the key."""
    values = config.get(section)
    return values.get(key) if isinstance(values, dict) else None
