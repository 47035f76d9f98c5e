"""Exports a checkpoint as a Hugging Face folder, as the checkpoint and its run's config.toml describe the model."""

from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from titanlite.checkpoint.folder import state_of
from titanlite.config.hf.values import how_to_download, read_json_object
from titanlite.config.loader import ConfigError, read_toml, show
from titanlite.config.schema import SEEDED, Model

EXPORT_DTYPES = ("bfloat16", "float32", "float16")


class Export(NamedTuple):
    """Describes what is exported; `write` writes it."""

    path: Path
    """The checkpoint's step-N folder."""
    reader: Any
    options: Model
    dtype: Any
    """The torch.dtype of the written weights."""
    max_seq_len: int
    config: dict[str, Any]
    """The run's config.toml; empty if there is none."""
    source: Path | None
    """Folder of the released model that the run started from."""
    tokenizer: Any
    """The tokenizer, or None if it is not known."""


def prepare(
    checkpoint: Path,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    source: str | None = None,
    max_seq_len: int | None = None,
) -> Export:
    """Return what the arguments of `titanlite export` ask for. Raises ConfigError if it cannot be exported."""
    import torch  # here, so that --help does not wait for it

    from titanlite.checkpoint.initial_weights import step_folders
    from titanlite.checkpoint.reader import CheckpointReader
    from titanlite.data.open import build_tokenizer
    from titanlite.data.tokenizer import Rows

    path = step_folders(checkpoint)[-1]
    reader = CheckpointReader(path)
    options = model_options(path, reader.state)
    config_file = config_file_of_run(path)
    config = read_config(config_file)
    released = folder_of_source(source, config)
    before = read_json_object(released / "config.json") if released else {}
    lengths = [value_of_run(config, "training", "seq_len"), before.get("max_position_embeddings")]
    max_seq_len = max_seq_len or max((length for length in lengths if type(length) is int), default=0)
    if max_seq_len < 1:
        raise ConfigError([f"--max-seq-len: expected 1 or more, since there is no training.seq_len in {config_file}"])
    assets, built = value_of_run(config, "model", "hf_assets_path") if tokenizer is None else str(tokenizer), None
    if isinstance(assets, str):
        rows = Rows(options.vocab_size, f"model.vocab_size = {options.vocab_size}", "name the run's with --tokenizer")
        built = build_tokenizer(assets).fit(rows)
    kind = dtype or dtype_of(before)
    of_weights = getattr(torch, kind) if kind else reader.dtypes["model.tok_embeddings.weight"]
    return Export(path, reader, options, of_weights, max_seq_len, config, released, built)


def write(export: Export, out: Path) -> None:
    """Write the folder and print what was written. Raises ConfigError if it exists, or the checkpoint is damaged."""
    from titanlite.checkpoint.exported_files import model_card, tokenizer_files
    from titanlite.hf.export import export as write_folder

    path, reader, options, dtype, max_seq_len, config, source, tokenizer = export
    files = {"README.md": model_card(out.name, path, reader.state, config, source)}
    origin = f"none, since there is no model.hf_assets_path in {config_file_of_run(path)}"
    if tokenizer:
        files |= tokenizer_files(tokenizer, max_seq_len) if tokenizer.path else {}
        origin = tokenizer.path or "bytes, so there are no files of it"
        if tokenizer.vocab_size > options.vocab_size:
            n_more = tokenizer.vocab_size - options.vocab_size
            origin += f"; the model has no rows for its {n_more} ids from {options.vocab_size} on"
    special_tokens = {"bos": tokenizer.bos, "eos": tokenizer.eos} if tokenizer else {}
    origins = {"source": source, "files": files, **special_tokens}
    n_files = write_folder(reader, options, out, dtype=dtype, max_seq_len=max_seq_len, **origins)
    print(f"wrote {out}: {path.name}, {str(dtype).removeprefix('torch.')}, safetensors files: {n_files}")
    print(f"tokenizer: {origin}")
    if source:
        before, after = (read_json_object(folder / "config.json") for folder in (source, out))
        changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        print(f"config.json: that of {source}{', except for ' if changed else ''}{', '.join(changed)}")


def dtype_of(config: dict[str, Any]) -> str | None:
    """Return the dtype that a config.json states, if weights can be exported in it."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype if dtype in EXPORT_DTYPES else None


def export_last_step(folder: Path, step: int, dtype: str) -> None:
    """Export the checkpoint of a run's last step, if there is one and it has not been exported, as step-N-hf in the
    folder of checkpoints. Raises ConfigError if it cannot be exported."""
    checkpoint, out = folder / f"step-{step}", folder / f"step-{step}-hf"
    if checkpoint.exists() and not out.exists():
        write(prepare(checkpoint, None if dtype == "auto" else dtype), out)


def folder_of_source(choice: str | None, config: dict[str, Any]) -> Path | None:
    """Return the folder of the released model that a run started from; None if there is none. `choice` is the argument
    --source, None without it. Raises ConfigError if the folder is gone."""
    path = choice or value_of_run(config, "checkpoint", "initial_load_path")
    if choice is None and isinstance(path, str) and state_of(Path(path)):  # another run's checkpoint
        from_hf = value_of_run(config, "model", "flavor") == "from_hf"
        path = value_of_run(config, "model", "hf_assets_path") if from_hf else SEEDED
    if not isinstance(path, str) or path in ("", SEEDED):
        return None
    if not (Path(path) / "config.json").is_file():
        problem = f"{path}: has no config.json, and the exported one has its keys{how_to_download(Path(path))}"
        raise ConfigError([f"{problem}; name that folder with --source, or --source {SEEDED} for a new config.json"])
    return Path(path)


def model_options(path: Path, state: dict[str, Any]) -> Model:
    """Return the [model] section that a checkpoint was saved with. Raises ConfigError if an option is missing."""
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
    """Return the contents of a run's config.toml; nothing if there is none. Raises ConfigError if it is damaged."""
    return read_toml(str(file)) if file.is_file() else {}


def value_of_run(config: dict[str, Any], section: str, key: str) -> Any:
    """Return a value of a run's config.toml; None if it lacks the section or the key."""
    values = config.get(section)
    return values.get(key) if isinstance(values, dict) else None
